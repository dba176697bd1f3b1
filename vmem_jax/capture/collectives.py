"""collectives: the bytes that one device sends to the others for a step's products.

By rings, as NCCL has them (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters
of workstations", 2009): to gather a value, a device sends all but its own shard, and as much to
scatter a sum of partial products; a sum that all devices need whole takes both.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from vmem_jax.capture.primitives import nbytes
from vmem_jax.capture.shards import Shards
from vmem_jax.jax_compat import JaxprEqn, Var


class Collectives:
    """Those of one Program.

    Args:
      eqns: of the flat jaxpr.
      shards: how values are split over devices.
    """

    def __init__(self, eqns: Sequence[JaxprEqn], shards: Shards) -> None:
        self.shards = shards
        self.gathered: set[Hashable] = set()
        every = [] if shards.device_count == 1 else eqns
        self.weights = {_shape(v) for eqn in every for v in shards.gathered(eqn)}

    def sent(self, eqn: JaxprEqn, phase: Hashable) -> int:
        """Bytes that a device sends for `eqn`. What an equation before it in the same `phase`
        gathered is there."""
        shards = self.shards
        if shards.device_count == 1:
            return 0
        found = 0
        for v in shards.gathered(eqn):
            if (v, phase) not in self.gathered:
                self.gathered.add((v, phase))
                found += nbytes(v.aval) - nbytes(v.aval) // shards.count(v)
        parts = shards.summed(eqn)
        if parts > 1:
            [out], scattered = eqn.outvars, shards.scattered_nbytes(eqn)
            own = scattered or nbytes(out.aval) // shards.count(out)
            # the gradient of a weight that is gathered is scattered
            found += (own - own // parts) * (1 if scattered or _shape(out) in self.weights else 2)
        return found


def _shape(v: Var) -> tuple[int, ...]:
    """That of `v` or its transpose."""
    aval: object = v.aval
    return tuple(sorted(getattr(aval, "shape", ())))
