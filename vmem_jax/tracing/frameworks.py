"""frameworks: prepares a call by the framework of its arguments: Flax NNX, Equinox, or pytrees."""

from __future__ import annotations

import sys
from typing import Any

from vmem_jax.tracing.arguments import Call, Signature, prepare_pytrees


def prepare(sig: Signature, args: tuple, kwargs: dict[str, Any]) -> Call:
    """The call `sig.fun(*args, **kwargs)`, by the first framework that knows its arguments."""
    if "flax.nnx" in sys.modules:
        from vmem_jax.tracing import flax

        if flax.has_modules((args, kwargs)):
            return flax.prepare(sig, args, kwargs)
    if "equinox" in sys.modules:
        from vmem_jax.tracing import equinox

        if equinox.has_modules((args, kwargs)):
            return equinox.prepare(sig, args, kwargs)
    return prepare_pytrees(sig, args, kwargs)
