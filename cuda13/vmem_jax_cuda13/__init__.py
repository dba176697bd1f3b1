"""vmem_jax's native extension with CUDA 13: `vmem_jax.transfer.extension` finds and loads it."""
