"""convolutions: tables and a picture of the configurations of convolutions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.table import Table

from vmem_jax.core.convolution import XLA, Configuration, Convolution, Micro
from vmem_jax.core.plan import Plan
from vmem_jax.core.program import Program
from vmem_jax.errors import show_nbytes


def configurations_table(
    convolution: Convolution,
    configurations: Sequence[Configuration],
    chosen: Configuration | None = None,
) -> Table:
    """`configurations` of `convolution`, one a row, as `front` gives them; `chosen` is marked."""
    table = Table("micro-batches", "engines", "workspace", "ms", title=str(convolution))
    for column in table.columns[2:]:
        column.justify = "right"
    for configuration in configurations:
        table.add_row(
            _division(configuration),
            ", ".join(_engine(m) for m, _ in _runs(configuration)),
            show_nbytes(configuration.workspace),
            f"{configuration.seconds * 1e3:.3f}",
            style="bold" if configuration == chosen else None,
        )
    return table


def steps_table(program: Program, plan: Plan) -> Table:
    """The configuration of each convolution of `plan`, in the order of their first runs."""
    table = Table("layer", "pass", "by", "micro-batches", "workspace", "ms", title="convolutions")
    for column in table.columns[4:]:
        column.justify = "right"
    chosen = dict(plan.convolutions)
    for s in dict.fromkeys(plan.order):
        convolution, configuration = program.steps[s].convolution, chosen.get(s)
        if convolution is None or configuration is None:
            continue
        table.add_row(
            program.steps[s].layer or program.steps[s].source or "(no layer)",
            ", ".join(filter(None, (convolution.which.value, configuration.epilogue))),
            "XLA"
            if configuration.is_xlas
            else ", ".join(dict.fromkeys(map(_doer, configuration.micros))),
            _division(configuration),
            show_nbytes(configuration.workspace),
            f"{configuration.seconds * 1e3:.3f}",
        )
    return table


def totals_table(
    chosen: Mapping[Convolution, Configuration], counts: Mapping[Convolution, int] | None = None
) -> Table:
    """The chosen configuration of each convolution of a network, the slowest first, and the sums.

    Args:
      counts: how often the network has each convolution (default: once).
    """
    table = Table("convolution", "times", "micro-batches", "workspace", "ms", show_footer=True)
    for column in (table.columns[1], *table.columns[3:]):
        column.justify = "right"
    times = lambda c: 1 if counts is None else counts.get(c, 1)
    for c in sorted(chosen, key=lambda c: -times(c) * chosen[c].seconds):
        table.add_row(
            str(c),
            str(times(c)),
            _division(chosen[c]),
            show_nbytes(chosen[c].workspace),
            f"{times(c) * chosen[c].seconds * 1e3:.3f}",
        )
    workspaces = [chosen[c].workspace for c in chosen for _ in range(times(c))]
    footers = (
        "largest and sum of workspaces, sum of times",
        str(len(workspaces)),
        "",
        f"{show_nbytes(max(workspaces, default=0))}, {show_nbytes(sum(workspaces))}",
        f"{sum(times(c) * chosen[c].seconds for c in chosen) * 1e3:.3f}",
    )
    for column, footer in zip(table.columns, footers, strict=True):
        column.footer = footer
    return table


def plot(
    convolution: Convolution, configurations: Sequence[Configuration], path: str | Path
) -> None:
    """Draws `configurations`, as `front` gives them, to `path`: an SVG, PNG or PDF, by its ending.

    On the left workspace against time (µ-cuDNN, figure 8), a point each, and what any limit between
    them gives. On the right how each divides the batch, in the same order, coloured by engine.

    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a picture needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(str(convolution))
    points, bars = figure.subplots(1, 2)
    mib = [c.workspace / 2**20 for c in configurations]
    ms = [c.seconds * 1e3 for c in configurations]
    points.step(mib, ms, where="post", color="0.7")
    points.plot(mib, ms, "o", color="black")
    points.set(xlabel="workspace, MiB", ylabel="time, ms")
    points.set_ylim(bottom=0)
    points.locator_params(axis="x", nbins=6)
    engines = sorted({_engine(m) for c in configurations for m in c.micros})
    for row, configuration in enumerate(configurations):
        done = 0
        for micro in configuration.micros:
            color = f"C{engines.index(_engine(micro))}"
            bars.barh(row, micro.batch, left=done, color=color, edgecolor="white")
            done += micro.batch
    for n, engine in enumerate(engines):
        bars.barh(0, 0, color=f"C{n}", label=engine)
    bars.set_yticks(range(len(configurations)), [show_nbytes(c.workspace) for c in configurations])
    bars.set(xlabel="samples")
    if engines:
        figure.legend(title="engine", loc="outside right upper")
    figure.savefig(path)


def _division(configuration: Configuration) -> str:
    """The micro-batches, as 4 × 60 + 16."""
    runs = _runs(configuration)
    return " + ".join(f"{n} × {m.batch}" if n > 1 else str(m.batch) for m, n in runs)


def _runs(configuration: Configuration) -> Iterator[tuple[Micro, int]]:
    """Equal neighbours together, and how many there are."""
    for micro, group in itertools.groupby(configuration.micros):
        yield micro, len(list(group))


def _doer(micro: Micro) -> str:
    return "XLA, sliced" if micro.engine == XLA else f"cuDNN engine {_engine(micro)}"


def _engine(micro: Micro) -> str:
    if micro.engine == XLA:
        return "XLA"
    return f"{micro.engine} on {micro.channels} channels" if micro.channels else str(micro.engine)
