"""choice: a configuration for one convolution by itself, within a workspace limit."""

from __future__ import annotations

from vmem_jax.core.convolution import XLA, Configuration, Convolution, Micro


def undivided(convolution: Convolution) -> Configuration:
    """XLA's own convolution on the whole batch; its workspace and time are not known here."""
    return Configuration((Micro(convolution.batch, XLA, (), 0, float("nan")),))


def choose(convolution: Convolution, limit: int | None) -> Configuration:
    return undivided(convolution)
