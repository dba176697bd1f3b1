"""Which slices a compiled loop copies: rules of XLA:GPU beside what the program says."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

import vmem_jax
from vmem_jax import jax_compat as compat
from vmem_jax.compiler import compile as compile_module
from vmem_jax.compiler import places
from vmem_jax.devices.targets import target
from vmem_jax.rewrite import bodies

DOWN, UP = (12, -4), (0, 4)


def loop(
    rule: tuple[int, int],
    place: str = "subtract(%three, %number)",
    counted: str = "add(%number, %one)",
    first: str = "constant(0)",
    op: str = "dynamic-slice(%stack.1, %at.1)",
) -> str:
    """A loop of four iterations, which copies slices of f32[4] by `rule`: (first byte, bytes that an
    iteration adds)."""
    offset, stride = rule
    config = (
        f'"dynamic_slice_config":{{"loop_index":"0","byte_offset":"{offset}",'
        f'"byte_stride":"{stride}"}}'
    )
    rest = 'condition=%less, body=%body, backend_config={"known_trip_count":{"n":"4"}}'
    return f"""
%copied (stack.1: f32[4], at.1: s32[]) -> f32[1] {{
  %stack.1 = f32[4]{{0:S(5)}} parameter(0)
  %at.1 = s32[] parameter(1)
  %new = f32[1]{{0}} constant({{7}})
  ROOT %slice = f32[1]{{0}} {op}, dynamic_slice_sizes={{1}}, backend_config={{{config}}}
}}

%places (x: s32[], y: s32[]) -> s32[] {{
  %x = s32[] parameter(0)
  %y = s32[] parameter(1)
  ROOT %difference = s32[] subtract(%x, %y)
}}

%body (carry: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %carry = (s32[], f32[4]{{0:S(5)}}) parameter(0)
  %number = s32[] get-tuple-element(%carry), index=0
  %stack = f32[4]{{0:S(5)}} get-tuple-element(%carry), index=1
  %one = s32[] constant(1)
  %three = s32[] constant(3)
  %four = s32[] constant(4)
  %more = s32[] add(%number, %four)
  %is_less = pred[] compare(%number, %one), direction=LT
  %pair = (s32[], f32[4]{{0:S(5)}}) tuple(%number, %stack)
  %fence = (s32[], f32[4]{{0:S(5)}}) opt-barrier(%pair)
  %behind = s32[] get-tuple-element(%fence), index=0
  %place = s32[] {place}
  %start = ((f32[4], s32[]), f32[1], u32[]) fusion-start(%stack, %place), calls=%copied
  %next = s32[] {counted}
  ROOT %out = (s32[], f32[4]{{0:S(5)}}) tuple(%next, %stack)
}}

ENTRY %main (stack.2: f32[4]) -> (s32[], f32[4]) {{
  %stack.2 = f32[4]{{0:S(5)}} parameter(0)
  %zero = s32[] {first}
  %given = (s32[], f32[4]{{0:S(5)}}) tuple(%zero, %stack.2)
  ROOT %loop = (s32[], f32[4]{{0:S(5)}}) while(%given), {rest}
}}
"""


@pytest.mark.parametrize(
    "text, right",
    [
        (loop(DOWN), True),
        (loop(UP), False),  # JAX 0.10.2
        (loop(UP, place="copy(%number)"), True),
        (loop(UP, place="copy(%number)", first="constant(1)"), False),
        (loop(DOWN, place="fusion(%three, %number), kind=kLoop, calls=%places"), True),
        (loop(UP, place="fusion(%three, %number), kind=kLoop, calls=%places"), False),
        (
            loop(DOWN, "fusion(%three, %number), calls=%places").replace("ROOT %diff", "%diff"),
            False,
        ),
        (loop(DOWN, place="fusion(%three, %number), kind=kLoop"), False),
        (loop(UP, place="copy(%number)", counted="add(%behind, %one)"), True),
        (
            loop(UP, "copy(%number)", "subtract(%behind, %one)", "constant(3)"),  # JAX 0.11.2
            False,
        ),
        (loop(DOWN, "copy(%number)", "subtract(%behind, %one)", "constant(3)"), True),
        (loop(UP, place="copy(%number)", counted="remainder(%number, %three)"), False),
        (loop(DOWN, op="dynamic-update-slice(%stack.1, %new, %at.1)"), True),
        (loop(UP, op="dynamic-update-slice(%stack.1, %new, %at.1)"), False),
        (loop(UP, place="select(%is_less, %number, %number)"), True),
        (loop((4, 0), place="constant({1})"), True),
        (loop((4, 0), place="constant(1.5)"), False),
        (loop(UP, place="select(%is_less, %number, %more)"), False),
        (loop(UP, place="clamp(%one, %number, %three)"), False),
        (loop(UP, place="minimum(%number, %one)").replace('"n":"4"', '"n":"2"'), True),
        (loop(UP, place="minimum(%number, %one)"), False),
        (loop(DOWN).replace("{0}", "").replace("{0:S(5)}", ""), True),
        (loop((3, -1)).replace("f32[", "pred["), True),
        (loop(DOWN).replace("f32[", "pred["), False),
        (loop(UP).replace("dynamic_slice_config", "other"), True),
    ],
)
def test_rules_say_what_the_program_does(text, right):
    assert places.are_right(text) == right


def test_numbers_are_added_to_in_front_of_barriers_and_arrays_behind():
    def body(number, total, x):
        number, total, x = jax.lax.optimization_barrier((number, total, x))
        return number - 1, total + 1, x * 2

    traced = jax.jit(body).trace(jnp.int32(3), jnp.ones(4), jnp.ones(4)).jaxpr
    opened = compat.open_jaxpr(bodies._counting(traced, 0, 2))
    [barrier, number, total, _] = opened.eqns
    assert number.invars[0] is opened.invars[0]
    assert total.invars[0] is barrier.outvars[1]


def hosted_step():
    """A step of scanned layers whose state is in host memory, and its arguments."""
    target("h200")
    layers, width, tx = 8, 256, optax.adamw(1e-3)
    host = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0], memory_kind="pinned_host")

    def step(state, x):
        weights, moments = state
        layer = lambda y, w: (y + 0.1 * jnp.tanh(jnp.tanh(y @ w["a"]) @ w["b"]), None)
        loss = lambda weights: jnp.square(jax.lax.scan(layer, x, weights)[0]).mean()
        updates, moments = tx.update(jax.grad(loss)(weights), moments, weights)
        return optax.apply_updates(weights, updates), moments

    w = dict.fromkeys("ab", jax.ShapeDtypeStruct((layers, width, width), "float32"))
    place = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=host) if a.ndim == 3 else a
    state = jax.tree.map(place, (w, jax.eval_shape(tx.init, w)))
    return step, (state, jax.ShapeDtypeStruct((64, width), "float32"))


def compiled_text():
    step, args = hosted_step()
    budgeted = vmem_jax.jit(step, budget="1GiB", donate_argnums=0)
    return budgeted._entry_for(args, {}, "h200").best.compiled.as_text()


@pytest.mark.gpu_compile
def test_loops_copy_the_slices_of_their_layers():
    """Forwards in order, backwards from the last one on."""
    text, one = compiled_text(), 4 * 256 * 256
    assert places.are_right(text)
    rules = [(rule["byte_offset"], rule["byte_stride"]) for rule in places.rules(text)]
    assert {(0, one), (7 * one, -one)} <= {*rules}


@pytest.mark.gpu_compile
def test_where_a_rule_is_wrong_nothing_is_copied_by_one(monkeypatch):
    """And the log says so."""
    monkeypatch.setattr(places, "are_right", lambda text: "dynamic_slice_config" not in text)
    said: list[str] = []
    monkeypatch.setattr(compile_module, "warn_once", lambda name, text: said.append(text))
    assert places.rules(compiled_text()) == []
    assert said and all("wrong slices" in text for text in said)
