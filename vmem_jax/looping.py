"""The scans of a traced step with other residuals stacked between them, for the search to try."""

from __future__ import annotations

import dataclasses

from absl import logging

from vmem_jax.capture.capture import capture_pair
from vmem_jax.capture.loop_pairs import find_pairs
from vmem_jax.capture.loop_residuals import with_residuals
from vmem_jax.core.costs import Machine
from vmem_jax.entry import Traced
from vmem_jax.errors import show_nbytes
from vmem_jax.policy.residuals import front

_CHOICES = 6


def loop_variants(
    traced: Traced, machine: Machine, count: int = _CHOICES
) -> tuple[tuple[str, Traced], ...]:
    """`traced` with other values stacked between its loops: from the fewest seconds to the fewest
    bytes, each with a description for people; their `plain` is that step, too. Empty where it has no
    such loops.

    Args:
      machine: what the choices are made for.
      count: of choices, at most.
    """
    flat = traced.captured.separate
    pairs = find_pairs(flat)
    if not pairs:
        return ()
    loops, variables = zip(*map(capture_pair, pairs), strict=True)
    found = []
    for kept in front(loops, machine, count):
        chosen = [
            (pair, [vs[b] for b in sorted(buffers)])
            for pair, vs, buffers in zip(pairs, variables, kept.buffers, strict=True)
        ]
        captured = traced.captured.rewritten(with_residuals(flat, chosen))
        what = f"loops stack {show_nbytes(kept.nbytes)}, +{1e3 * kept.seconds:.1f} ms"
        logging.info("%s", what)
        found.append((what, dataclasses.replace(traced, captured=captured, plain=captured.flat)))
    return tuple(found)
