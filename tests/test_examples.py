"""The programs and the notebook of examples/ run as they stand, train, and are short."""

import json
import runpy
import sys
import types
from pathlib import Path

import pytest

pytest.importorskip("optax")

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
NEEDS = {
    "nnx": "flax",
    "linen": "flax",
    "equinox_mlp": "equinox",
    "checkpoints": "orbax.checkpoint",
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_trains(path):
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem])
    losses = runpy.run_path(str(path), run_name="__main__")["losses"]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert len(path.read_text().splitlines()) < 60


def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch):
    pytest.importorskip("plotly")
    monkeypatch.chdir(tmp_path)
    display = types.ModuleType("IPython.display")
    display.IFrame = lambda path, **size: None
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    notebook = json.loads((FOLDER / "memory.ipynb").read_text())
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    assert all(not cell.get("outputs") for cell in notebook["cells"])  # no run is kept
    space = {"__name__": "__main__"}
    for cell in cells:
        exec(cell, space)
    assert space["losses"][-1] < space["losses"][0] and len(space["points"]) >= 2
    assert (tmp_path / "memory.html").stat().st_size > 1e6
    assert sum(len(cell.splitlines()) for cell in cells) < 60


def test_the_libraries_of_the_readme_have_examples():
    wanted = {"nnx", "linen", "equinox_mlp", "scanned_transformer", "lora", "fsdp", "checkpoints"}
    assert {path.stem for path in EXAMPLES} == wanted
