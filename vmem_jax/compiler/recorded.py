"""recorded: a compiled step whose convolutions run in CUDA graphs from its second call on.

XLA makes a library's kernels ready when a convolution first runs. In a process that took the compiled
step, or the choice of its kernels, from a cache this is its first call, and nothing can be made ready
while a graph is recorded: the run fails, or computes something else (JAX 0.11.2). So the first call
launches convolutions one by one, and the program that has them recorded takes over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
from absl import logging

from vmem_jax.core.need import need_nbytes


class Recorded:
    """Called like a compiled step.

    Args:
      launched: the step with its convolutions launched one by one; all else but calls asks this one.
      record: compiles the same with convolutions in CUDA graphs; called once, in the first call.
    """

    def __init__(self, launched: Any, record: Callable[[], Any]) -> None:
        self._launched = launched
        self._record: Callable[[], Any] | None = record
        self._lock = threading.Lock()
        self._now: Callable[..., Any] = self._first

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._now(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._launched, name)

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        outs = self._launched(*args, **kwargs)
        with self._lock:
            record, self._record = self._record, None
        if record is not None:
            self._now = self._made(record)
        return outs

    def _made(self, record: Callable[[], Any]) -> Callable[..., Any]:
        """What runs from the second call on."""
        try:
            recorded = record()
        except jax.errors.JaxRuntimeError as error:
            return self._without(f"they do not compile: {str(error).splitlines()[0]}")
        now, then = need_nbytes(recorded), need_nbytes(self._launched)
        if now > then:
            return self._without(f"the step would need {now} bytes in place of {then}")

        def second(*args: Any, **kwargs: Any) -> Any:
            try:
                outs = jax.block_until_ready(recorded(*args, **kwargs))
            except jax.errors.JaxRuntimeError as error:
                if any(a.is_deleted() for a in jax.tree.leaves((args, kwargs)) if _is_array(a)):
                    raise
                self._now = self._without(f"they do not run: {str(error).splitlines()[0]}")
                return self._now(*args, **kwargs)
            self._now = recorded
            return outs

        return second

    def _without(self, why: str) -> Any:
        logging.warning("convolutions are launched one by one, not in CUDA graphs: %s", why)
        return self._launched


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array)
