"""rewrite: a flat jaxpr and a Plan -> the jaxpr that XLA compiles into that plan."""

from vmem_jax.rewrite.rewrite import rewrite

__all__ = ["rewrite"]
