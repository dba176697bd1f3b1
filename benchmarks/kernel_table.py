"""Where the time of traced training steps goes, by class of kernel, and the bytes that it moves.

    python benchmarks/training_steps.py --model=resnet152 --ways=plain,0.5 --traces=here
    python benchmarks/kernel_table.py here/resnet152_plain here/resnet152_0.5 --card=h100

A step is a path that `traces.py` wrote to, without an ending. Its table has for each class of kernels
the launches, milliseconds and bytes of one step, the bytes a second, and their share of the card's
rate of memory in `core/cards.py`; of every step but the first also the milliseconds over the first's.

`kernel_classes.py` says of which class an instruction is, and what it moves. A kernel is of the class
of the instruction that launches it. In a command buffer its name tells: XLA calls a kernel after its
fusion, and numbers different Pallas kernels of one name in the order of the text. What cuDNN and
cuBLAS run there is told by words in the kernel's name. What is then not known is a class of its own.
Kernels may overlap, which is a row below zero; with it and the time in which nothing runs the rows
add up to the step.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import kernel_classes as classes
import records
from absl import app, flags
from kernel_classes import Launched, launched
from rich.console import Console
from rich.table import Table

from vmem_jax.core.cards import CARDS, TARGETS

ZEROS = "memory set"
NOT_ASSIGNED = "not assigned"
OVERLAP = "overlap"
IDLE = "nothing runs"
ORDER = (*classes.CLASSES, ZEROS, NOT_ASSIGNED, OVERLAP, IDLE)

KERNELS = {  # by words in the name of a kernel that is no instruction's
    r"^Memcpy(D2H|H2D)": classes.HOST,
    r"fmha|sdpa|compute_dot_do_o|convert_dq": classes.ATTENTION,
    r"fprop": classes.FORWARDS,
    r"dgrad": classes.TO_INPUTS,
    r"wgrad": classes.TO_WEIGHTS,
    r"gemm|nvjet|cublas": classes.PRODUCTS,
    r"[Mm]emset": ZEROS,
    r"[Mm]emcpy": classes.COPIES,
}

FLAGS = flags.FLAGS


@dataclasses.dataclass(frozen=True)
class Row:
    """A class of kernels in one step.

    Attributes:
      share: of the card's rate of memory; None where no bytes are known.
    """

    name: str
    ms: float
    launches: float
    nbytes: int
    share: float | None


def rows(
    text: str,
    kernels: Sequence[Mapping[str, Any]],
    busy: Mapping[str, float],
    bandwidth: float,
) -> list[Row]:
    """The classes that a step has, in ORDER.

    Args:
      text, kernels, busy: what is in NAME.hlo, NAME.kernels.json and NAME.busy.json.
      bandwidth: bytes a second.
    """
    found = launched(text)
    micros, launches, moved = Counter[str](), Counter[str](), Counter[str]()
    for row, name in zip(kernels, classes_of(kernels, found), strict=True):
        micros[name] += row["us"]
        launches[name] += row["times"]
    for one in found.values():
        moved[one.name] += one.nbytes * one.times
    micros[OVERLAP] = busy["busy"] - sum(micros.values())
    micros[IDLE] = busy["span"] - busy["busy"]

    def row_of(name: str) -> Row:
        us, nbytes = micros[name], moved[name]
        share = nbytes / (us / 1e6) / bandwidth if us > 0 and nbytes else None
        return Row(name, us / 1e3, launches[name], nbytes, share)

    return [row_of(name) for name in ORDER if micros[name]]


def classes_of(kernels: Iterable[Mapping[str, Any]], found: Mapping[str, Launched]) -> list[str]:
    """That of each of `kernels`, rows of NAME.kernels.json."""
    kernels = list(kernels)
    by_kernel = {re.sub(r"\W", "_", name): one.name for name, one in found.items()}
    by_kernel |= {kernel: classes.PALLAS for kernel in pallas_kernels(found)}
    launching = {row["op"] for row in kernels}
    calls: dict[str, Counter[str]] = {}  # of convolutions in command buffers, by their pass
    for name, one in found.items():
        if one.which and name not in launching:
            calls.setdefault(one.which, Counter())[one.name] += 1

    def class_of(op: str, kernel: str) -> str:
        if op in found:
            return found[op].name
        if kernel in by_kernel:
            return by_kernel[kernel]
        named = next((name for words, name in KERNELS.items() if re.search(words, kernel)), None)
        if named in calls:  # of more than one class: that of most
            return calls[named].most_common(1)[0][0]
        return named or NOT_ASSIGNED

    return [class_of(row["op"], row["kernel"]) for row in kernels]


def pallas_kernels(found: Mapping[str, Launched]) -> dict[str, list[str]]:
    """The instructions of each Pallas kernel, by its name: those with one configuration share it."""
    configurations: dict[tuple[str, str], list[str]] = {}
    for name, one in found.items():
        if one.name == classes.PALLAS:
            configuration = one.instruction.rest.partition("backend_config=")[2]
            named = re.search(r'\bname = "([^"]*)"', configuration)
            key = named[1] if named else "", configuration
            configurations.setdefault(key, []).append(name)
    seen = Counter[str]()
    kernels = {}
    for (name, _), same in configurations.items():
        kernels[f"{name}__{seen[name]}" if seen[name] else name] = same
        seen[name] += 1
    return kernels


def table(step: str, found: Sequence[Row], first: Sequence[Row] | None) -> Table:
    """For people; `first` is the step that its milliseconds are compared with."""
    more = [] if first is None else ["more ms"]
    shown = Table("class", "launches", "ms", *more, "GiB", "TB/s", "of rate", title=step)
    shown.columns[0].no_wrap = True
    for column in shown.columns[1:]:
        column.justify = "right"
    before = {row.name: row.ms for row in first or ()}
    now = {row.name: row for row in found}
    for name in ORDER:
        if name not in before and name not in now:
            continue
        row = now.get(name, Row(name, 0.0, 0, 0, None))
        rate = f"{row.nbytes / row.ms / 1e9:.2f}" if row.share else ""
        compared = [f"{row.ms - before.get(name, 0.0):+.2f}"] if first is not None else []
        shown.add_row(
            *(name, f"{row.launches:.0f}", f"{row.ms:.2f}", *compared, f"{row.nbytes / 2**30:.2f}"),
            *(rate, f"{row.share:.0%}" if row.share else ""),
        )
    ms = sum(row.ms for row in found)
    compared = [f"{ms - sum(before.values()):+.2f}"] if first is not None else []
    launches, nbytes = sum(row.launches for row in found), sum(row.nbytes for row in found)
    shown.add_section()
    shown.add_row("the step", f"{launches:.0f}", f"{ms:.2f}", *compared, f"{nbytes / 2**30:.2f}")
    return shown


def as_line(step: str, row: Row) -> dict[str, Any]:
    """A row of `--out`."""
    share = None if row.share is None else round(row.share, 4)
    line = {"step": step, "class": row.name, "ms": round(row.ms, 4), "launches": row.launches}
    return line | {"nbytes": row.nbytes, "share": share}


def main(arguments: Sequence[str]) -> None:
    card = CARDS[FLAGS.card]
    about = {"card": card.hardware.title if card.hardware else card.name}
    about |= {"jax": FLAGS.jax, "commit": FLAGS.commit or records.commit()}
    first: list[Row] | None = None
    for argument in arguments[1:]:
        path = Path(argument)
        read = lambda ending, path=path: path.with_name(path.name + ending).read_text()
        kernels, busy = (json.loads(read(ending)) for ending in (".kernels.json", ".busy.json"))
        found = rows(read(".hlo"), kernels, busy, card.machine.bandwidth)
        Console().print(table(path.name, found, first))
        first = first or found
        if FLAGS.out:
            records.append(Path(FLAGS.out), [as_line(path.name, row) | about for row in found])


if __name__ == "__main__":
    flags.DEFINE_enum("card", "h200", TARGETS, "what the steps ran on")
    flags.DEFINE_string("out", None, "where rows are added, one JSON object a line")
    flags.DEFINE_string("commit", "", "of what made the traces, where it is not this checkout's")
    flags.DEFINE_string("jax", jax.__version__, "the release that made the traces")
    app.run(main)
