"""layers: the convolutions of a step, and how often it has each."""

from __future__ import annotations

import collections
from typing import Any

from vmem_jax.capture import capture
from vmem_jax.capture.convolutions import match
from vmem_jax.capture.normalising import find_normalising
from vmem_jax.capture.primitives import inner_jaxprs
from vmem_jax.core.convolution import Convolution
from vmem_jax.jax_compat import open_jaxpr


def kernels_of(jaxpr: Any, carrying: bool = False) -> list[Convolution]:
    """The kernels to time for a step: every convolution alone, and with its epilogue.

    Args:
      carrying: also those that normalise their operand, and sum their result.
    """
    captured = capture(jaxpr)
    fused = [s.convolution for s in captured.program.steps if s.convolution is not None]
    every = [*convolutions_of(jaxpr), *(v for c in fused for v in c.variants)]
    if carrying:
        every += [each.matched.convolution for each in find_normalising(captured.separate)]
    return list(dict.fromkeys(every))


def convolutions_of(jaxpr: Any) -> collections.Counter[Convolution]:
    """How often `jaxpr` has each convolution that a library can run, by first occurrence, without
    epilogues.

    A convolution in a loop, a branch or a call counts once. On several devices sizes are global.
    """
    found: collections.Counter[Convolution] = collections.Counter()
    producer: dict[Any, Any] = {}
    for eqn in open_jaxpr(jaxpr).eqns:
        for inner in inner_jaxprs(eqn):
            found.update(convolutions_of(inner))
        if matched := match(eqn, producer):
            found[matched.convolution] += 1
        producer.update((v, eqn) for v in eqn.outvars)
    return found
