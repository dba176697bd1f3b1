"""Draws the papers' figures from rows, as SVG whose text is text; equal rows give equal files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import matplotlib
from manifest import Case, Table, show_how
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from records import Record

STYLE = {"svg.fonttype": "none", "svg.hashsalt": "vmem_jax", "font.size": 8}

POLICIES = ("plain", "checkpoint", "offload", "exact", "auto", "vdnn", "vdnnpp", "modnn",
            "superneurons", "ucudnn")  # fmt: skip
"""In the order of their colours; the same policy has the same one in every figure."""

AXES = {
    "need": "compiled peak, of plain's",
    "moved_nbytes": "moved each way, GiB",
    "seconds": "time of a step, ms",
}

Value = Callable[[Record, str], float | None]
Rows = Mapping[Case, Record]


def draw(table: Table, rows: Rows, value: Value, path: Path) -> bool:
    """Writes the figure of `table` to `path`; False, and no file, where plain's rows alone have its
    quantity, or none has.

    Bars by network, one for each way; or, for `plot = "curves"`, time by budget for each network.
    Times that were not measured are predicted ones, hatched.
    """
    with matplotlib.rc_context(STYLE):
        if table.plot == "curves":
            figure = _curves(table, rows, value)
        else:
            figure = _bars(table, rows, value)
        if figure is None:
            path.unlink(missing_ok=True)
            return False
        figure.savefig(path, format="svg", metadata={"Date": None})
    # a space at the end of a line is nothing that a diff should show
    path.write_text(re.sub(r"[ \t]+$", "", path.read_text(), flags=re.M))
    return True


def _figure_of(row: Record, quantity: str, value: Value) -> tuple[float | None, bool]:
    """The value of a row, and whether it is predicted."""
    found = value(row, quantity)
    if found is None and quantity == "seconds":
        return value(row, "predicted_seconds"), True
    return found, False


def _color(variant: str) -> str:
    return f"C{POLICIES.index(variant.partition('?')[0].partition(':')[0])}"


def _bars(table: Table, rows: Rows, value: Value) -> Figure | None:
    quantity = table.plot
    dtypes = list(dict.fromkeys(case.dtype for case in table.cases))
    shown: dict[str, dict[tuple[str, str], tuple[float, bool]]] = {}
    for case in _with_plain(table):
        if case in rows and case.asked in ("", "none", "least", *_sizes(table)):
            found, predicted = _figure_of(rows[case], quantity, value)
            if found is not None and quantity == "need":  # their sizes are too different
                plain = rows.get(Case(case.model, case.batch, case.dtype, "plain"))
                found = None if plain is None or not plain.need else found * 2**30 / plain.need
            if found is not None:
                key = case.network, case.how
                shown.setdefault(case.dtype, {})[key] = found, predicted
    compared = lambda dtype: any(how != "plain" for _, how in shown.get(dtype, ()))
    dtypes = [dtype for dtype in dtypes if compared(dtype)]
    if not dtypes:
        return None
    figure = Figure(figsize=(8, 0.4 + 2.6 * len(dtypes)), layout="constrained")
    axes = figure.subplots(len(dtypes), 1, squeeze=False)[:, 0]
    labels: dict[str, None] = {}
    for ax, dtype in zip(axes, dtypes, strict=True):
        labels |= dict.fromkeys(_bars_of(ax, shown[dtype]))
        ax.set(title=dtype, ylabel=AXES[quantity])
    handles = [axes[0].bar(0, 0, **_look(label)) for label in labels]
    figure.legend(handles, list(map(show_how, labels)), loc="outside right upper", frameon=False)
    return figure


def _bars_of(ax: Axes, values: Mapping[tuple[str, str], tuple[float, bool]]) -> list[str]:
    networks = list(dict.fromkeys(network for network, _ in values))
    ways = list(dict.fromkeys(how for _, how in values))
    width = 0.8 / len(ways)
    for (network, how), (found, predicted) in values.items():
        x = networks.index(network) + (ways.index(how) + 0.5) * width - 0.4
        ax.bar(x, found, width, **_look(how) | ({"hatch": "////"} if predicted else {}))
    ax.set_xticks(range(len(networks)), [n.replace(":", " (") + ")" for n in networks])
    ax.set_xlim(-0.5, len(networks) - 0.5)
    ax.spines[["top", "right"]].set_visible(False)
    return ways


def _look(how: str) -> dict:
    """The colour of the policy; its options and budget make it lighter."""
    variant, _, asked = how.partition("@")
    alpha = 0.45 if "conv" in variant else 0.7 if asked == "least" or "aconv" in variant else 1.0
    return {"color": _color(variant), "alpha": alpha, "edgecolor": "white", "linewidth": 0.3}


def _with_plain(table: Table) -> list[Case]:
    plains = [Case(c.model, c.batch, c.dtype, "plain") for c in table.cases]
    return list(dict.fromkeys([*plains, *table.cases]))


def _sizes(table: Table) -> set[str]:
    return {case.asked for case in table.cases if case.asked.endswith("B")}


def _curves(table: Table, rows: Rows, value: Value) -> Figure | None:
    """Time by the share of plain jit's need that the budget is, a panel for each network."""
    points: dict[tuple[str, str], dict[str, list[tuple[float, float, bool]]]] = {}
    for case in table.cases:
        row = rows.get(case)
        if row is None or row.budget is None:
            continue
        found, predicted = _figure_of(row, "seconds", value)
        if found is not None:
            panel = points.setdefault((case.network, case.dtype), {})
            panel.setdefault(case.variant, []).append((row.budget, found, predicted))
    if not points:
        return None
    figure = Figure(figsize=(2.2 * len(points) + 2.8, 2.6), layout="constrained")
    axes = figure.subplots(1, len(points), squeeze=False)[0]
    for ax, ((network, dtype), ways) in zip(axes, points.items(), strict=True):
        for variant, own in ways.items():
            own.sort()
            dashed = "--" if any(predicted for *_, predicted in own) else "-"
            style = "s" if "sub_batches" in variant else "o"
            xs, ys = [x for x, *_ in own], [y for _, y, _ in own]
            ax.plot(
                xs, ys, style + dashed, color=_color(variant), ms=3, lw=1, label=show_how(variant)
            )
        ax.set(title=f"{network.replace(':', ' (')}), {dtype}", xlabel="budget / plain's need")
        ax.set_ylim(bottom=0)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("time of a step, ms (dashed: predicted)")
    handles = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), list(handles), loc="outside right upper", frameon=False)
    return figure
