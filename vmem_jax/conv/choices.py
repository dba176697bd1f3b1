"""choices: what can do each convolution of a program, on the device that it is planned for."""

from __future__ import annotations

import dataclasses

from vmem_jax.conv.choice import by_xla, slice_by_xla
from vmem_jax.core.convolution import Configuration, Convolution
from vmem_jax.core.costs import Costs
from vmem_jax.core.program import Program
from vmem_jax.policy.workspace_division import front
from vmem_jax.policy.workspace_reuse import BatchSizes, batch_sizes

Choices = dict[int, tuple[Configuration, ...]]

_MOST_PARTS = 32
"""Of a batch. Beyond it launches cost more than a workspace is worth."""


def choices_of(name: str, program: Program, costs: Costs, target: str | None) -> Choices:
    """For every convolution of `program` its desirable set, after XLA's own.

    XLA's own takes the workspace that the compiler says and the seconds of `costs`; a micro-batch
    takes the share of those seconds that the roofline gives it. Micro-batches are powers of two, down
    to a thirty-second of the batch.

    Args:
      name: of the step, for errors.
      target: a card that is not there, by name; its workspaces cannot be known here.

    Raises:
      ValueError: the step has no convolution that can be divided, or is for another card.
    """
    found = {s: step.convolution for s, step in enumerate(program.steps) if step.convolution}
    if target is not None or not found:
        why = (
            f"what a convolution's workspace is on {target!r} is known on that card alone"
            if target is not None
            else "it has no convolution on one device of one float dtype with at most three spatial "
            "dimensions"
        )
        raise ValueError(
            f'`{name}` cannot divide convolutions: {why}. Leave "workspace" out of `allow`.'
        )
    choices: Choices = {}
    for s, convolution in found.items():
        scale = costs.seconds[s] / by_xla(convolution).seconds
        micros = [
            dataclasses.replace(m, seconds=m.seconds * scale)
            for m in (by_xla(convolution), *map(slice_by_xla, _parts(convolution)))
        ]
        own = Configuration((micros[0],))
        ways = front(micros, convolution.batch)
        choices[s] = (own, *(way for way in ways if way.workspace < own.workspace))
    return choices


def _parts(convolution: Convolution) -> list[Convolution]:
    """The micro-batches that are tried, largest first."""
    batch = convolution.batch
    sizes = batch_sizes(batch, BatchSizes.POWER_OF_TWO)
    return [convolution.with_batch(b) for b in sizes if batch / _MOST_PARTS <= b < batch]
