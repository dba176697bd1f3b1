"""loop_levels: the pairs of scans of a step, and those in the bodies of its other scans.

A step that accumulates gradients is a scan over micro-batches. Its body holds a forward and a
backward pass, and so pairs of scans over layers. That scan has no partner itself: its body is a step
of its own, and its pairs are made again like those of the outermost level. Levels may nest.

What the body carries takes over its own memory in each iteration, like a donated argument. So sums of
gradients are updated in the backward loop that makes the gradients (`updates`), and the gradients of
all layers never exist beside their sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence

from vmem_jax import jax_compat as compat
from vmem_jax.capture.exact import apply_exact_rules
from vmem_jax.capture.flatten import drop_dead, flatten
from vmem_jax.capture.loop_pairs import Pair, find_pairs
from vmem_jax.capture.loop_residuals import with_stacks
from vmem_jax.capture.loop_segments import Segments, segmented
from vmem_jax.capture.packed_masks import with_packed_residuals
from vmem_jax.capture.shards import Shards
from vmem_jax.capture.updates import updated_in_loops
from vmem_jax.jax_compat import ClosedJaxpr, JaxprEqn, Var


@dataclasses.dataclass(frozen=True)
class Stacking:
    """What one pair stacks.

    Attributes:
      kept: values of the paired body, in stacks.
      every: the lengths of segments, of each level; () where the loops are not divided.
      parts: those of `kept` whose stacks exist for one innermost segment at a time.
    """

    kept: Sequence[Var]
    every: tuple[int, ...]
    parts: Collection[Var]


@dataclasses.dataclass(frozen=True)
class Level:
    """The flat jaxpr of a step, or of the body of a scan in it.

    Attributes:
      flat: it.
      shards: how its values are split over devices.
      times: how often it runs.
      pairs: its pairs of scans.
      inner: indices of other scans whose bodies have pairs, and these bodies.
    """

    flat: ClosedJaxpr
    shards: Shards
    times: int
    pairs: tuple[Pair, ...]
    inner: tuple[tuple[int, Level], ...]

    @property
    def all_pairs(self) -> tuple[tuple[Pair, Level], ...]:
        """Those of all levels, each with its level."""
        mine = tuple((pair, self) for pair in self.pairs)
        return mine + tuple(each for _, level in self.inner for each in level.all_pairs)

    @property
    def scans(self) -> Iterator[JaxprEqn]:
        """The scans of all pairs."""
        for pair, level in self.all_pairs:
            eqns = compat.open_jaxpr(level.flat).eqns
            yield from (eqns[pair.forward], eqns[pair.backward])

    def in_bits(self, least: int) -> Level:
        """The same with the masks in bits that its loops may stack, of at least so many bytes."""
        packed = (with_packed_residuals(pair, self.shards, least) for pair in self.pairs)
        inner = tuple((i, level.in_bits(least)) for i, level in self.inner)
        return dataclasses.replace(self, pairs=tuple(packed), inner=inner)

    def again(self, stackings: Iterator[Stacking]) -> tuple[ClosedJaxpr, tuple[Segments, ...]]:
        """`flat` with other stacks, and how its own loops are still to be divided into segments.

        Args:
          stackings: of `all_pairs`, in their order.
        """
        mine = [next(stackings) for _ in self.pairs]
        opened = compat.open_jaxpr(self.flat)
        eqns = [*opened.eqns]
        for at, level in self.inner:
            body = _in_place(eqns[at], *level.again(stackings))
            eqns[at] = eqns[at].replace(params={**eqns[at].params, "jaxpr": body})
        parts = opened.constvars, compat.constants(self.flat), opened.invars, opened.outvars, eqns
        flat = compat.close(*parts, like=self.flat)
        chosen = [(pair, each.kept) for pair, each in zip(self.pairs, mine, strict=True)]
        flat, stacks = with_stacks(flat, chosen)
        divided = [
            Segments(each.every, frozenset(own[v] for v in each.parts), len(pair.given.backward))
            for pair, each, own in zip(self.pairs, mine, stacks, strict=True)
            if each.every
        ]
        return flat, tuple(divided)


def levels(flat: ClosedJaxpr, shards: Shards, platform: str = "", times: int = 1) -> Level:
    """The pairs of `flat` and of the bodies of its other scans.

    Args:
      shards: how its values are split over devices.
      platform: that it is compiled for.
      times: how often it runs.
    """
    pairs = find_pairs(flat, platform)
    paired = {i for pair in pairs for i in (pair.forward, pair.backward)}
    inner = []
    for i, eqn in enumerate(compat.open_jaxpr(flat).eqns):
        if eqn.primitive.name != "scan" or eqn.effects or i in paired:
            continue
        body = drop_dead(apply_exact_rules(flatten(eqn.params["jaxpr"]))[0])
        if compat.constants(body):
            continue  # the body of a scan has none
        invars = compat.open_jaxpr(body).invars
        slices = invars[sum(compat.scan_counts(eqn)) :]
        within = shards.within(body, dict(zip(invars, eqn.invars, strict=True)), slices)
        level = levels(body, within, platform, times * eqn.params["length"])
        if level.all_pairs:
            inner.append((i, level))
    return Level(flat, shards, times, pairs, tuple(inner))


def _in_place(eqn: JaxprEqn, body: ClosedJaxpr, divided: Sequence[Segments]) -> ClosedJaxpr:
    """`body`, of scan `eqn`, with what it carries updated in the loops in it."""
    consts, carry = compat.scan_counts(eqn)
    count = len(compat.open_jaxpr(body).invars)
    carried = [consts <= p < consts + carry for p in range(count)]
    body, _ = updated_in_loops(drop_dead(body), carried, (), ())
    return segmented(body, divided)
