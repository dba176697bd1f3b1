"""capture: the jaxpr of a whole training step becomes a Program."""

from vmem_jax.capture.capture import Captured, capture

__all__ = ["Captured", "capture"]
