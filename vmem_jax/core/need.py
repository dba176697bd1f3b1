"""need: the device memory that a compiled step needs, as the compiler counts it."""

from __future__ import annotations

from typing import Any


def need_nbytes(compiled: Any) -> int:
    """Bytes of device memory that a compiled step needs.

    `peak_memory_in_bytes` is not used: on some backends it counts host buffers, and on the CPU it
    omits the temporaries.
    """
    stats = compiled.memory_analysis()
    return (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
    )
