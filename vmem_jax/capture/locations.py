"""locations: where in the user's model and code an equation stands."""

from __future__ import annotations

import functools
import re

from vmem_jax import jax_compat as compat
from vmem_jax.jax_compat import JaxprEqn


def layer_of(eqn: JaxprEqn) -> str:
    """The user's layer of `eqn`: its name stack without the names that transformations leave."""
    return _layer_of_stack(compat.name_stack(eqn))


@functools.lru_cache(maxsize=4096)
def _layer_of_stack(stack: str) -> str:
    stack = re.sub(r"\b(jvp|transpose|vmap|jit|checkpoint|rematted_computation)\b", "", stack)
    parts = [p for p in re.split(r"[/()]+", stack) if p]
    return "/".join(parts)


def location_of(eqn: JaxprEqn) -> str:
    """The layer, the primitive and the line of `eqn`, for people."""
    line = compat.user_line(eqn)
    at = f" at {line}" if line else ""
    return f"{layer_of(eqn) or '(no layer)'}: {eqn.primitive.name}{at}"
