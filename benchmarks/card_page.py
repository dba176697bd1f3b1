"""A card in ten lines: what its rows say it reaches, and how far off predictions for it are.

    python benchmarks/card_page.py --card=h100

Everything comes from the rows in benchmarks/results/ that name the card, `rates_h100.jsonl` of
`rates.py`, `training_steps_h100.jsonl` of `training_steps.py` and `links_h100.jsonl` of `links.py`;
a line without rows says what would measure it. `python benchmarks/pages.py` writes the pages of all
cards with rows into docs/rows/benchmarks.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import records
from absl import app, flags
from cells import grid

from vmem_jax.core.cards import CARDS, Card

FLAGS = flags.FLAGS
RESULTS = Path(__file__).parent / "results"
BEST = 5
"""Rows of a kind that are the best the card reaches: their median stands."""

LARGE = 5e8
"""Bytes of the passes that memory's rate is read from: small ones stay in the cache."""

_NAMES = {"product": "products", "convolution": "convolutions", "attention": "cuDNN's attention"}

Row = Mapping[str, Any]


def cards() -> list[str]:
    """The cards with rows."""
    return [name for name in CARDS if (RESULTS / f"rates_{name}.jsonl").exists()]


def card_page(name: str, folder: Path = RESULTS) -> str:
    """The page of the card `name`: a title, and a table of what is measured, and assumed in plans."""
    card = CARDS[name]
    rates, steps, links = (
        _rows(folder / f"{kind}_{name}.jsonl") for kind in ("rates", "training_steps", "links")
    )
    lines = [*_hardware(card), *_rates(card, rates), *_links(card, links), *_steps(steps)]
    title = card.hardware.title if card.hardware else name
    return f"\n## {title}\n\n" + grid(["what", "measured", "assumed in plans"], lines)


def _rows(path: Path) -> list[Row]:
    return [*records.lines(path)] if path.exists() else []


def _hardware(card: Card) -> Iterable[list[str]]:
    assert card.hardware is not None, "a GPU"
    yield ["memory", "", f"{card.hardware.memory_nbytes / 2**30:.1f} GiB"]


def _rates(card: Card, rows: Sequence[Row]) -> Iterable[list[str]]:
    machine = card.machine
    teraflops = lambda rate: f"{rate / 1e12:.0f} TFLOP/s"
    assumed = {  # what stands in the rows of `rates.py`
        "product": teraflops(machine.flops["bfloat16"]),
        "convolution": teraflops(machine.convolutions["bfloat16"]),
        "attention": "by its sequence and head",
    }
    for kind, rate in assumed.items():
        own = sorted((r["tflops"] for r in rows if r["kind"] == kind), reverse=True)
        if own:
            best = teraflops(1e12 * statistics.median(own[:BEST]))
            yield [f"{_NAMES[kind]}, bfloat16, best of {len(own)}", best, rate]
        else:
            yield [f"{_NAMES[kind]}, bfloat16", f"no rows: `rates.py --kinds={kind}`", rate]
    passes = sorted((r["gb_per_s"] for r in rows if _is_large_pass(r)), reverse=True)
    found = (
        f"{statistics.median(passes[:BEST]) / 1e3:.2f} TB/s" if passes else "no rows: `rates.py`"
    )
    what = f"passes over device memory, best of {len(passes)}"
    yield [what, found, f"{machine.bandwidth / 1e12:.2f} TB/s"]


def _is_large_pass(row: Row) -> bool:
    return row["kind"] == "pass" and row["gb_per_s"] * 1e9 * row["us"] / 1e6 >= LARGE


def _links(card: Card, rows: Sequence[Row]) -> Iterable[list[str]]:
    machine = card.machine
    assumed = {"out": machine.link_out, "into": machine.link_in, "both": machine.link_both}
    for way, rate in assumed.items():
        own = [r for r in rows if r["direction"] == way]
        found = [f"{r['gb_per_s']:.1f} GB/s" for r in own if r["devices"] == 1][-1:]
        most = max((r["devices"] for r in own), default=1)
        shared = [f", {r['of_alone']:.0%} of it on {most}" for r in own if r["devices"] == most > 1]
        text = "".join([*found, *shared[-1:]]) or "no rows: `links.py`"
        yield [f"link to host memory, {way}", text, f"{rate / 1e9:.1f} GB/s"]


def _steps(rows: Sequence[Row]) -> Iterable[list[str]]:
    """Predicted seconds against measured ones: of rows of the same step and way the last."""
    key = lambda r: tuple(
        str(r.get(name))
        for name in ("model", "batch", "way", "scanned", "stacked", "attention", "profile")
    )
    last = {key(r): r for r in rows if r.get("predicted_ms") and r.get("ms")}
    for profiled, title in ((False, "by these rates"), (True, "with `profile=True`")):
        off = sorted(
            abs(r["predicted_ms"] / r["ms"] - 1)
            for r in last.values()
            if bool(r.get("profile")) is profiled
        )
        what = f"seconds of {len(off)} plans, predicted {title}"
        if off:
            text = f"off by {statistics.median(off):.1%} in the median, {off[-1]:.0%} at most"
        else:
            text = "no rows: `training_steps.py" + (" --profile`" if profiled else "`")
        yield [what, text, ""]


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    print(card_page(FLAGS.card))


if __name__ == "__main__":
    flags.DEFINE_enum("card", "h200", [n for n, c in CARDS.items() if c.hardware], "which")
    app.run(main)
