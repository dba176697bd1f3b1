"""Programs by the hour: seeds dealt to worker processes, rows written, outcomes counted."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from .check import BUDGET, FINDINGS, FIT, HUNG, INVALID, REFUSED, UNTRUE, Row
from .child import Child
from .known import KNOWN
from .layers import Draw
from .options import Options, draw_options
from .programs import Spec, draw_spec

FULL_FROM = 8
"""From so many processes on, one of them generates code as it is for users."""

CORES = 4
"""Of the machine that one process sees: XLA makes pools of as many threads as there are cores."""

NO_FUSION_EMITTERS = {
    "0.10.": "--xla_cpu_use_fusion_emitters=false",
    "0.11.": "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
}
"""Versions of JAX whose XLA:CPU can still generate code for fusions without MLIR: a compile takes a
fifth. Peaks stay as they are with 0.11; with 0.10 they change by some 200 bytes, and another plan
may then be compiled. JAX 0.12 has no such flag."""


GPU_UNOPTIMISED = "--xla_backend_optimization_level=0 --xla_gpu_disable_gpuasm_optimizations=true"
"""Of code for a GPU, which plain jit compiles in 5 to 13 processor seconds where there is an SVD."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How programs are run.

    Attributes:
      platform: "cpu" or "gpu".
      processes: how many workers there are.
      transport: "any", or the one that all programs get.
      each: sets of options for each step; each is one program of the counts. Tracing and plain jit
        are done once for all of them.
      asked: share of the BudgetErrors whose lowest peak is asked for as the budget.
      limit: processor seconds that one program may take.
      codegen: "fast" leaves out what of XLA's code generation changes no buffer; "full" is what
        users have. With `FULL_FROM` processes or more, one of them is "full" in any case.
      preface: Python that every worker runs first.
    """

    platform: str = "cpu"
    processes: int = 1
    transport: str = "any"
    each: int = 4
    asked: float = 0.3
    limit: float = 60.0
    codegen: str = "fast"
    preface: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """What the workers get beside this process's own environment."""
        if self.platform == "gpu":
            share = f"{0.8 / self.processes:.3f}"
            # products in TF32 differ from algorithm to algorithm by more than single precision rounds
            precise = {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}
            there = {"JAX_PLATFORMS": "cuda,cpu", "XLA_CLIENT_MEM_FRACTION": share, **precise}
            return there if self.codegen == "full" else {**there, "XLA_FLAGS": GPU_UNOPTIMISED}
        if self.codegen == "full":
            return {"JAX_PLATFORMS": "cpu"}
        # LLVM's optimisation and MLIR for fusions are four fifths of the time to compile; what is
        # tested ends before them, with the assignment of buffers
        flags = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
        version = importlib.metadata.version("jax")
        flags += [flag for start, flag in NO_FUSION_EMITTERS.items() if version.startswith(start)]
        return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}


def options_of(seed: int, settings: Settings) -> list[tuple[int, Options, bool]]:
    """The sets of options that the program of `seed` gets."""
    ask = lambda i: Draw(seed, i).chance(settings.asked)
    made = [draw_options(seed, i, settings.transport) for i in range(settings.each)]
    return [(i, one, ask(i)) for i, one in enumerate(made)]


def run(
    settings: Settings,
    seeds: Iterable[int],
    seconds: float,
    report: Callable[[Row], None],
    environment: Mapping[str, str] | None = None,
) -> None:
    """Checks the programs of `seeds` until there are none left, or `seconds` have passed.

    What takes too long beside other processes, which share the cores and the GPU, is run once more
    alone when these have ended. Its row is that of the second run, with what the first one took as
    "slow".

    Args:
      report: is called with every row, by one thread at a time.
    """
    until, lock, left = time.monotonic() + seconds, threading.Lock(), iter(seeds)
    slow: list[tuple[Row, Spec, tuple[int, Options, bool], Settings]] = []

    def work(number: int) -> None:
        mine = settings
        if number == 0 and settings.processes >= FULL_FROM:
            mine = dataclasses.replace(settings, codegen="full")
        there = {**mine.environment, **(environment or {})}
        cores = cores_of(number, settings.processes, sorted(os.sched_getaffinity(0)))
        child = Child(there, settings.limit, settings.preface, cores)
        try:
            while time.monotonic() < until:
                with lock:
                    seed = next(left, None)
                if seed is None:
                    return
                options = options_of(seed, settings)
                for row in child.rows(spec := draw_spec(seed), options, until):
                    one = options[row["option"]]
                    row = {**described(seed, spec, one[1], mine), **row}
                    with lock:
                        if row["outcome"] == HUNG and settings.processes > 1:
                            slow.append((row, spec, one, dataclasses.replace(mine, processes=1)))
                        else:
                            report(row)
        finally:
            child.close()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(settings.processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for row, spec, one, alone in slow:
        there = {**alone.environment, **(environment or {})}
        child = Child(there, alone.limit, alone.preface, alone=True)
        try:
            [again] = child.rows(spec, [one])
        finally:
            child.close()
        report({**row, "signature": "", **again, "slow": row["detail"]})


@contextlib.contextmanager
def single(settings: Settings) -> Iterator[Callable[..., Row]]:
    """Gives a function (spec, options, ask=True) -> row, which runs one program.

    The process is the same from one call to the next, but after it ended or hung.
    """
    child = Child(settings.environment, settings.limit, settings.preface, alone=True)

    def run_one(spec: Spec, options: Options, ask: bool = True) -> Row:
        [row] = child.rows(spec, [(0, options, ask)])
        return {**described(spec["seed"], spec, options, settings), **row}

    try:
        yield run_one
    finally:
        child.close()


def run_one(settings: Settings, spec: Spec, options: Options, ask: bool = True) -> Row:
    """One program, in a process of its own."""
    with single(settings) as run:
        return run(spec, options, ask)


def described(seed: int, spec: Spec, options: Options, settings: Settings) -> Row:
    """What a row says of its program, by which it can be made again."""
    made = {"seed": seed, "spec": spec, "options": dataclasses.asdict(options)}
    return {**made, "codegen": settings.codegen}


def cores_of(number: int, processes: int, cores: Sequence[int]) -> list[int]:
    """The cores on which process `number` of `processes` runs: `CORES` of them, next to each other,
    shared with as few other processes as can be."""
    first = number * len(cores) // processes
    return [cores[(first + i) % len(cores)] for i in range(min(CORES, len(cores)))]


def seeds_from(first: int) -> Iterable[int]:
    """All seeds from `first` on."""
    return itertools.count(first)


class Counts:
    """What came out of how many programs.

    Attributes:
      possible: those with a plan or a BudgetError whose budget has room for what no plan frees.
      possible_fit: those of them that fit.
      slow: those that took too long beside other processes, and were run again.
    """

    def __init__(self) -> None:
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.agreed: collections.Counter[str] = collections.Counter()
        self.signatures: collections.Counter[str] = collections.Counter()
        self.asked = self.true = self.possible = self.possible_fit = self.slow = 0
        self.steps: set[int] = set()
        self.first: dict[str, Row] = {}

    def add(self, row: Row) -> None:
        """Counts one row."""
        self.steps.add(row["seed"])
        self.outcomes[row["outcome"]] += 1
        if row["outcome"] == FIT:
            self.agreed[row["agreed"]] += 1
        if row["outcome"] in FINDINGS:
            self.signatures[row["signature"]] += 1
            self.first.setdefault(row["signature"], row)
        if row.get("possible"):
            self.possible += 1
            self.possible_fit += row["outcome"] == FIT
        self.slow += "slow" in row
        if row.get("asked"):
            self.asked += 1
            self.true += row["outcome"] == BUDGET

    @property
    def programs(self) -> int:
        return sum(self.outcomes.values()) - self.outcomes[INVALID]

    @property
    def unknown(self) -> dict[str, Row]:
        """The first row of each finding that is not among the known ones."""
        return {s: row for s, row in self.first.items() if known(s) is None}

    def summary(self) -> dict[str, Any]:
        """The counts, as JSON can hold them."""
        n = self.outcomes
        return {
            "steps": len(self.steps),
            "programs": self.programs,
            "fit": n[FIT],
            "possible": self.possible,
            "possible_fit": self.possible_fit,
            "same": dict(self.agreed),
            "budget_errors": n[BUDGET] + n[UNTRUE],
            "lowest_asked": self.asked,
            "lowest_true": self.true,
            "refused": n[REFUSED],
            **{kind: n[kind] for kind in FINDINGS},
            "slow": self.slow,
            "invalid": n[INVALID],
            "share_that_fits": round(self.possible_fit / max(self.possible, 1), 3),
            "findings": dict(self.signatures),
        }


def known(signature: str) -> str | None:
    """What is known of a finding; None for nothing."""
    return next((why for prefix, why in KNOWN.items() if signature.startswith(prefix)), None)


def reproduce(row: Row) -> str:
    """The command that makes the finding of a row again."""
    spec, options = json.dumps(row["spec"]), json.dumps(row["options"])
    codegen = "" if row["codegen"] == "fast" else f" --codegen={row['codegen']}"
    return f"python -m tests.fuzz --spec='{spec}' --options='{options}'{codegen}"
