"""page: a picture of memory as one HTML file that needs no network.

Plotly draws it: its Python package brings its JavaScript, so that can be put into the file, and it
has stacked areas with one hover for all of them. Vega-Lite's bundle comes only with a compiled
renderer. The file has the JavaScript compressed (1.9 MB in place of 4.8); browsers since 2023 unpack
it themselves.
"""

from __future__ import annotations

import base64
import gzip
import importlib.resources
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vmem_jax.report.whole import write_whole


def require_plotly() -> None:
    """Raises ImportError where Plotly is missing."""
    if importlib.util.find_spec("plotly") is None:
        raise ImportError('the report is drawn by Plotly: pip install "vmem_jax[report]"')


def html(data: Mapping[str, Any]) -> str:
    """The page of `report.picture.picture`.

    Raises:
      ImportError: Plotly is missing.
    """
    require_plotly()
    from plotly.offline import get_plotlyjs

    pages = importlib.resources.files("vmem_jax.report") / "pages"
    text = lambda name: (pages / name).read_text(encoding="utf-8")
    # "<" in a user's label must not end the script that it stands in
    values = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    plotly = base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
    page = text("memory.html")
    for name, content in (
        ("/* STYLE */", text("memory.css")),
        ("/* DATA */", values),
        ("/* PLOTLY */", plotly),
        ("/* SCRIPT */", text("memory.js")),
    ):
        before, after = page.split(name)
        page = before + content + after
    return page


def save_page(data: Mapping[str, Any], path: str | Path) -> Path:
    """Writes the page of `data`, whole or not at all."""
    return write_whole(path, html(data))
