"""What the native extension was built with, for tests that need it."""

from __future__ import annotations

import pytest

from vmem_jax.transfer.extension import describe


def needs_cuda() -> None:
    """Skips the test where no plan can move or compress values on a card: the extension's CUDA code
    was not built."""
    if " and CUDA" not in describe():
        pytest.skip(f"native extension: {describe()}")
