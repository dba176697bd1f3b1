"""pooling: max-pools whose windows overlap, which one kernel can compute together with their index.

Their backward pass is that of the rule `max_pool_overlap` (`capture.exact`). A kernel reads what the
pool's input is made of, element by element, of one value that exists: the result of a convolution,
say, of which a batch norm and a ReLU make it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from vmem_jax import jax_compat as compat
from vmem_jax.capture import overlap
from vmem_jax.capture.tiles import Tile, Tiles, convolves_in
from vmem_jax.jax_compat import ClosedJaxpr, Var

DTYPES = ("bfloat16", "float16")

_WINDOW = ("window_dimensions", "window_strides", "padding")


@dataclasses.dataclass(frozen=True)
class Pooling:
    """A pool of images, channels last.

    Attributes:
      tile: makes its input.
      pooled, index, gradient: the equations of its result, its index and the gradient to its input.
    """

    tile: Tile
    pooled: int
    index: int
    gradient: int

    def of(self, twin: Mapping[Var, Var]) -> Pooling:
        """As `Tile.of`."""
        return dataclasses.replace(self, tile=self.tile.of(twin))


def find_pooling(flat: ClosedJaxpr) -> tuple[Pooling, ...]:
    """The pools of `flat`, in its order."""
    has_one = any(eqn.primitive is overlap.index_p for eqn in compat.open_jaxpr(flat).eqns)
    return tuple(_Finder(flat).found()) if has_one and convolves_in(flat, DTYPES) else ()


class _Finder(Tiles):
    def found(self) -> Iterator[Pooling]:
        for index, eqn in enumerate(self.eqns):
            if eqn.primitive is not overlap.index_p:
                continue
            [x] = eqn.invars
            same = lambda r, eqn=eqn: all(self.eqns[r].params[k] == eqn.params[k] for k in _WINDOW)
            pooled = self._reading(x, "reduce_window_max", same)
            gradient = self._reading(eqn.outvars[0], "window_gradient", lambda r: True)
            tile = self._tile(x)
            if pooled is not None and gradient is not None and tile is not None:
                yield Pooling(tile, pooled, index, gradient)

    def _reading(self, x: Any, name: str, fits: Any) -> int | None:
        """The first equation of that name that reads `x`."""
        of_name = (r for r in self.readers.get(x, ()) if self.eqns[r].primitive.name == name)
        return next((r for r in of_name if fits(r)), None)

    def _tile(self, x: Any) -> Tile | None:
        """Makes `x` of one value that exists, which may be itself."""
        if not isinstance(x, Var):
            return None
        aval: Any = x.aval
        if aval.dtype.name not in DTYPES:
            return None
        tile = self.tile([x], aval.shape, {}, set())
        if tile is None or [v.aval for v in tile.rows] != [aval]:
            return Tile((), (x,), (), (x,))
        return tile
