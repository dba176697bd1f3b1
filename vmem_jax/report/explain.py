"""explain: a plan for people, as a table by layer."""

from __future__ import annotations

import dataclasses
import functools
import io
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vmem_jax.core.costs import Costs, Source
from vmem_jax.core.packing import Interval, pack
from vmem_jax.core.parked import parked, parked_spans
from vmem_jax.core.plan import Plan
from vmem_jax.core.planned import planned_costs, planned_program, predicted_need, simulate_plan
from vmem_jax.core.program import COMPRESS, DECOMPRESS, Phase, Program
from vmem_jax.core.simulate import Timeline, simulate
from vmem_jax.core.tensor_cache import Traffic
from vmem_jax.core.tuning import Tuning
from vmem_jax.errors import show_nbytes
from vmem_jax.policy.base import what_holds, where_peak
from vmem_jax.policy.bound import Bound, lower_bound
from vmem_jax.report.convolutions import steps_table
from vmem_jax.report.trace import Recording, chrome_trace, predicted
from vmem_jax.report.xspace import save_trace
from vmem_jax.search.log import SearchLog, What


@dataclasses.dataclass(frozen=True)
class LayerRow:
    """One layer of the user's model.

    Attributes:
      layer: its name.
      kept_nbytes: bytes of its forward values that are kept for the backward pass.
      recomputed_nbytes: bytes of its forward values that are dropped and recomputed.
      recompute_seconds: the seconds of that recomputation.
    """

    layer: str
    kept_nbytes: int
    recomputed_nbytes: int
    recompute_seconds: float

    @property
    def why(self) -> str:
        if not self.recomputed_nbytes:
            return "kept: read by the backward pass" if self.kept_nbytes else "nothing to keep"
        price = self.recompute_seconds / self.recomputed_nbytes * 2**30
        return f"recomputed: {price * 1e3:.2f} ms a GiB"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """A report of a plan and its costs. `str()` gives the table.

    Attributes:
      plain_need, compiled_need: the compiled needs of plain jit and of the plan, in bytes.
      peak_at: the user's layer and line of the plan's predicted peak.
      holders: what holds the bytes there.
      program, costs: the program and costs that the plan was made from.
      timeline: the predicted execution.
      tuning: the result of `jit(tune=True)`; None before it is known.
      log: the events of the search; None without a search.
      spared: the parts of the search that were skipped; "" for none.
      stacked: what of scanned layers is on the device all at once, and why; "" for nothing.
      cache: the predicted traffic without the tensor cache, and with it; None without.
    """

    program: Program
    costs: Costs
    timeline: Timeline
    plan: Plan
    budget: int | None
    plain_need: int
    compiled_need: int
    peak_at: str
    holders: str
    seconds: float
    plain_seconds: float
    rows: tuple[LayerRow, ...]
    tuning: Tuning | None = None
    log: SearchLog | None = None
    spared: str = ""
    stacked: str = ""
    cache: tuple[Traffic, Traffic] | None = None

    def table(self) -> Table:
        table = Table(title=str(self.plan))
        for column, justify in (
            ("layer", "left"),
            ("kept", "right"),
            ("recomputed", "right"),
            ("ms", "right"),
            ("why", "left"),
        ):
            table.add_column(column, justify=justify)  # type: ignore[arg-type]
        for row in self.rows:
            table.add_row(
                row.layer,
                show_nbytes(row.kept_nbytes) if row.kept_nbytes else "",
                show_nbytes(row.recomputed_nbytes) if row.recomputed_nbytes else "",
                f"{row.recompute_seconds * 1e3:.3f}" if row.recompute_seconds else "",
                row.why,
            )
        return table

    def summary(self) -> str:
        budget = "none" if self.budget is None else show_nbytes(self.budget)
        need = show_nbytes(predicted_need(self.program, self.plan))
        return (
            f"peak: plain jit {show_nbytes(self.plain_need)}, budget {budget}, predicted "
            f"{need}, compiled {show_nbytes(self.compiled_need)} "
            f"({self.compiled_need / max(self.plain_need, 1):.0%} of plain) after "
            f"{self._effort()}\n"
            f"predicted peak at {self.peak_at}: {self.holders}\n"
            f"predicted time: {self.seconds * 1e3:.2f} ms, {self.plain_seconds * 1e3:.2f} ms without "
            f"recomputation; {self._where_times_come_from()}"
            + self._gap()
            + self._batch()
            + self._loops()
            + self._compression()
            + self._cache()
            + self._skipped()
            + (f"\n{self.stacked}" if self.stacked else "")
            + (f"\n{self.spared}" if self.spared else "")
            + (f"\n{self.tuning}" if self.tuning is not None else "")
        )

    @functools.cached_property
    def bound(self) -> Bound | None:
        """Lower bounds for the plans with this plan's order of first runs, within the budget or this
        plan's own peak if that is higher; None without a budget.

        Takes a second or two for thousands of steps.
        """
        if self.budget is None:
            return None
        first_runs = tuple(dict.fromkeys(self.plan.order))
        within = max(self.budget, self.timeline.peak)
        return lower_bound(self.program, self.costs, first_runs, within)

    def _gap(self) -> str:
        if self.bound is None:
            return ""
        return (
            f"\nno plan in this order takes less than {self.bound.seconds * 1e3:.2f} ms (gap "
            f"{max(self.bound.gap(self.seconds), 0.0):.1%}) or {show_nbytes(self.bound.peak)}"
        )

    def _effort(self) -> str:
        """The effort of the search: plans and compiles, plain jit's included if it was compiled."""
        if self.log is None:
            return "no search"
        plans, compiles = self.log.plans, len(self.log.of(What.COMPILED, What.MISSED))
        return f"{plans} plan{'s' * (plans != 1)} and {compiles} compile{'s' * (compiles != 1)}"

    def _skipped(self) -> str:
        """The techniques that are allowed and of no use here."""
        skipped = self.log.skipped if self.log is not None else {}
        return "".join(f"\n{name} is not used: {why}" for name, why in skipped.items() if why)

    def _batch(self) -> str:
        """In how many parts the batch runs, and what is split."""
        split = [s for s, step in enumerate(self.program.steps) if step.times > 1]
        if not split:
            return ""
        seconds = [self.costs.seconds[s] for s in self.plan.order]
        own = sum(self.costs.seconds[s] for s in self.plan.order if self.program.steps[s].times > 1)
        what = f"the batch runs in {self.plan.sub_batches} sub-batches"
        if self.plan.opened:
            what = f"a loop of {self.plan.sub_batches} iterations is planned inside"
        return (
            f"\n{what}: {len(split)} of "
            f"{len(self.program.steps)} steps, {own / (sum(seconds) or 1.0):.0%} of the time; the "
            "rest runs once"
        )

    def _loops(self) -> str:
        """What each loop takes, an iteration and all, what it stacks, and what it computes again."""
        said = ""
        for s, loop in enumerate(self.program.steps):
            if not loop.body:
                continue
            ms = 1e3 * self.costs.seconds[s]
            each = f"{ms / loop.iterations:.3f} ms each"
            said += f"\n{loop.where}, {loop.length} iterations: {each}, {ms:.2f} ms in all"
            buffers = [self.program.buffers[b] for b in loop.writes]
            if stacked := sum(b.nbytes for b in buffers if b.slices > 1):
                slices = show_nbytes(stacked // loop.length)
                said += f"; it stacks {slices} each, {show_nbytes(stacked)} in all"
            again = sum(step.phase is Phase.FORWARD for step in loop.body)
            if loop.phase is Phase.BACKWARD and again:
                said += f"; {again} of its {len(loop.body)} steps compute forward values again"
        return said

    def _compressed_stacks(self, others: int) -> str:
        """How many stacks are compressed; all else that is takes `others` bytes."""
        loops = [loop for loop in self.program.steps if loop.body]
        inside = [(loop.length, s) for loop in loops for s in loop.body if s.op == COMPRESS]
        held = sum(n for _, n in self.plan.compressed) - others
        whole = sum(length * s.nbytes for length, s in inside) - held  # each reads one, writes one
        sizes = f"{show_nbytes(held)} in place of {show_nbytes(whole)}"
        return f"\n{len(inside)} stacks wait compressed, slice by slice: {sizes}" if inside else ""

    def _compression(self) -> str:
        """What is compressed, into how much, and what that takes."""
        if not self.plan.compressed:
            return ""
        steps = self.program.steps
        nbytes = [buffer.nbytes for buffer in self.program.buffers]
        whole = self.program.uncompressed_nbytes
        both = [s for s, step in enumerate(steps) if step.op in (COMPRESS, DECOMPRESS)]
        made = [b for s in both if steps[s].op == COMPRESS for b in steps[s].writes]
        total = lambda sizes: show_nbytes(sum(sizes[b] for b in made))
        stacks = self._compressed_stacks(sum(nbytes[b] for b in made))
        if not made:
            return stacks
        said = stacks + (
            f"\n{len(made)} values wait compressed: {total(nbytes)} in place of {total(whole)}, for "
            f"{sum(self.costs.seconds[s] for s in both) * 1e3:.2f} ms"
        )
        moved = [t.buffer for t in parked(self.program, self.plan)]
        if not {*moved} & {*made}:
            return said
        spans = parked_spans(self.program, self.plan)
        pinned = lambda sizes: show_nbytes(
            pack([Interval(sizes[b], *span) for b, span in zip(moved, spans, strict=False)]).nbytes
        )
        return f"{said}; {pinned(nbytes)} are pinned for what moves, in place of {pinned(whole)}"

    def _cache(self) -> str:
        """How much of the budget is a tensor cache, and what it saves."""
        if self.cache is None:
            return ""
        uncached, cached = self.cache
        both = [show_nbytes(each.out + each.into) for each in self.cache]
        return (
            f"\ntensor cache: {show_nbytes(cached.capacity)} of the budget are left; {both[1]} cross "
            f"the link in place of {both[0]} ({cached.hits} of {uncached.misses} fetches hit)"
        )

    @property
    def shares(self) -> dict[Source, float]:
        """The share of the predicted seconds of all runs of steps by source; sums to 1."""
        sources = self.costs.sources or (Source.ROOFLINE,) * len(self.costs.seconds)
        seconds = dict.fromkeys(Source, 0.0)
        for s in self.plan.order:
            seconds[sources[s]] += self.costs.seconds[s]
        total = sum(seconds.values()) or 1.0
        return {source: part / total for source, part in seconds.items() if part}

    def _where_times_come_from(self) -> str:
        if not self.costs.sources:
            return (
                "times are a roofline's, nothing was measured (`vmem-jax profile`, `profile=True`)"
            )
        parts = [f"{share:.0%} {source.value}" for source, share in self.shares.items()]
        if self.costs.error is not None:
            parts.append(f"median error of the calibration {self.costs.error:.0%}")
        return "times are " + ", ".join(parts)

    def trace(self) -> dict[str, Any]:
        """The prediction as a Chrome trace: what the lanes do when, stalls, live bytes, the peak."""
        return chrome_trace(self._recording())

    def save_trace(self, path: str | Path) -> None:
        """Writes the prediction for https://ui.perfetto.dev or chrome://tracing, or for xprof.

        Args:
          path: a file, as "trace.json"; or a log directory, a name without a suffix, for xprof.
        """
        save_trace(path, self._recording())

    def _recording(self) -> Recording:
        return predicted(self.program, self.timeline, self.costs, self.budget)

    def __str__(self) -> str:
        out = io.StringIO()
        console = Console(file=out, width=120)
        console.print(self.table())
        if self.plan.convolutions:
            console.print(steps_table(self.program, self.plan))
        console.print(self.summary(), markup=False, highlight=False)
        return out.getvalue()


def explain(
    program: Program,
    costs: Costs,
    plan: Plan,
    *,
    budget: int | None,
    plain_need: int,
    compiled_need: int,
    tuning: Tuning | None = None,
    log: SearchLog | None = None,
    spared: str = "",
    stacked: str = "",
    cache: tuple[Traffic, Traffic] | None = None,
) -> Explanation:
    """The explanation of `plan` for `program`."""
    plain_seconds = simulate(program, range(len(program.steps)), costs).seconds
    timeline = simulate_plan(program, plan, costs)
    costs = planned_costs(program, plan, costs)
    program = planned_program(program, plan)
    again: dict[int, int] = {}
    for s in plan.recomputed:
        again[s] = again.get(s, 0) + 1
    rows: dict[str, list[float]] = {}
    for s, step in enumerate(program.steps):
        if step.phase is not Phase.FORWARD:
            continue
        row = rows.setdefault(step.layer or "(no layer)", [0, 0, 0.0])
        row[2] += costs.seconds[s] * again.get(s, 0)
        for b in step.writes:
            late = any(program.steps[r].phase is not Phase.FORWARD for r in program.readers[b])
            if not late or program.is_resident[b]:
                continue
            row[1 if s in again else 0] += program.buffers[b].nbytes
    return Explanation(
        program=program,
        costs=costs,
        timeline=timeline,
        plan=plan,
        budget=budget,
        plain_need=plain_need,
        compiled_need=compiled_need,
        tuning=tuning,
        log=log,
        spared=spared,
        stacked=stacked,
        cache=cache,
        peak_at=where_peak(program, timeline),
        holders=what_holds(program, timeline),
        seconds=timeline.seconds,
        plain_seconds=plain_seconds,
        rows=tuple(
            LayerRow(layer, int(kept), int(made), seconds)
            for layer, (kept, made, seconds) in rows.items()
            if kept or made or seconds
        ),
    )
