"""all_at_once: what of scanned layers is on the device all at once, and why, for people."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from vmem_jax import jax_compat as compat
from vmem_jax.capture.locations import layer_of, location_of
from vmem_jax.capture.primitives import nbytes
from vmem_jax.capture.shards import is_typed
from vmem_jax.errors import show_nbytes
from vmem_jax.jax_compat import Var


class Loop(Protocol):
    """What is known of the loop that makes gradients, as `updates.Loop` has it."""

    opened: Any
    eqns: Any
    eqn: Any
    at: Any
    carry: Any
    maker: Any
    results: Any
    needed: Any
    origins: Any
    live: Any
    movable: Any
    streamed: Any
    available: Any
    over: Any


@dataclasses.dataclass(frozen=True)
class Stacked:
    """Gradients of scanned layers that exist all at once.

    Attributes:
      loop: the layer of the loop that makes them, or "".
      nbytes: the bytes of all slices.
      why: the reason why updates cannot run in the loop, for people.
    """

    loop: str
    nbytes: int
    why: str

    def __str__(self) -> str:
        what = f"the gradients of {self.loop or 'a loop'}, {show_nbytes(self.nbytes)}"
        return f"{what}, exist all at once: {self.why}"


@dataclasses.dataclass(frozen=True)
class Whole:
    """Stacks of scanned layers in host memory that come to the device as a whole.

    Attributes:
      names: the user's names of these arguments, the largest first.
      nbytes: the bytes of all of them.
      why: the reason why they do not come by slices, for people.
    """

    names: tuple[str, ...]
    nbytes: int
    why: str

    def __str__(self) -> str:
        some = ", ".join(f"`{name}`" for name in self.names[:_NAMED])
        if len(self.names) > _NAMED:
            some += f" and {len(self.names) - _NAMED} more"
        verb = "comes" if len(self.names) == 1 else "come"
        return f"{some}, {show_nbytes(self.nbytes)} in host memory, {verb} as a whole: {self.why}"


_NAMED = 3
"""So many arguments are named of those that come as a whole for the same reason."""


def stacked_by(loop: Loop) -> list[Stacked]:
    """The gradients among the stacks that exist as a whole: of the shape of an argument."""
    if "transpose(" not in compat.name_stack(loop.eqn):
        return []
    shape = lambda v: tuple(getattr(v.aval, "shape", ()))
    shapes = {*map(shape, loop.opened.invars)}
    stacks = loop.eqn.outvars[loop.carry :]
    whole = [v for v in stacks if v in loop.needed and shape(v) in shapes]
    by_why: dict[str, int] = {}
    for v in whole:
        why = _why(loop, v)
        by_why[why] = by_why.get(why, 0) + nbytes(v.aval)
    return [Stacked(layer_of(loop.eqn), n, why) for why, n in by_why.items() if why]


def _why(loop: Loop, stack: Var) -> str:
    """Why `stack` exists; "" where nothing makes a result of it but by the loops that read it."""
    if stack not in loop.origins:
        typed = "their types say how they are split over devices"
        return typed if is_typed(stack) else "they are split over devices along the layers"
    if stack in loop.results:
        return "the step returns them"
    after = {stack}
    for i in sorted(i for i in loop.live if i > loop.at):
        eqn = loop.eqns[i]
        if after.isdisjoint(a for a in eqn.invars if isinstance(a, Var)):
            continue
        if i not in loop.movable:
            if eqn.primitive.name == "scan":
                return ""
            if not loop.streamed.isdisjoint(a for a in eqn.invars if isinstance(a, Var)):
                return f"{location_of(eqn)} reads state in host memory, which comes as a whole"
            there = loop.available | after
            for a in eqn.invars:
                if isinstance(a, Var) and a not in there and a in loop.maker:
                    return f"{location_of(eqn)} waits for {location_of(loop.eqns[loop.maker[a]])}"
            return f"{location_of(eqn)} needs all of them at once"
        after.update(eqn.outvars)
    if not loop.over:
        return "the state is not donated"
    return "what is made of them is written over values that are still read"
