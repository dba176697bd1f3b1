"""trade: seconds against bytes, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from vmem_jax.core.pareto_point import ParetoPoint
from vmem_jax.errors import show_nbytes


def trade_table(name: str, points: Sequence[ParetoPoint]) -> Table:
    """A row for each of `points`, from the smallest budget."""
    table = Table(
        *("budget", "predicted peak", "compiled peak", "predicted ms", "of the fastest"),
        *("techniques", "sub-batches"),
        title=f"{name}: seconds against bytes",
    )
    for column in table.columns[:5]:
        column.justify = "right"
    fastest = min((point.predicted_seconds for point in points), default=0.0) or 1.0
    for point in points:
        compiled = point.compiled_peak
        table.add_row(
            show_nbytes(point.budget),
            show_nbytes(point.predicted_peak),
            "" if compiled is None else show_nbytes(compiled),
            f"{point.predicted_seconds * 1e3:.2f}",
            f"{point.predicted_seconds / fastest:.2f}",
            ", ".join(point.techniques) or "none",
            str(point.plan.sub_batches) if point.plan.sub_batches > 1 else "",
        )
    return table
