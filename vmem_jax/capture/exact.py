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

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from vmem_jax import jax_compat as compat
from vmem_jax.capture import overlap
from vmem_jax.capture.editor import Editor, Equation, is_view, spliced
from vmem_jax.capture.primitives import nbytes
from vmem_jax.capture.unpool import MAX_WINDOW, unpool, window_index
from vmem_jax.jax_compat import Atom, ClosedJaxpr, Literal, Var

_WINDOW = ("window_dimensions", "window_strides", "padding")

# Each offset in an overlapping window is a term of a sum over the input: a 7x7 window is 49.
_MOST_OVERLAPPING = 49

# Comparisons with their operands swapped.
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
    apply: Callable[[Editor], list[Applied]]


def apply_exact_rules(jaxpr: ClosedJaxpr) -> tuple[ClosedJaxpr, tuple[Applied, ...]]:
    """Applies `RULES` in order to a flat jaxpr of a training step.

    Args:
        jaxpr: a whole step as `flatten` leaves it: no calls, no dead equations.

    Returns:
        A program with bitwise the same results, and every firing.
    """
    applied: list[Applied] = []
    for rule in RULES:
        editor = Editor(jaxpr)
        if fired := rule.apply(editor):
            jaxpr = editor.edited()
            applied += fired
    return jaxpr, tuple(applied)


def _larger_of_two(editor: Editor) -> list[Applied]:
    """Whether the larger of two values is one of them becomes a comparison of the two."""
    applied: list[Applied] = []
    for i, eqn in enumerate(editor.eqns):
        if eqn.primitive.name != "eq":
            continue
        for x, y in (eqn.invars, eqn.invars[::-1]):
            made = editor.source(y)
            if made is None or made.primitive.name not in ("max", "min"):
                continue
            first, second = made.invars
            if not (_is_same(editor, x, first) or _is_same(editor, x, second)):
                continue
            other = second if _is_same(editor, x, first) else first
            primitive = lax.ge_p if made.primitive.name == "max" else lax.le_p
            editor.replaced[i] = [eqn.replace(primitive=primitive, invars=[x, other])]
            applied.append(Applied("larger_of_two", compat.name_stack(eqn), nbytes(y.aval)))
            break
    return applied


def _is_same(editor: Editor, a: Atom, b: Atom) -> bool:
    if a is b:
        return True
    constant = editor.constant(a) if isinstance(a, Literal) else None
    return constant is not None and isinstance(b, Literal) and constant == editor.constant(b)


def _relu_mask(editor: Editor) -> list[Applied]:
    """A backward comparison of a clamp's input with a constant becomes one of its output."""
    applied: list[Applied] = []
    for i, eqn in enumerate(editor.eqns):
        clamp = None if i in editor.late else _clamp(editor, eqn)
        if clamp is None:
            continue
        x, lo, hi = clamp
        last, y = i, eqn.outvars[0]
        # relu6 is min(max(x, 0), 6), and the next layer reads the last of the chain.
        while (j := editor.only_user(y)) is not None and j not in editor.late:
            if (clamp := _clamp(editor, editor.eqns[j])) is None:
                break
            lo, hi = max(lo, clamp[1]), min(hi, clamp[2])
            last, y = j, editor.eqns[j].outvars[0]
        readers = [j for j in editor.users(x) if j in editor.backward and j != i]
        if not readers or editor.source(x) is None:  # a step's argument stays in memory anyway
            continue
        masks = [_as_mask(editor, j, x, y, lo, hi) for j in readers]
        uses = [k for j in readers for k in editor.users_of(j)]
        if None in masks or min(uses, default=last) < last:
            continue
        for j, mask in zip(readers, masks, strict=True):
            editor.replaced[j] = [mask] if j > last else []
            if j < last:  # a mask that was taken before the clamp
                editor.inserted.setdefault(last, []).append(mask)
        stack = compat.name_stack(editor.eqns[readers[0]])
        applied.append(Applied("relu_mask", stack, nbytes(x.aval)))
    return applied


def _clamp(editor: Editor, eqn: Equation) -> tuple[Atom, float, float] | None:
    """`(x, lo, hi)` if an equation clamps the floats x between constants of their dtype."""
    name = eqn.primitive.name
    if name not in ("max", "min", "clamp") or not _is_float(eqn.outvars[0]):
        return None
    if name == "clamp":
        lo, x, hi = eqn.invars
        bounds = editor.constant(lo), editor.constant(hi)
    else:
        bound, x = eqn.invars if editor.constant(eqn.invars[1]) is None else eqn.invars[::-1]
        value = editor.constant(bound)
        bounds = (value, math.inf) if name == "max" else (-math.inf, value)
    if None in bounds or isinstance(x, Literal) or x.aval.shape != eqn.outvars[0].aval.shape:
        return None
    return x, float(bounds[0]), float(bounds[1])


def _as_mask(editor: Editor, i: int, x: Atom, y: Atom, lo: float, hi: float) -> Equation | None:
    """Equation `i`, a comparison of x with a constant, on y = clamp(lo, x, hi) if that is exact."""
    eqn = editor.eqns[i]
    if eqn.primitive.name not in _FLIPPED:
        return None
    a, b = eqn.invars
    name = eqn.primitive.name if a is x else _FLIPPED[eqn.primitive.name]
    limit = editor.constant(b if a is x else a)
    if limit is None:
        return None
    exact = lo <= limit < hi if name in ("gt", "le") else lo < limit <= hi
    return eqn.replace(invars=[y if v is x else v for v in eqn.invars]) if exact else None


def _max_pool_index(editor: Editor) -> list[Applied]:
    """A pool's backward reads a one-byte index of the pooled shape, not the pool's input."""
    applied: list[Applied] = []
    for i, eqn in enumerate(editor.eqns):
        forward = _forward_pool(editor, eqn)
        if forward is None:
            continue
        (grad, y), out = eqn.invars, eqn.outvars[0]
        views, fold = _mask_after(editor, out)
        at, reads, ours = forward, [y], {i}
        if fold is not None:
            reads.append(mask := editor.eqns[fold].invars[0])
            ours.add(editor.producer[mask])
        if not _is_freed(editor, y, ours):
            continue
        if fold is not None:
            source = editor.eqns[editor.producer[mask]]
            at = max(at, *editor.producers(source))
            editor.replaced[editor.producer[mask]] = []
            editor.inserted.setdefault(at, []).append(source)
        window = tuple(eqn.params["window_dimensions"])
        index, code = spliced(
            lambda y, *mask, w=window, v=views: window_index(
                w, y, *(_in_layout_before(m, v) for m in mask)
            ),
            reads,
            editor.eqns[forward],
        )
        editor.inserted.setdefault(at, []).extend(index)
        if fold is not None:
            # The index holds the mask now: what the select gave is the unpooled gradient, seen
            # through the views.
            editor.replaced[fold] = []
            if views:
                last = views[-1].replace(outvars=editor.eqns[fold].outvars)
                editor.replaced[editor.producer[views[-1].outvars[0]]] = [last]
            else:
                out = editor.eqns[fold].outvars[0]
        editor.replaced[i], _ = spliced(
            lambda g, c, w=window, s=y.aval.shape: unpool(w, s, g, c), [grad, code], eqn, out
        )
        applied.append(Applied("max_pool_index", compat.name_stack(eqn), nbytes(y.aval)))
    return applied


def _max_pool_overlap(editor: Editor) -> list[Applied]:
    """A pool with overlapping or padded windows: its backward is a sum over an index, no scatter."""
    applied: list[Applied] = []
    for i, eqn in enumerate(editor.eqns):
        if eqn.primitive.name != "select_and_scatter_add":
            continue
        params = {k: tuple(eqn.params[k]) for k in _WINDOW}
        grad, y = eqn.invars
        forward = (
            [
                j
                for j in editor.users(y)
                if editor.eqns[j].primitive.name == "reduce_window_max"
                and j not in editor.late
                and all(tuple(editor.eqns[j].params[k]) == params[k] for k in _WINDOW)
            ]
            if isinstance(y, Var)
            else []
        )
        if (
            not forward
            or eqn.params["select_prim"].name != "ge"
            or not 1 < math.prod(params["window_dimensions"]) <= _MOST_OVERLAPPING
            or not (_is_float(y) and grad.aval.size)
            or any(getattr(getattr(y.aval, "sharding", None), "spec", ()))
        ):
            continue
        # where a mask reads the pool's input in the backward pass, the index need not be held
        is_there = not editor.backward.isdisjoint({*editor.users(y)} - {i})
        made = functools.partial(overlap.index_p.bind, **params)
        index, code = spliced(made, [y], editor.eqns[forward[0]])
        summed = functools.partial(overlap.gradient_p.bind, **params, shape=y.aval.shape)
        gradient, _ = spliced(summed, [grad, code], eqn, eqn.outvars[0])
        editor.replaced[i] = [*index, *gradient] if is_there else gradient
        if not is_there:
            editor.inserted.setdefault(forward[0], []).extend(index)
        applied.append(Applied("max_pool_overlap", compat.name_stack(eqn), nbytes(y.aval)))
    return applied


def _label_scatter(editor: Editor) -> list[Applied]:
    """The gradient of picking one entry of each row is a comparison, no array of zeros to add to."""
    applied: list[Applied] = []
    for i, eqn in enumerate(editor.eqns):
        at = _picked(editor, eqn)
        if at is None:
            continue
        _, index, update = eqn.invars
        out = eqn.outvars[0]
        row = tuple(1 if d == at else n for d, n in enumerate(out.aval.shape))

        chosen = functools.partial(_entries, out.aval.shape, row, at)
        editor.replaced[i], _ = spliced(chosen, [index, update], eqn, out)
        applied.append(Applied("label_scatter", compat.name_stack(eqn), nbytes(out.aval)))
    return applied


def _entries(
    shape: tuple[int, ...], row: tuple[int, ...], at: int, index: jax.Array, update: jax.Array
) -> jax.Array:
    """Zeros of `shape` with `update`, of which each row has one number, at `index` in its row."""
    zero = jnp.zeros((), update.dtype)
    spread = lambda x: lax.broadcast_in_dim(x.reshape(row), shape, range(len(shape)))
    here = lax.eq(lax.broadcasted_iota(index.dtype, shape, at), spread(index))
    return lax.select(here, spread(update + zero), lax.full(shape, zero))


def _picked(editor: Editor, eqn: Equation) -> int | None:
    """The dimension along which an equation adds one number to each row of an array of zeros."""
    if eqn.primitive.name not in ("scatter-add", "scatter_add"):
        return None
    zeros, index, update = eqn.invars
    numbers, fill = eqn.params["dimension_numbers"], editor.constant(zeros)
    if fill is None or fill != 0 or np.signbit(fill) or not _is_float(zeros):
        return None
    if len(numbers.inserted_window_dims) != 1 or numbers.update_window_dims:
        return None
    [at] = numbers.inserted_window_dims
    shape, count = zeros.aval.shape, zeros.aval.ndim
    rows = tuple(d for d in range(count) if d != at)
    batch = tuple(n for d, n in enumerate(shape) if d != at)
    fits = (
        numbers.scatter_dims_to_operand_dims == (at,)
        and numbers.operand_batching_dims == rows
        and numbers.scatter_indices_batching_dims == tuple(range(count - 1))
        and index.aval.shape[: count - 1] == batch == update.aval.shape[: count - 1]
        and math.prod(index.aval.shape) == math.prod(update.aval.shape) == math.prod(batch)
        and eqn.params["mode"] != lax.GatherScatterMode.CLIP
        and shape[at] - 1 <= np.iinfo(index.aval.dtype).max
        # traced equations would not carry an explicitly sharded type
        and not any(getattr(getattr(update.aval, "sharding", None), "spec", ()))
    )
    return at if fits else None


def _forward_pool(editor: Editor, eqn: Equation) -> int | None:
    """The pool of a backward scatter, if its windows tile the input and their offsets fit a byte."""
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
    for i in editor.users(y):
        name, params = editor.eqns[i].primitive.name, editor.eqns[i].params
        if name == "reduce_window_max" and i not in editor.late:
            if all(tuple(params[k]) == v for k, v in want.items()):
                return i
    return None


def _mask_after(editor: Editor, var: Atom) -> tuple[list[Equation], int | None]:
    """The `select_n(mask, 0, value)` that alone reads a value, and the views in between.

    Per-example models pool one image at a time, so that vmap leaves dimensions of size one and
    transposes between the pool and the ReLU before it.
    """
    views: list[Equation] = []
    while (i := editor.only_user(var)) is not None and is_view(editor.eqns[i]):
        views.append(editor.eqns[i])
        var = editor.eqns[i].outvars[0]
    if i is None or editor.eqns[i].primitive.name != "select_n":
        return [], None
    mask, zero, *values = editor.eqns[i].invars
    fill, source = editor.constant(zero), editor.source(mask)
    if (
        values == [var]
        and fill is not None
        and fill == 0
        and not np.signbit(fill)
        and (mask.aval.shape, mask.aval.dtype) == (var.aval.shape, bool)
        and source is not None
        and len(source.outvars) == 1
        and editor.only_user(mask) == i
        # jax.checkpoint leaves masks in the backward pass that only read forward values
        and not any(j in editor.late for j in editor.producers(source))
    ):
        return views, i
    return [], None


def _is_freed(editor: Editor, var: Var, ours: set[int]) -> bool:
    """Whether no backward equation beside `ours` needs a value or what it is a view of."""
    while (eqn := editor.source(var)) is not None:
        for i in editor.backward.intersection(editor.users(var)) - ours:
            # A forward mask is a one-byte residual of its own and does not keep its input.
            if i in editor.late or any(v.aval.dtype != bool for v in editor.eqns[i].outvars):
                return False
        if not is_view(eqn):
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


def _is_float(atom: Atom) -> bool:
    return bool(jnp.issubdtype(atom.aval.dtype, jnp.floating))


# The order matters: the first rule turns gt(x, 0) into gt(relu(x), 0), and the second then frees
# relu(x) where it folds that mask into the pool's index.
RULES: tuple[Rule, ...] = (
    Rule(
        "larger_of_two",
        "x == max(x, y) exactly where x >= y, and x == min(x, y) where x <= y: the result has the "
        "bits of one of the two, zeros of both signs are equal, and where one is a NaN so is the "
        "result, and both comparisons are false. (JAX before 0.11 writes the gradient of the larger "
        "of two so.)",
        _larger_of_two,
    ),
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
        "are +0 either way: the mask's value there joins the index. (XLA:GPU adds by f32 atomics, "
        "which flush denormal cotangents to zero; the rule keeps them.)",
        _max_pool_index,
    ),
    Rule(
        "max_pool_overlap",
        "The index repeats the scatter's own scan over the padded input, and each element adds the "
        "windows that selected it in row-major order, as the sequential scatter does; windows that "
        "did not add +0, which changes no sum that began at +0. XLA:GPU's own scatter adds with "
        "atomics, in no fixed order: there this is one of its possible results.",
        _max_pool_overlap,
    ),
    Rule(
        "label_scatter",
        "One number is added to +0 in each row, so the entry at the index is 0 + u and the others "
        "are +0. An index that is out of bounds equals no offset, and the scatter drops it. (In "
        "bounds by promise it may be anything.)",
        _label_scatter,
    ),
)
