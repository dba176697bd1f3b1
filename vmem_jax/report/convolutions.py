"""convolutions: the ways to do one in micro-batches, for people, as tables and a picture."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table

from vmem_jax.core.convolution import XLA, Configuration, Convolution, Micro
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
        runs = list(_runs(configuration))
        table.add_row(
            " + ".join(f"{n} × {m.batch}" if n > 1 else str(m.batch) for m, n in runs),
            ", ".join(_engine(m) for m, _ in runs),
            show_nbytes(configuration.workspace),
            f"{configuration.seconds * 1e3:.3f}",
            style="bold" if configuration == chosen else None,
        )
    return table


def totals_table(
    convolutions: Sequence[Convolution], configurations: Sequence[Configuration]
) -> Table:
    """What was chosen for each convolution of a network, the longest first, and the sums."""
    table = Table("convolution", "micro-batches", "workspace", "ms", show_footer=True)
    for column in table.columns[2:]:
        column.justify = "right"
    pairs = zip(convolutions, configurations, strict=True)
    for convolution, chosen in sorted(pairs, key=lambda pair: -pair[1].seconds):
        table.add_row(
            str(convolution),
            " + ".join(f"{n} × {m.batch}" if n > 1 else str(m.batch) for m, n in _runs(chosen)),
            show_nbytes(chosen.workspace),
            f"{chosen.seconds * 1e3:.3f}",
        )
    table.columns[0].footer = f"{len(configurations)} in all"
    table.columns[2].footer = show_nbytes(sum(c.workspace for c in configurations))
    table.columns[3].footer = f"{sum(c.seconds for c in configurations) * 1e3:.3f}"
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


def _runs(configuration: Configuration) -> Iterator[tuple[Micro, int]]:
    """Equal neighbours together, and how many there are."""
    for micro, group in itertools.groupby(configuration.micros):
        yield micro, len(list(group))


def _engine(micro: Micro) -> str:
    return "XLA" if micro.engine == XLA else str(micro.engine)
