"""Rows of results: what was run, on what, and what came out. A row can be run again from itself."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

LEAST_OF = "least:"
"""Begins a budget that is what another policy needs at the least, as least:modnn."""

NOT_COMPILED = "not compiled: --seconds"
ENDED = "ended before all was timed"
LATE = (NOT_COMPILED, ENDED)
"""How errors begin of rows that training_steps.py had no time for."""


@dataclasses.dataclass(frozen=True)
class Record:
    """One variant of one step, measured.

    Attributes:
      model, batch, image, dtype, optimizer: the step; its state is donated. `image` is the height of
        images in pixels, or how many tokens a sequence has.
      variant: "plain" (jax.jit), "checkpoint" (jax.checkpoint per layer or block), "offload" (JAX's
        own, of the inputs of layers), or a policy, with its options as in a URL's query.
      budget: the fraction of plain jit's need that was asked for, a size being made one; None
        without a budget, or where that need is not known.
      outcome: "ok", or what failed: failures are rows too.
      asked: the budget in words: a fraction, a size, "none", "least" for the lowest that the policy
        reaches, or "least:modnn" for the lowest that another one does.
      device: the card that it was compiled for without being run; "" where it ran.
      budget_nbytes: the budget in bytes.
      lowest: bytes that a policy which cannot fit would need; what it reached.
      lowest_compiled: whether that is the compiler's figure.
      need: bytes by the compiler's figures, arguments + outputs − aliased + temporaries.
      average_nbytes: bytes live on an average moment of the step, by prediction.
      predicted_need: bytes that the first compiled plan was predicted to need; None without a plan.
      first_need: bytes that this first plan compiled to.
      step_seconds: every timed block's seconds a step; compare medians.
      plain_seconds: the median of plain jit's blocks, which took turns with these in one process;
        None where it did not run.
      compile_seconds: from call to proved step, planning and all compiles.
      plan_seconds: CPU seconds of the policy, for all plans.
      compiles: how often the step was compiled.
      transfers: buffers that wait in host memory.
      moved_nbytes: their bytes, in each direction.
      pinned_nbytes: host memory in which they wait.
      sub_batches: parts of the batch that run one after another.
      divided: convolutions that run in micro-batches.
      compressed: values that wait for the backward pass without their zeros.
      precision: JAX's default precision of products; "" as JAX has it.
      recomputed: steps that run again.
      predicted_seconds: seconds a step by the simulator.
      loss: after the timed steps, to see that all variants compute the same.
      plain_loss: plain jit's after as many from the same state; networks of thousands of layers are
        chaotic, all others end within a hundredth of it.
    """

    model: str
    batch: int
    image: int
    dtype: str
    optimizer: str
    variant: str
    budget: float | None
    outcome: str
    asked: str = ""
    device: str = ""
    budget_nbytes: int | None = None
    lowest: int | None = None
    lowest_compiled: bool | None = None
    need: int | None = None
    average_nbytes: int | None = None
    predicted_need: int | None = None
    first_need: int | None = None
    step_seconds: tuple[float, ...] = ()
    plain_seconds: float | None = None
    compile_seconds: float | None = None
    plan_seconds: float | None = None
    compiles: int | None = None
    transfers: int | None = None
    moved_nbytes: int | None = None
    pinned_nbytes: int | None = None
    sub_batches: int | None = None
    divided: int | None = None
    compressed: int | None = None
    precision: str = ""
    recomputed: int | None = None
    predicted_seconds: float | None = None
    loss: float | None = None
    plain_loss: float | None = None
    machine: str = ""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    commit: str = ""


def machine() -> str:
    device = jax.devices()[0]
    return f"{device.device_kind} ({platform.machine()}, {platform.python_version()})"


def versions() -> dict[str, str]:
    found = {}
    for name in ("jax", "jaxlib", "flax", "optax", "nvidia-cudnn-cu13", "vmem_jax"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of the checkout; "" where there is none, so that a flag can give it."""
    here = Path(__file__).parent
    try:
        return subprocess.run(
            ["git", "-C", here, "rev-parse", "--short=12", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def size_of(row: Record) -> int | None:
    """Bytes that the compiler gave for a row: what it needs, or where nothing fits the lowest."""
    return row.need or (row.lowest if row.lowest_compiled else None)


def min_peak_of(rows: Iterable[Record], variant: str) -> int | None:
    """Bytes that `variant` came to when it was asked for its least; None where no row says.

    What ran counts before what was compiled alone.
    """
    sizes = [
        (row.device != "", size)
        for row in rows
        if row.variant == variant and row.asked == "least" and (size := size_of(row))
    ]
    return min(sizes)[1] if sizes else None


def origin(given: str = "") -> dict[str, Any]:
    """The machine, versions and commit of a row; `given` is that of `--commit`, if it is not ""."""
    return {"machine": machine(), "versions": versions(), "commit": given or commit()}


def append(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Writes `rows`, one JSON object a line, behind those of the file."""
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write(path: Path, records: Iterable[Record]) -> None:
    """Writes one JSON object a line; who ends the process meanwhile leaves the file as it was."""
    new = path.with_name(f".{path.name}")
    new.write_text("".join(json.dumps(dataclasses.asdict(r)) + "\n" for r in records))
    new.replace(path)


def lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, one JSON object a line, of whatever benchmark."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def read(path: Path) -> list[Record]:
    rows = lines(path)
    return [Record(**{**row, "step_seconds": tuple(row["step_seconds"])}) for row in rows]


def time_limit(seconds: float) -> str:
    """The outcome of what did not end within so many seconds."""
    return f"time limit: {seconds:.0f} s passed"
