"""Frozen values and pure functions over them. Nothing here imports JAX."""
