"""The picture of memory in README.md: the page of a report, photographed in both themes.

    python benchmarks/picture.py --plan    plans again (needs `vmem_jax[gpu-compile]`, no GPU)
    python benchmarks/picture.py           draws the row that is there (needs Chromium)

The row is what the page shows of one plan (`vmem_jax.report.picture`), without table and lanes.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from absl import app, flags

from vmem_jax.report.page import save_page

ROOT = Path(__file__).parent.parent
ROW = ROOT / "benchmarks/results/report_h200.json"
FIGURES = ROOT / "docs/figures"

MODEL, BATCH, DTYPE, SHARE, TARGET = "resnet50", 256, "bfloat16", 0.4, "h200"
WIDTH, HEIGHT = 1100, 900

_PLAN = flags.DEFINE_bool("plan", False, "plan and compile the step again, and write the row")


def plan() -> None:
    """Writes `ROW`."""
    import vmem_jax
    from vmem_jax.devices.targets import target
    from vmem_jax.models import job

    target(TARGET).device()  # before anything else looks for devices
    work = job(MODEL, batch=BATCH, dtype=DTYPE)
    work.step.__name__ = f"{MODEL}, {BATCH} images, {DTYPE}"
    step = vmem_jax.jit(work.step, budget=SHARE, donate_argnums=0)
    data = step.report_data(work.state_shapes(), work.batch, target=TARGET)
    row = {**data, "values": [], "spans": []}
    ROW.write_text(json.dumps(row, separators=(",", ":")) + "\n")


def photograph(row: Path = ROW, out: Path = FIGURES, browser: str | None = None) -> list[Path]:
    """Writes the areas by layer of the page of `row`, light and dark, as PNG.

    Args:
      browser: the path of Chromium; by default the one on the PATH.
    """
    from playwright.sync_api import sync_playwright

    browser = browser or shutil.which("chromium") or shutil.which("google-chrome")
    paths = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = save_page(json.loads(row.read_text()), Path(folder) / "memory.html")
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            tab = chromium.new_page(
                color_scheme=scheme, viewport={"width": WIDTH, "height": HEIGHT}
            )
            tab.goto(page.as_uri())
            tab.wait_for_selector("html[data-ready]", state="attached")
            tab.click("[data-by=layers]")
            for hidden in ("#by", "#lane-legend", "#lanes", "#memory .note"):
                tab.locator(hidden).evaluate("node => node.style.display = 'none'")
            tab.evaluate("Plotly.relayout('areas', {'xaxis.showticklabels': true, 'margin.b': 30})")
            paths.append(out / f"memory-{scheme}.png")
            tab.locator("#memory").screenshot(path=paths[-1], animations="disabled")
        chromium.close()
    return paths


def main(argv: list[str]) -> None:
    del argv
    if _PLAN.value:
        plan()
    for path in photograph():
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    app.run(main)
