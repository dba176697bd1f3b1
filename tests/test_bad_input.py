"""What goes wrong is said in the user's terms: the two numbers, the name, what to try."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import in_subprocess
from test_jit import batch, params, plain_need, step

import vmem_jax
from vmem_jax import BudgetError, Plan, PlanError
from vmem_jax.core.need import need_nbytes


@pytest.mark.parametrize(
    "budget, error, words",
    [
        ("lots", ValueError, r"`budget`='lots' is no size. Give bytes as an int, a size such as"),
        ("12", ValueError, r"`budget`='12' has no unit of B, KB"),
        (-1, ValueError, r"`budget` must be more than 0 bytes. Got -1"),
        (0, ValueError, r"`budget` must be more than 0 bytes. Got 0"),
        (float("nan"), ValueError, r"`budget` must be a positive, finite number. Got nan"),
        (2.5, ValueError, r"`budget`=2.5 is a fraction above 1 .*'2.5GiB'"),
        (True, TypeError, r"`budget` must be .* Got True \(bool\)"),
    ],
)
def test_budget_that_is_none_is_refused_at_once(budget, error, words):
    with pytest.raises(error, match=words):
        vmem_jax.jit(step, budget=budget)


def test_budget_over_the_device():
    with pytest.raises(
        ValueError, match=r"`budget` is 1024.00 TiB, but the device has [\d.]+ GiB. .*'device'"
    ):
        vmem_jax.jit(step, budget="1024TiB")(params(), batch())


def test_budget_below_arguments_and_outputs_names_the_largest():
    with pytest.raises(BudgetError) as caught:
        vmem_jax.jit(step, budget="10KiB")(params(), batch())
    for words in (
        "cannot fit this step in 10.00 KiB",
        "arguments and outputs alone take",
        "the largest:\n     32.00 KiB  x float32[256,32]\n",
        "Donate the state (`donate_argnums`): the results can take the memory of `params`: about",
    ):
        assert words in str(caught.value)
    assert caught.value.budget == 10 * 1024 < caught.value.lowest_peak


@pytest.mark.parametrize("donated, at", [((), "outputs alone"), ((0, 1), "copies of arguments")])
def test_a_peak_is_at_the_arguments_and_outputs_alone_where_it_is_no_more(donated, at):
    """A step that computes nothing: XLA exchanges two donated arguments by way of copies."""
    args = [jax.ShapeDtypeStruct((64, 64), "float32")] * 2
    swap = lambda x, y: (y, x)
    plain = jax.jit(swap, donate_argnums=donated, keep_unused=True).lower(*args).compile()
    with pytest.raises(BudgetError, match=at) as caught:
        vmem_jax.jit(swap, budget=1, donate_argnums=donated).lower(*args).compile()
    assert bool(donated) == bool(plain.memory_analysis().temp_size_in_bytes)
    assert caught.value.lowest_peak == need_nbytes(plain)


def test_budget_that_no_plan_meets_says_how_low_it_gets():
    short = params()[:6], batch()  # the lowest plan of a deep step repeats thousands of its steps
    with pytest.raises(BudgetError) as caught:
        vmem_jax.jit(step, budget=0.3, sub_batches=1)(*short)
    error = caught.value
    assert error.budget == int(0.3 * plain_need(step, *short))
    assert error.budget < error.lowest_peak <= plain_need(step, *short)
    remedies = "`donate_argnums`", "larger `budget`"
    where = "test_jit.py:", "arguments and outputs 80", "made at "
    for words in ("lowest compiled peak is", *where, *remedies):
        assert words in str(error), str(error)
    # the claim holds: that much is reached
    lowest = vmem_jax.jit(step, budget=error.lowest_peak, sub_batches=1)
    compiled = lowest.lower(*short).compile()
    assert compiled.need_nbytes <= error.lowest_peak
    itself = vmem_jax.jit(step, plan=error.lowest_plan)
    assert itself.lower(*short).compile().need_nbytes == error.lowest_peak


def test_unhashable_static_argument():
    fun = lambda x, sizes: x * sizes[0]
    budgeted = vmem_jax.jit(fun, budget="1GiB", static_argnames="sizes")
    for call in (lambda: budgeted(1.0, [2]), lambda: budgeted(1.0, sizes=[2])):
        with pytest.raises(
            ValueError, match=r"static argument `sizes` of `<lambda>` is not hashable: list.*tuple"
        ):
            call()
    assert budgeted(1.0, (2,)) == 2


def test_argument_that_is_no_array():
    with pytest.raises(TypeError, match=r"an argument of type str is no array.*`static_argnames`"):
        vmem_jax.jit(lambda x, mode: x, budget="1GiB")(1.0, "train")
    with pytest.raises(TypeError, match=r"an argument of type object is no array"):
        vmem_jax.jit(lambda x: x, budget="1GiB")({"a": object()})


@pytest.mark.parametrize(
    "options, words",
    [
        ({"static_argnums": 5}, r"`static_argnums` has 5, but `step` has 2 .*: params, x"),
        ({"donate_argnums": (0, 2)}, r"`donate_argnums` has 2, but `step` has 2 positional"),
        ({"static_argnames": "y"}, r"`static_argnames` has 'y', which is no argument of `step`"),
        ({"donate_argnames": ("x", "z")}, r"`donate_argnames` has 'z'"),
        ({"static_argnums": 1, "donate_argnames": "x"}, r"\['x'\] are both static and donated"),
    ],
)
def test_places_and_names_that_are_not_there(options, words):
    with pytest.raises(ValueError, match=words):
        vmem_jax.jit(step, budget="1GiB", **options)


def test_donated_twice():
    add = lambda a, b: a + b
    x = jnp.ones(4)
    with pytest.raises(ValueError, match=r"`a` and `b` are the same array and it is donated"):
        vmem_jax.jit(add, budget="1GiB", donate_argnums=0)(x, x)
    assert not x.is_deleted()
    assert (vmem_jax.jit(add, budget="1GiB")(x, x) == 2).all()
    shared = [jnp.ones(4)] * 2
    with pytest.raises(ValueError, match=r"`state\[0\]` and `state\[1\]` are the same array"):
        vmem_jax.jit(lambda state: state[0], budget="1GiB", donate_argnums=0)(shared)


def test_deleted_argument():
    budgeted = vmem_jax.jit(step, budget="1GiB", donate_argnums=0)
    old = params()
    budgeted(old, batch())
    with pytest.raises((RuntimeError, ValueError), match=r"delete"):
        budgeted(old, batch())


def test_wrong_call_is_pythons_own_error():
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'x'"):
        vmem_jax.jit(step, budget="1GiB")(params())


class Custom(Exception):
    pass


def test_error_of_the_users_function_is_unchanged():
    original = Custom("mine")

    def broken(x):
        raise original

    with pytest.raises(Custom) as caught:
        vmem_jax.jit(broken, budget="1GiB")(1.0)
    assert caught.value is original
    with pytest.raises(TypeError, match=r"dot_general requires contracting dimensions|shape"):
        vmem_jax.jit(jnp.dot, budget="1GiB")(jnp.ones((2, 3)), jnp.ones((2, 3)))
    with pytest.raises(jax.errors.TracerBoolConversionError):
        vmem_jax.jit(lambda x: 1 if x > 0 else 2, budget="1GiB")(1.0)


def test_failed_call_leaves_no_entry():
    budgeted = vmem_jax.jit(step, budget=0.3, sub_batches=1)
    for _ in range(2):
        with pytest.raises(BudgetError, match="lowest compiled peak"):
            budgeted(params()[:3], batch())
    assert not budgeted._entries


def test_plans_that_do_not_belong(tmp_path):
    path = tmp_path / "plan.json"
    vmem_jax.jit(step, budget=0.7).plan(params(), batch()).save(path)
    text = path.read_text()

    def edited(**changes):
        return Plan.from_json(json.dumps({**json.loads(text), **changes}))

    path.write_text(text[: len(text) // 2])
    with pytest.raises(PlanError, match=r"plan.json` is no whole plan: .* cut off or edited"):
        Plan.load(path)
    with pytest.raises(PlanError, match=r"has plan format 99; this version of vmem_jax reads \d"):
        edited(format=99)
    order = json.loads(text)["order"]
    for wrong, words in (
        (order[1:], "never runs|unmade"),
        (order[::-1], "unmade"),
        ([*order, 10**6], "names step 1000000 of"),
    ):
        with pytest.raises(PlanError, match=rf"not valid for its step: .*({words})"):
            vmem_jax.jit(step, plan=edited(order=wrong))(params(), batch())
    with pytest.raises(PlanError, match=r"made for another step"):
        vmem_jax.jit(step, plan=edited(program="0" * 16))(params(), batch())


def test_unknown_target():
    with pytest.raises(ValueError, match=r"unknown target 'h9000'; known targets: .*h200"):
        vmem_jax.jit(step, budget="1GiB").plan(params(), batch(), target="h9000")


def test_arguments_on_different_devices():
    out = in_subprocess(
        """
        import jax, jax.numpy as jnp, vmem_jax
        a, b = (jax.device_put(jnp.ones(4), d) for d in jax.devices())
        try:
            vmem_jax.jit(lambda a, b: a + b, budget="1GiB")(a, b)
        except ValueError as error:
            print(type(error).__name__, error)
        on_second = vmem_jax.jit(lambda a: a + 1, budget="1GiB")(b)
        assert on_second.devices() == {jax.devices()[1]}
        """,
        2,
    )
    assert "incompatible devices" in out


def test_numpy_arguments_are_fine():
    assert vmem_jax.jit(lambda x: x.sum(), budget="1GiB")(np.ones((2, 2), np.float32)) == 4


def test_numbers_of_numpy_are_fine():
    numpy = {"budget": np.float32(0.5), "sub_batches": np.int64(2), "density": np.float32(0.5)}
    python = {"budget": 0.5, "sub_batches": 2, "density": 0.5}
    settings = [vmem_jax.jit(step, **each)._settings for each in (numpy, python)]
    for name in ("budget", "sub_batches", "density"):
        ours, plain = (getattr(each, name) for each in settings)
        assert ours == plain and type(ours) is type(plain)
    for donated in (0, np.int64(0), np.array(0), np.array([0]), [np.int32(0)]):
        x = jnp.ones(4)
        vmem_jax.jit(lambda x: x + 1, budget="1GiB", donate_argnums=donated)(x)
        assert x.is_deleted()
