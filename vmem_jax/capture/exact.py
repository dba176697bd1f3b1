"""Exact residual rules: the backward pass reads a smaller value, the results keep every bit.

AD saves what its formulas name, not what is smallest. Where a forward value is large and a smaller
or already saved value gives the backward pass bit for bit the same numbers (NaN, infinities, signed
zeros and denormals included), a rule of the table `RULES` makes the program read that one. The pass
works on one flat jaxpr of forward, backward and update. A rule fires only if the large value is
then read by no backward equation: elsewhere it would add work and free nothing.

What the table leaves alone, on purpose:

* Leaky ReLU, ELU: `slope * x` underflows to -0 for a tiny negative `x`, and `expm1` promises no
  sign, so the output's sign is not the mask. The saved bool is one byte an element already.
* `abs` loses the sign that its derivative needs.
* `jnp.maximum(x, 0)` splits ties: it also asks whether `x == 0`, which the output cannot answer.
* Dropout: AD saves the bool mask already, neither the random bits nor the uniforms.
* tanh, sigmoid, SiLU, GELU, softmax, log_softmax: AD saves several values of one input (`y` and
  `1 - y * y`, `exp(x - max)` and its quotient). They are elementwise in one saved value and small
  row statistics, so the fusion-aware capture recomputes them. An output in place of the input, such
  as `softmax * sum` for `exp`, would round differently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from vmem_jax import jax_compat as compat
from vmem_jax.capture.flatten import drop_dead
from vmem_jax.capture.primitives import Class, class_of, nbytes
from vmem_jax.capture.unpool import MAX_WINDOW, unpool, window_index
from vmem_jax.jax_compat import Atom, ClosedJaxpr, Literal, Var

# A JaxprEqn: JAX declares its atoms and types too loosely for a type checker.
Equation = Any

# Primitives that keep a constant fill, those that keep every element, and swapped comparisons.
_FILLS = ("broadcast_in_dim", "convert_element_type", "reshape", "copy", "stop_gradient")
_VIEWS = ("transpose", "reshape", "squeeze", "broadcast_in_dim", "expand_dims")
_FLIPPED = {"gt": "lt", "lt": "gt", "ge": "le", "le": "ge"}


@dataclass(frozen=True)
class Applied:
    """One firing of a rule.

    Attributes:
        rule: name of the rule.
        name_stack: name stack of the equation that it replaced.
        freed: bytes of the forward value that no backward equation reads any more.
    """

    rule: str
    name_stack: str
    freed: int


@dataclass(frozen=True)
class Rule:
    """A replacement that keeps every bit.

    Attributes:
        name: short name, as reports show it.
        why_exact: the argument, NaN and signed zeros included.
        apply: records its edits in the program and says where it fired.
    """

    name: str
    why_exact: str
    apply: Callable[[_Program], list[Applied]]


def apply_exact_rules(jaxpr: ClosedJaxpr) -> tuple[ClosedJaxpr, tuple[Applied, ...]]:
    """Applies `RULES` in order to a flat jaxpr of a training step.

    Args:
        jaxpr: a whole step as `flatten` leaves it: no calls, no dead equations.

    Returns:
        A program with bitwise the same results, and every firing.
    """
    applied: list[Applied] = []
    for rule in RULES:
        program = _Program(jaxpr)
        if fired := rule.apply(program):
            jaxpr = program.edited()
            applied += fired
    return jaxpr, tuple(applied)


class _Program:
    """A flat jaxpr with its def-use chains, and the edits that one rule makes to it."""

    def __init__(self, closed: ClosedJaxpr) -> None:
        self.closed = closed
        self.eqns: Sequence[Equation] = compat.open_jaxpr(closed).eqns
        self.results = {v for v in compat.open_jaxpr(closed).outvars if isinstance(v, Var)}
        self.producer: dict[Var, int] = {}
        self.consumers: dict[Var, list[int]] = {}
        self.late: set[int] = set()  # equations that need a cotangent, or belong to those
        self.replaced: dict[int, list[Equation]] = {}
        self.inserted: dict[int, list[Equation]] = {}  # after an equation
        for i, eqn in enumerate(self.eqns):
            inputs = {v for v in eqn.invars if isinstance(v, Var)}
            for v in inputs:
                self.consumers.setdefault(v, []).append(i)
            if (
                "transpose(" in compat.name_stack(eqn)
                or eqn.primitive.name == "select_and_scatter_add"
                or any(self.producer.get(v) in self.late for v in inputs)
            ):
                self.late.add(i)
            self.producer.update((v, i) for v in eqn.outvars)
        # A cheap forward equation that only the backward pass reads (a mask, a derivative) may as
        # well run there: what it reads counts as read by the backward pass. Not so through the
        # heavy ones, or a step that returns no loss would be backward from its first layer on.
        self.backward = set(self.late)
        for i in reversed(range(len(self.eqns))):
            outs = self.eqns[i].outvars
            users = [j for v in outs for j in self.users(v)]
            if (
                class_of(self.eqns[i]) in (Class.VIEW, Class.FUSIBLE)
                and self.backward.issuperset(users)
                and self.results.isdisjoint(outs)
            ):
                self.backward.add(i)

    def source(self, atom: Atom) -> Equation | None:
        """The equation that defines a value; None for literals, arguments and constants."""
        i = self.producer.get(atom) if isinstance(atom, Var) else None
        return None if i is None else self.eqns[i]

    def users(self, var: Var) -> list[int]:
        """Indices of the equations that read a value."""
        return self.consumers.get(var, [])

    def only_user(self, var: Var) -> int | None:
        """Index of the one equation that reads a value, None if it has several or is a result."""
        users = self.users(var)
        return users[0] if len(users) == 1 and var not in self.results else None

    def constant(self, atom: Atom) -> Any:
        """The number that fills an array, as a NumPy scalar of its dtype, or None."""
        if isinstance(atom, Literal):
            aval: Any = atom.aval
            return None if aval.shape else np.asarray(atom.val).astype(aval.dtype)
        eqn = self.source(atom)
        if eqn is None or eqn.primitive.name not in _FILLS:
            return None
        value = self.constant(eqn.invars[0])
        return None if value is None else value.astype(eqn.outvars[0].aval.dtype)

    def edited(self) -> ClosedJaxpr:
        """The program after the edits, without what they left dead."""
        opened = compat.open_jaxpr(self.closed)
        eqns: list[Equation] = []
        for i, eqn in enumerate(self.eqns):
            eqns += self.replaced.get(i, [eqn]) + self.inserted.get(i, [])
        consts = compat.constants(self.closed)
        parts = (opened.constvars, consts, opened.invars, opened.outvars, eqns)
        return drop_dead(compat.close(*parts, like=self.closed))


def _relu_mask(program: _Program) -> list[Applied]:
    """A backward comparison of a clamp's input with a constant becomes one of its output."""
    applied: list[Applied] = []
    for i, eqn in enumerate(program.eqns):
        clamp = None if i in program.late else _clamp(program, eqn)
        if clamp is None:
            continue
        x, lo, hi = clamp
        first, y = i, eqn.outvars[0]
        # relu6 is min(max(x, 0), 6), and the next layer reads the last of the chain.
        while (j := program.only_user(y)) is not None and j not in program.late:
            if (clamp := _clamp(program, program.eqns[j])) is None:
                break
            lo, hi = max(lo, clamp[1]), min(hi, clamp[2])
            i, y = j, program.eqns[j].outvars[0]
        readers = [j for j in program.users(x) if j in program.backward and j != first]
        if not readers or program.source(x) is None:  # a step's argument stays in memory anyway
            continue
        masks = [_as_mask(program, j, x, y, lo, hi) if j > i else None for j in readers]
        if None not in masks:
            program.replaced.update((j, [mask]) for j, mask in zip(readers, masks, strict=True))
            stack = compat.name_stack(program.eqns[readers[0]])
            applied.append(Applied("relu_mask", stack, nbytes(x.aval)))
    return applied


def _clamp(program: _Program, eqn: Equation) -> tuple[Atom, float, float] | None:
    """`(x, lo, hi)` if an equation clamps the floats x between constants of their dtype."""
    name = eqn.primitive.name
    if name not in ("max", "min", "clamp") or not _is_float(eqn.outvars[0]):
        return None
    if name == "clamp":
        lo, x, hi = eqn.invars
        bounds = program.constant(lo), program.constant(hi)
    else:
        bound, x = eqn.invars if program.constant(eqn.invars[1]) is None else eqn.invars[::-1]
        value = program.constant(bound)
        bounds = (value, math.inf) if name == "max" else (-math.inf, value)
    if None in bounds or isinstance(x, Literal) or x.aval.shape != eqn.outvars[0].aval.shape:
        return None
    return x, float(bounds[0]), float(bounds[1])


def _as_mask(program: _Program, i: int, x: Atom, y: Atom, lo: float, hi: float) -> Equation | None:
    """Equation `i`, a comparison of x with a constant, on y = clamp(lo, x, hi) if that is exact."""
    eqn = program.eqns[i]
    if eqn.primitive.name not in _FLIPPED:
        return None
    a, b = eqn.invars
    name = eqn.primitive.name if a is x else _FLIPPED[eqn.primitive.name]
    limit = program.constant(b if a is x else a)
    if limit is None:
        return None
    exact = lo <= limit < hi if name in ("gt", "le") else lo < limit <= hi
    return eqn.replace(invars=[y if v is x else v for v in eqn.invars]) if exact else None


def _max_pool_index(program: _Program) -> list[Applied]:
    """A pool's backward reads a one-byte index of the pooled shape, not the pool's input."""
    applied: list[Applied] = []
    for i, eqn in enumerate(program.eqns):
        forward = _forward_pool(program, eqn)
        if forward is None:
            continue
        (grad, y), out = eqn.invars, eqn.outvars[0]
        views, fold = _mask_after(program, out)
        reads, at, ours = [y], forward, {i}
        if fold is not None:
            mask = program.eqns[fold].invars[0]
            at = max(at, program.producer[mask])
            reads, ours = [y, mask], {i, program.producer[mask]}
        if not _is_freed(program, y, ours):
            continue
        window = tuple(eqn.params["window_dimensions"])
        index, code = _spliced(
            lambda y, *mask, w=window, v=views: window_index(
                w, y, *(_in_layout_before(m, v) for m in mask)
            ),
            reads,
            program.eqns[forward],
        )
        program.inserted.setdefault(at, []).extend(index)
        if fold is not None:
            # The index holds the mask now: the select's result is the unpooled gradient, seen
            # through the views in between.
            result = program.eqns[fold].outvars[0]
            program.replaced[fold] = []
            if views:
                last = program.producer[views[-1].outvars[0]]
                program.replaced[last] = [views[-1].replace(outvars=[result])]
            else:
                out = result
        program.replaced[i], _ = _spliced(
            lambda g, c, w=window, s=y.aval.shape: unpool(w, s, g, c), [grad, code], eqn, out
        )
        applied.append(Applied("max_pool_index", compat.name_stack(eqn), nbytes(y.aval)))
    return applied


def _forward_pool(program: _Program, eqn: Equation) -> int | None:
    """The pool of a backward scatter, if its windows tile the input and their places fit a byte."""
    if eqn.primitive.name != "select_and_scatter_add":
        return None
    grad, y = eqn.invars
    window = tuple(eqn.params["window_dimensions"])
    want = {
        "window_dimensions": window,
        "window_strides": window,
        "padding": ((0, 0),) * len(window),
        "base_dilation": (1,) * len(window),
        "window_dilation": (1,) * len(window),
    }
    if (
        any(tuple(eqn.params[k]) != want[k] for k in ("window_strides", "padding"))
        or eqn.params["select_prim"].name != "ge"
        or not 1 < math.prod(window) <= MAX_WINDOW
        or not (isinstance(y, Var) and _is_float(y) and grad.aval.size)
        # traced equations would not carry an explicitly sharded type
        or any(getattr(getattr(y.aval, "sharding", None), "spec", ()))
    ):
        return None
    for i in program.users(y):
        pool = program.eqns[i]
        if pool.primitive.name == "reduce_window_max" and i not in program.late:
            if all(tuple(pool.params[k]) == v for k, v in want.items()):
                return i
    return None


def _mask_after(program: _Program, var: Atom) -> tuple[list[Equation], int | None]:
    """The `select_n(mask, 0, value)` that alone reads a value, and the views in between.

    Per-example models pool one image at a time, so that vmap leaves dimensions of size one and
    transposes between the pool and the ReLU before it.
    """
    views: list[Equation] = []
    while (i := program.only_user(var)) is not None and _is_view(program.eqns[i]):
        views.append(program.eqns[i])
        var = program.eqns[i].outvars[0]
    if i is None or program.eqns[i].primitive.name != "select_n":
        return [], None
    mask, zero, *values = program.eqns[i].invars
    fill = program.constant(zero)
    if (
        values == [var]
        and fill is not None
        and fill == 0
        and not np.signbit(fill)
        and mask.aval.shape == var.aval.shape
        and program.only_user(mask) == i
        and program.producer.get(mask, i) not in program.late
    ):
        return views, i
    return [], None


def _is_freed(program: _Program, var: Var, ours: set[int]) -> bool:
    """Whether no backward equation beside `ours` needs a value or what it is a view of."""
    while (eqn := program.source(var)) is not None:
        for i in program.backward.intersection(program.users(var)) - ours:
            # A forward mask is a one-byte residual of its own and does not keep its input.
            if i in program.late or any(v.aval.dtype != bool for v in program.eqns[i].outvars):
                return False
        if not _is_view(eqn):
            return True
        var = eqn.invars[0]
    return False


def _in_layout_before(mask: jax.Array, views: Sequence[Equation]) -> jax.Array:
    """A mask of the last view's result, in the layout of what the first view reads."""
    for view in reversed(views):
        if view.primitive.name == "transpose":
            mask = lax.transpose(mask, tuple(np.argsort(view.params["permutation"])))
        else:
            mask = lax.reshape(mask, view.invars[0].aval.shape)
    return mask


def _spliced(
    fn: Callable[..., jax.Array], args: Sequence[Atom], like: Equation, out: Var | None = None
) -> tuple[list[Equation], Var]:
    """Traces `fn` to equations on `args`, with the name and source line of the equation `like`."""
    avals = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in args]
    traced = compat.open_jaxpr(jax.make_jaxpr(fn)(*avals))
    env: dict[Var, Atom] = dict(zip(traced.invars, args, strict=True))
    env[traced.outvars[0]] = out or compat.new_var(traced.outvars[0].aval)
    eqns = []
    for eqn in traced.eqns:
        env.update((v, compat.new_var(v.aval)) for v in eqn.outvars if v not in env)
        eqns.append(
            eqn.replace(
                invars=[v if isinstance(v, Literal) else env[v] for v in eqn.invars],
                outvars=[env[v] for v in eqn.outvars],
                source_info=like.source_info,
                ctx=like.ctx,
            )
        )
    return eqns, env[traced.outvars[0]]


def _is_view(eqn: Equation) -> bool:
    """Whether an equation only rearranges all elements of its input."""
    (x, *rest), y = eqn.invars, eqn.outvars[0]
    if rest or isinstance(x, Literal):
        return False
    if eqn.primitive.name == "reduce_sum":  # over dimensions of size one, as vmap leaves them
        return all(x.aval.shape[d] == 1 for d in eqn.params["axes"])
    if eqn.primitive.name == "reshape" and eqn.params["dimensions"] is not None:
        return False
    return eqn.primitive.name in _VIEWS and x.aval.size == y.aval.size


def _is_float(atom: Atom) -> bool:
    return bool(jnp.issubdtype(atom.aval.dtype, jnp.floating))


# The order matters: the first rule turns gt(x, 0) into gt(relu(x), 0), and the second then frees
# relu(x) where it folds that mask into the pool's index.
RULES: tuple[Rule, ...] = (
    Rule(
        "relu_mask",
        "For y = clamp(lo, x, hi) and lo <= c < hi, y > c exactly where x > c, and y <= c exactly "
        "where x <= c; for lo < c <= hi the same holds of < and >=. A NaN x makes y NaN, and all "
        "four are false. Comparisons ignore the sign of zero, and a clamp never rounds.",
        _relu_mask,
    ),
    Rule(
        "max_pool_index",
        "Windows that tile the input give each element at most one addend, 0 + g. The index "
        "repeats the scatter's own scan (row-major, the current element stays if it is >= the "
        "next), so ties and NaN select the same element; -0 becomes +0 as in 0 + g, the rest is "
        "+0. A select(mask, 0, .) that follows only changes the chosen element, since the others "
        "are +0 either way: the mask's value there joins the index.",
        _max_pool_index,
    ),
)
