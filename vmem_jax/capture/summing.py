"""summing: sums over rows of one value that is made element by element, which one pass can compute.

A batch norm's backward pass sums the gradient to its result, dy, and dy times the normalised value.
Behind a ReLU dy is a selection: XLA makes it in the kernel of one sum, which writes it, and the other
sum is of another kernel that reads it. One pass computes dy and all its sums from what dy is made of,
and writes dy only where that moves fewer bytes than making it again.

Nothing here knows what a batch norm is: found are sums over all rows that read the same elementwise
value of the backward pass. Sums of a value that some other kernel writes are left to XLA, which does
them together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from vmem_jax import jax_compat as compat
from vmem_jax.capture.primitives import ELEMENTWISE
from vmem_jax.capture.tiles import Tile, Tiles, convolves_in
from vmem_jax.jax_compat import ClosedJaxpr, JaxprEqn, Var

DTYPES = ("bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Summing:
    """Sums that one pass computes.

    Attributes:
      sums: their equations, in order.
      tile: makes what is stored, then the operands of the sums.
      stored: the value that they share, where it is written; else ().
    """

    sums: tuple[int, ...]
    tile: Tile
    stored: tuple[Var, ...]

    def of(self, twin: Mapping[Var, Var]) -> Summing:
        """As `Tile.of`."""
        return Summing(self.sums, self.tile.of(twin), tuple(twin[v] for v in self.stored))


def find_summing(flat: ClosedJaxpr) -> tuple[Summing, ...]:
    """The passes of `flat`, in its order."""
    return tuple(_Finder(flat).found()) if convolves_in(flat, DTYPES) else ()


class _Finder(Tiles):
    def found(self) -> list[Summing]:
        groups: dict[Var, list[int]] = {}
        for i, eqn in enumerate(self.eqns):
            if _is_over_rows(eqn) and (shared := self._shared(eqn.invars[0])) is not None:
                groups.setdefault(shared, []).append(i)
        every = (self._summing(shared, sums) for shared, sums in groups.items())
        return self._in_some_order([each for each in every if each is not None])

    def _in_some_order(self, every: Sequence[Summing]) -> list[Summing]:
        """Those that can run one behind the other: not two that read what the other makes."""
        waits: dict[int, set[int]] = {n: set() for n in range(len(every))}
        for m, before in enumerate(every):
            after = self.after(self._returned(before.sums, before.stored))
            for n, each in enumerate(every):
                if any(v in after for v in (*each.tile.rows, *each.tile.vectors)):
                    waits[n].add(m)
        found: set[int] = set()
        while ready := {n for n in waits if n not in found and waits[n] <= found}:
            found |= ready
        return [each for n, each in enumerate(every) if n in found]

    def _returned(self, sums: Iterable[int], stored: Iterable[Var]) -> set[Var]:
        return {*stored, *(self.eqns[i].outvars[0] for i in sums)}

    def _shared(self, operand: Any) -> Var | None:
        """The first value that `operand` is made of, or it, that exists and a pass could make."""
        tile = self.tile([operand], operand.aval.shape, {}, set())
        rows = () if tile is None else tile.rows
        return next((v for v in rows if self._is_cotangent(v)), None)

    def _is_cotangent(self, v: Any) -> bool:
        if v.aval.dtype.name not in DTYPES or not self.is_elementwise(v) or v in self.by_library:
            return False
        return "transpose(" in compat.name_stack(self.eqns[self.maker[v]])

    def _summing(self, shared: Var, sums: Sequence[int]) -> Summing | None:
        """The pass over `shared` with those of `sums` that need none of the others' results.

        What reads `shared` behind it is elementwise in that and one array more. If the pass reads
        two, that can make it again of as many.
        """
        chosen: list[int] = []
        for i in sums:
            if self._tile(shared, [*chosen, i]) is not None:
                chosen.append(i)
        whole, apart = self._tile(shared, chosen), self._apart(chosen)
        if len(chosen) < 2 or whole is None or len(apart) < 2:
            return None
        others = [*self._others(shared, {*whole.equations, *chosen})]
        fusible = all(eqn.primitive.name in ELEMENTWISE for eqn in others)
        if shared in self.outputs or (others and not (fusible and len(whole.rows) == 2)):
            whole = self._tile(shared, chosen, stores=True)
            return None if whole is None else Summing(tuple(chosen), whole, (shared,))
        return Summing(tuple(chosen), whole, ())

    def _others(self, shared: Var, inside: Container[int]) -> Iterator[JaxprEqn]:
        """What reads `shared`, or what the equations `inside` make of it, and is not one of these."""
        seen, stack = {shared}, [shared]
        while stack:
            for r in self.readers.get(stack.pop(), ()):
                if r not in inside:
                    yield self.eqns[r]
                elif (out := self.eqns[r].outvars[0]) not in seen and not _is_over_rows(
                    self.eqns[r]
                ):
                    seen.add(out)
                    stack.append(out)

    def _apart(self, sums: Sequence[int]) -> set[Var]:
        """What the sums read where the shared value exists."""
        self.virtual = set()
        tiles = (self._around(self.eqns[i].invars[:1]) for i in sums)
        return {v for tile in tiles if tile is not None for v in tile.rows}

    def _tile(self, shared: Var, sums: Sequence[int], stores: bool = False) -> Tile | None:
        """Makes the operands of `sums`, and `shared`, of as few arrays as there are; None where these
        need a result of it."""
        if not sums:
            return None
        wanted = [*([shared] if stores else []), *(self.eqns[i].invars[0] for i in sums)]
        self.virtual = {shared}
        tile = self._around(wanted)
        if tile is None:
            return None
        for v in filter(self.is_elementwise, tile.rows):  # the output of a ReLU, say
            self.virtual.add(v)
            fewer = self._around(wanted)
            if fewer is not None and set(fewer.rows) < set(tile.rows):
                tile = fewer
            else:
                self.virtual.discard(v)
        after = self.after(self._returned(sums, [shared] if stores else []))
        return None if any(v in after for v in (*tile.rows, *tile.vectors)) else tile

    def _around(self, wanted: Sequence[Any]) -> Tile | None:
        return self.tile(wanted, wanted[0].aval.shape, {}, set())


def _is_over_rows(eqn: JaxprEqn) -> bool:
    """Whether it sums float32 over all axes but the last."""
    if eqn.primitive.name != "reduce_sum":
        return False
    aval: Any = eqn.invars[0].aval
    rows = tuple(range(aval.ndim - 1))
    return aval.dtype.name == "float32" and bool(rows) and (*sorted(eqn.params["axes"]),) == rows
