"""choices: what can do each convolution of a program, on the device that it is planned for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax

from vmem_jax.conv.choice import by_xla, slice_by_xla, timed
from vmem_jax.conv.compiled import own_workspaces
from vmem_jax.core.convolution import XLA, Configuration, Convolution, Micro
from vmem_jax.core.costs import Costs, Source
from vmem_jax.core.program import Program
from vmem_jax.policy.workspace_division import front
from vmem_jax.policy.workspace_reuse import BatchSizes, batch_sizes

Choices = dict[int, tuple[Configuration, ...]]

_MOST_PARTS = 32
"""Of a batch. Beyond it launches cost more than a workspace is worth."""


def choices_of(
    name: str, program: Program, costs: Costs, device: jax.Device, target: str | None = None
) -> Choices:
    """For every convolution of `program` its desirable set on `device`, after XLA's own.

    On a GPU the ways are cuDNN's, as `vmem-jax profile --conv` timed them. XLA's own is the fastest
    of the whole batch whatever its workspace, since that is what XLA's autotuner takes; a convolution
    of which the whole batch was not timed stays XLA's. On a CPU they are XLA's own convolution, whole
    and of powers of two of samples, down to a thirty-second of the batch, with the workspace that
    the compiler says and the seconds of a roofline. Seconds are scaled so that XLA's own has those of
    `costs`, unless these are less well known.

    Args:
      name: of the step, for errors.
      target: a card that is not there, by name.

    Raises:
      ValueError: there is no convolution that can be divided, or nothing is known of them.
    """
    found = {s: step.convolution for s, step in enumerate(program.steps) if step.convolution}
    refuse = lambda why: ValueError(
        f'`{name}` cannot divide convolutions: {why}. Leave "workspace" out of `allow`.'
    )
    if target is not None:
        raise refuse(f"what they take on {target!r} can be measured on that card alone")
    if not found:
        raise refuse("it has none on one device, of one float dtype and at most three dimensions")
    known = timed(device) if device.platform == "gpu" else _by_slices
    choices: Choices = {}
    for s, convolution in found.items():
        micros = known(convolution)
        whole = [m for m in micros if m.batch == convolution.batch]
        if not whole:
            continue
        fastest = min(whole, key=lambda m: (m.seconds, m.workspace))
        known_well = costs.sources and costs.sources[s] in (Source.MEASURED, Source.SCALED)
        trust_costs = known_well or device.platform != "gpu"
        scale = costs.seconds[s] / fastest.seconds if trust_costs else 1.0
        ways = [way.scaled(scale) for way in front(micros, convolution.batch)]
        choices[s] = _after_own(convolution, fastest.workspace, scale * fastest.seconds, ways)
    if not choices:
        raise refuse(
            f"none of its {len(set(found.values()))} was measured on {device.device_kind}: run "
            "`vmem-jax profile --conv` there first"
        )
    return choices


def learned(program: Program, costs: Costs, compiled: Any) -> Costs:
    """`costs` with the workspaces that XLA's own convolutions have in a step compiled for a GPU."""
    found = {s: step.convolution for s, step in enumerate(program.steps) if step.convolution}
    workspaces = own_workspaces(compiled.as_text(), set(found.values()))
    choices = dict(costs.convolutions)
    for s, convolution in found.items():
        if convolution in workspaces:
            own, *others = choices.get(s) or (None,)
            seconds = costs.seconds[s] if own is None else own.seconds
            choices[s] = _after_own(convolution, workspaces[convolution], seconds, others)
    return dataclasses.replace(costs, convolutions=choices)


def _after_own(
    convolution: Convolution, workspace: int, seconds: float, others: Iterable[Configuration]
) -> tuple[Configuration, ...]:
    """XLA's own, and those of `others` that are better in something."""
    own = Configuration((Micro(convolution.batch, XLA, (), workspace, seconds),))
    better = (way for way in others if way.workspace < workspace or way.seconds < seconds)
    return (own, *better)


def _by_slices(convolution: Convolution) -> list[Micro]:
    sizes = batch_sizes(convolution.batch, BatchSizes.POWER_OF_TWO)
    parts = [b for b in sizes if convolution.batch / _MOST_PARTS <= b < convolution.batch]
    return [by_xla(convolution), *(slice_by_xla(convolution.with_batch(b)) for b in parts)]
