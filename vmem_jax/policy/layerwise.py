"""layerwise: where the layers of a Program stand in an order, for policies that plan layer by layer.

The papers speak of the layers of a network, forwards and backwards. An order is a list of steps: its
*turn* is the first step of the backward pass, and a *stay* is a feature map that idles across it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from vmem_jax.core.convolution import Configuration
from vmem_jax.core.layers import LayerKind, layers
from vmem_jax.core.plan import Plan
from vmem_jax.core.program import Phase, Program
from vmem_jax.core.simulate import Timeline
from vmem_jax.errors import LayersError
from vmem_jax.policy.base import Infeasible, finish


@dataclasses.dataclass(frozen=True, slots=True)
class Stay:
    """A feature map that the forward pass leaves to the backward pass; positions of an order.

    Attributes:
      buffer: which.
      layer: whose it is to give up: the last of its consumers, as this order has them.
      made: the first position after its making.
      since: the first after its last use in the forward pass.
      until: that of its first use in the backward pass.
    """

    buffer: int
    layer: int
    made: int
    since: int
    until: int


class Walk:
    """The layers of `program` as `order` runs them, in which each step stands once.

    Attributes:
      layers: as `core.layers` finds them, in the order in which they are computed forwards.
      turn: position of the first step of the backward pass; the end, if there is none.
      begin, end: for each layer the position of its first forward step before the turn, and that
        after its last.
      backward: (position of its first backward step, layer), in the order of these positions.
      stays: what can be moved, in the order in which layers give it up.
    """

    def __init__(self, program: Program, order: tuple[int, ...]) -> None:
        position = {s: p for p, s in enumerate(order)}
        is_back = [program.steps[s].phase is Phase.BACKWARD for s in order]
        self.turn = is_back.index(True) if any(is_back) else len(order)
        # what only the backward pass reads may stand in it
        ahead = lambda layer: [position[s] for s in layer.forward if position[s] < self.turn]
        end = lambda layer: max(ahead(layer), default=self.turn - 1) + 1
        self.layers = tuple(sorted(layers(program), key=end))
        self.begin = tuple(min(ahead(layer), default=self.turn) for layer in self.layers)
        self.end = tuple(map(end, self.layers))
        self.backward = tuple(
            sorted(
                (min(position[s] for s in layer.backward), n)
                for n, layer in enumerate(self.layers)
                if layer.backward
            )
        )
        self.stays = tuple(self._stays(program, position))

    def _stays(self, program: Program, position: dict[int, int]) -> list[Stay]:
        home = {position[s]: n for n, layer in enumerate(self.layers) for s in layer.forward}
        found = []
        for b in sorted(b for layer in self.layers for b in layer.saved):
            made = position[program.producer[b]]
            reads = [position[r] for r in program.readers[b]]
            last = max((p for p in reads if p < self.turn), default=made)
            until = min((p for p in reads if p >= self.turn), default=0)
            large = program.buffers[b].nbytes > 0 and program.buffers[b].movable
            if large and made < self.turn and last + 1 < until:
                found.append(Stay(b, home[last], made + 1, last + 1, until))
        return sorted(found, key=lambda stay: (stay.layer, stay.buffer))

    def of_kind(self, kinds: Collection[LayerKind]) -> tuple[int, ...]:
        """The layers of `kinds`."""
        return tuple(n for n, layer in enumerate(self.layers) if layer.kind in kinds)


def finish_walk(
    policy: str,
    program: Program,
    walk: Walk,
    timeline: Timeline,
    budget: int | None,
    convolutions: Mapping[int, Configuration],
) -> Plan | Infeasible:
    """`finish`, which says so where a step is over `budget` for want of a backward pass.

    That is no error yet: the step may compile to less than is predicted.
    """
    found = finish(policy, program, timeline, budget, convolutions=convolutions)
    if isinstance(found, Infeasible) and program.resident_nbytes <= found.budget:
        return dataclasses.replace(found, lacks=no_backward(policy, walk))
    return found


def no_backward(policy: str, walk: Walk) -> str:
    """For people: that the order of `walk` has no backward pass; "" if it has one."""
    if walk.backward:
        return ""
    return (
        f"policy `{policy}` moves what the forward pass leaves to the backward pass, but this "
        f"step has {len(walk.layers)} layers and no backward pass. Put `jax.grad` inside the "
        "step that you budget, or use `policy='auto'`."
    )


def check_backward(policy: str, walk: Walk) -> None:
    """Raises LayersError if the order of `walk` has no backward pass."""
    if lacks := no_backward(policy, walk):
        raise LayersError(lacks)


def check_convolutions(policy: str, walk: Walk) -> None:
    """Raises LayersError if the layers of `walk` are no convolutions."""
    if not walk.of_kind([LayerKind.CONVOLUTION]):
        kinds = sorted({layer.kind.value for layer in walk.layers})
        raise LayersError(
            f"policy `{policy}` moves the inputs of convolutions, but of the {len(walk.layers)} "
            f"layers of this step none is one: {', '.join(kinds)}. Use `offload='all'`, or "
            "`policy='auto'`."
        )
