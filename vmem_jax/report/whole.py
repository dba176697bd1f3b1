"""whole: writes a file whole or not at all."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: str | Path, content: str | bytes) -> Path:
    """Writes `content`, a text as UTF-8, and returns the path of the file.

    A file of that name stays as it is until the new one is complete.
    """
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    return partial.replace(path)
