"""loop_residuals: the two scans of a pair made again, with other values stacked between them.

The forward scan stacks the values that are kept, and no others. The backward scan reads those, and
the slices and constants of the forward scan where it needs them, and computes the rest again at the
start of an iteration: the same equations on the same values. Separate loops share no equations, so no
barrier is needed for XLA to leave it there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from vmem_jax import jax_compat as compat
from vmem_jax.capture.calls import Calls
from vmem_jax.capture.flatten import drop_dead
from vmem_jax.capture.loop_pairs import Given, Made, Pair
from vmem_jax.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Var


def with_residuals(
    flat: ClosedJaxpr, chosen: Sequence[tuple[Pair, Collection[Var]]]
) -> ClosedJaxpr:
    """`flat` with other values stacked between the scans of its pairs, as `with_stacks` has it."""
    return with_stacks(flat, chosen)[0]


def with_stacks(
    flat: ClosedJaxpr, chosen: Sequence[tuple[Pair, Collection[Var]]]
) -> tuple[ClosedJaxpr, tuple[Mapping[Var, Atom], ...]]:
    """`flat` with other values stacked between the scans of its pairs, and their stacks.

    Args:
      chosen: each pair, as `find_pairs` has it, with the values of its body to stack: of those that
        do not depend on what only the backward scan has.
    """
    opened = compat.open_jaxpr(flat)
    first = {pair.forward: (pair, kept) for pair, kept in chosen}
    second = {pair.backward: pair for pair, _ in chosen}
    constants = [c for pair, _ in chosen for c in pair.given.constants]
    env: dict[Var, Atom] = {}
    stacks: dict[int, dict[Var, Atom]] = {}
    equations: list[JaxprEqn] = []
    calls = Calls(equations.append)
    read = lambda a: a if isinstance(a, Literal) else env.get(a, a)
    for i, eqn in enumerate(opened.eqns):
        if i in first:
            pair, kept = first[i]
            stacks[pair.backward] = _forward(pair, kept, eqn, calls, env)
        elif i in second:
            _backward(second[i], stacks[i], eqn, calls, env)
        else:
            equations.append(eqn.replace(invars=[read(a) for a in eqn.invars]))
    closed = compat.close(
        [*opened.constvars, *(v for v, _ in constants)],
        [*compat.constants(flat), *(value for _, value in constants)],
        opened.invars,
        [read(a) for a in opened.outvars],
        equations,
        flat,
    )
    return drop_dead(closed), tuple(stacks[pair.backward] for pair, _ in chosen)


def _forward(
    pair: Pair, kept: Collection[Var], eqn: JaxprEqn, calls: Calls, env: dict[Var, Atom]
) -> dict[Var, Atom]:
    """Emits the forward scan; returns the stack of each of `kept`."""
    kept = [v for v in kept if v not in pair.given.slices and v not in pair.given.consts]
    outs = _emit(pair, pair.forward_made, pair.given.forward, kept, {}, eqn, calls, env)
    return dict(zip(kept, outs, strict=True))


def _backward(
    pair: Pair, stacks: Mapping[Var, Atom], eqn: JaxprEqn, calls: Calls, env: dict[Var, Atom]
) -> None:
    _emit(pair, pair.backward_made, pair.given.backward, [], stacks, eqn, calls, env)


def _emit(
    pair: Pair,
    made: Made,
    carried: Mapping[Var, Atom],
    kept: Sequence[Var],
    stacks: Mapping[Var, Atom],
    eqn: JaxprEqn,
    calls: Calls,
    env: dict[Var, Atom],
) -> list[Any]:
    """Emits one of the scans of `pair`; adds its results to `env` and returns the stacks of `kept`.

    Args:
      made, carried: what it makes and carries.
      kept: what it stacks besides.
      stacks: what it reads in place of computing it.
      eqn: the scan as it was.
    """
    given: Given = pair.given
    body = compat.open_jaxpr(pair.body)
    results = [*(a for a, _ in made.carried), *(a for a, _ in made.stacked), *kept]
    needed = {a for a in results if isinstance(a, Var)}
    equations: list[JaxprEqn] = []
    for inner in reversed(body.eqns):
        if any(v in needed and v not in stacks for v in inner.outvars):
            needed.update(a for a in inner.invars if isinstance(a, Var))
            equations.append(inner)
    slices = {**{v: a for v, a in given.slices.items() if v not in stacks}, **stacks}
    groups = (given.consts, carried, slices)
    inputs = [[v for v in group if v in needed or group is carried] for group in groups]
    read = lambda a: a if isinstance(a, Literal) else env.get(a, a)
    operands = [read(group[v]) for group, vs in zip(groups, inputs, strict=True) for v in vs]
    flattened = [v for vs in inputs for v in vs]
    closed = compat.close([], [], flattened, results, equations[::-1], pair.body)
    outs = calls.scan(closed, len(inputs[0]), len(carried), operands, eqn)
    named = [v for _, v in (*made.carried, *made.stacked)]
    env.update(zip(named, outs, strict=False))
    return outs[len(named) :]
