"""Makes the rows of the papers' tables and figures: each in its own process, with a time limit.

    python benchmarks/papers.py --table=vdnn_fig11 --device=h200 --out=rows.jsonl
    python benchmarks/papers.py --table=vdnn_fig11,vdnn_fig14 --out=rows.jsonl      # on a GPU

--networks=vgg16:256, --dtypes=bfloat16 and --ways=auto@least take a part of a table. What is run for
one, and what its paper says, is in benchmarks/tables/. A row that is in --out is not run again,
whichever table asked for it. With --device=h200 nothing runs: steps are compiled for a card that need
not be there, and what needs the card is left out; such rows have a file of their own. Failures are
rows too: a budget that cannot be met (with the lowest peak), memory that runs out, a limit that
passes, a process that dies. docs/papers.md is made from the rows by benchmarks/pages.py.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import computed
import jax
import manifest
import records
from absl import app, flags
from manifest import Case
from records import Record

from vmem_jax.errors import parse_size, show_nbytes
from vmem_jax.prove.targets import TARGETS

HERE = Path(__file__).parent
FLAGS = flags.FLAGS

ON_THE_CARD = "ucudnn"
"""The policy that plans with what was timed on the card alone."""


def selected() -> list[manifest.Table]:
    wanted = manifest.names() if FLAGS.table == ["all"] else FLAGS.table
    return [manifest.load(name) for name in wanted]


def case_of(row: Record) -> Case:
    return Case(row.model, row.batch, row.dtype, row.variant, row.asked)


def unneeded(table: manifest.Table, case: Case, rows: dict[Case, Record]) -> str:
    """Why there is nothing to run for `case`; "" where there is."""
    if FLAGS.device != "here" and case.variant.startswith(ON_THE_CARD):
        return "it plans with what was timed on the card"
    plain = rows.get(Case(case.model, case.batch, case.dtype, "plain"))
    if plain is None or plain.need is None or not table.below_plain:
        return ""
    if case.asked[-1:].isalpha() and case.asked not in ("none", "least"):
        if parse_size(case.asked, "tables") >= plain.need:
            return f"plain jit needs {show_nbytes(plain.need)}"
    return ""


def flags_of(case: Case, plain: Record | None, out: Path) -> list[str]:
    """The flags of run.py for one row."""
    found = {
        "model": case.model,
        "batch": case.batch,
        "dtype": case.dtype,
        "precision": case.precision,
        "learning_rate": manifest.LEARNING_RATE,
        "device": FLAGS.device,
        "out": out,
        "commit": FLAGS.commit or records.commit(),
        "rounds": FLAGS.rounds,
    }
    own = case.variant in ("plain", "checkpoint", "offload")
    on = {name: own and case.variant == name for name in ("plain", "checkpoint", "offload")}
    on["exact"] = False
    found |= {"policies": "" if own else case.variant, "budgets": "" if own else case.asked}
    if plain is not None and plain.need is not None:
        found["plain_need"] = plain.need
    if FLAGS.device == "here" and not own:
        found["profile"] = FLAGS.profile
        if ON_THE_CARD in case.variant:
            found["conv"] = FLAGS.conv
    words = [f"--{name}={value}" for name, value in found.items()]
    return words + [f"--{'' if value else 'no'}{name}" for name, value in on.items()]


def run(case: Case, plain: Record | None) -> Record:
    """The row of `case`, made in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.jsonl"
        command = [sys.executable, str(HERE / "run.py"), *flags_of(case, plain, out)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=FLAGS.limit)
        except subprocess.TimeoutExpired:
            return failed(case, plain, f"time limit: {FLAGS.limit:.0f} s passed")
        if out.exists():
            return records.read(out)[0]
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return failed(case, plain, f"exit {done.returncode}: {last[:300]}")


def failed(case: Case, plain: Record | None, outcome: str) -> Record:
    """The row of a process that left none; the machine is that of `plain`."""
    return Record(
        model=case.model,
        batch=case.batch,
        image=0,
        dtype=case.dtype,
        optimizer="sgd",
        variant=case.variant,
        budget=None,
        outcome=outcome,
        asked=case.asked,
        device="" if FLAGS.device == "here" else FLAGS.device,
        precision=case.precision,
        machine="" if plain is None else plain.machine,
        versions=records.versions(),
        commit=FLAGS.commit or records.commit(),
    )


def run_cases(table: manifest.Table, out: Path, rows: dict[Case, Record]) -> None:
    """Runs what is not in `rows` and writes each row as soon as it is there."""
    plains = [Case(c.model, c.batch, c.dtype, "plain") for c in table.cases]
    for case in dict.fromkeys(c for pair in zip(plains, table.cases, strict=True) for c in pair):
        if case in rows and FLAGS.resume:
            continue
        if FLAGS.dtypes and case.dtype not in FLAGS.dtypes:
            continue
        if FLAGS.networks and case.network not in FLAGS.networks:
            continue
        if FLAGS.ways and case.how not in ("plain", *FLAGS.ways):
            continue
        label = f"{table.name}: {case.network} {case.dtype} {case.how}"
        if why := unneeded(table, case, rows):
            print(f"{label}: not run: {why}", flush=True)
            continue
        row = run(case, rows.get(Case(case.model, case.batch, case.dtype, "plain")))
        rows[case] = row
        records.write(out, rows.values())
        need = show_nbytes(row.need) if row.need is not None else ""
        print(f"{label}: {need} {row.outcome[:160]}", flush=True)


def run_scripts(table: manifest.Table, out: Path) -> None:
    """The further commands of a table, whose rows have files of their own beside `out`."""
    for script in table.scripts:
        name, *words = script.split()
        own = out.with_name(f"{out.stem}_{Path(name).stem}.jsonl")
        command = [sys.executable, str(HERE / name), *words, f"--out={own}"]
        print(f"{table.name}: {script}", flush=True)
        subprocess.run(command, timeout=FLAGS.limit, check=False)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    jax.config.update("jax_platforms", "cpu")  # of this process: the card is for those that run
    out = Path(FLAGS.out)
    rows = {case_of(row): row for row in records.read(out)} if out.exists() else {}
    for table in selected():
        if table.computed and FLAGS.calculate:
            cells = computed.COMPUTED[table.computed](table)
            path = out.with_name(f"{table.name}_computed.jsonl")
            path.write_text("".join(json.dumps(dataclasses.asdict(cell)) + "\n" for cell in cells))
            print(f"{table.name}: {len(cells)} figures calculated", flush=True)
        if table.runs:
            run_cases(table, out, rows)
        if FLAGS.device == "here":
            run_scripts(table, out)


def define_flags() -> None:
    """The flags of every command that makes rows by `run`."""
    flags.DEFINE_enum("device", "here", ["here", *TARGETS], "Compile for this card, run nothing.")
    flags.DEFINE_string("out", None, "File of the rows.", required=True)
    flags.DEFINE_float("limit", 600.0, "Seconds for a row.")
    flags.DEFINE_list("networks", [], "Only these, as vgg16:256.")
    flags.DEFINE_list("ways", [], "Only plain and these, as modnn@least.")
    flags.DEFINE_integer("rounds", 7, "Blocks of steps of each row.")
    flags.DEFINE_float("profile", 60.0, "Seconds to time the steps of a network in, once.")
    flags.DEFINE_float("conv", 120.0, "Seconds to time cuDNN's plans in, where they are asked for.")
    flags.DEFINE_string("commit", "", "Commit of the code, where there is no git checkout.")


if __name__ == "__main__":
    define_flags()
    flags.DEFINE_list("table", ["all"], "Names of benchmarks/tables/, or all.")
    flags.DEFINE_bool("resume", True, "Leave out the rows that --out has.")
    flags.DEFINE_bool("calculate", True, "Also make the tables that are calculations.")
    flags.DEFINE_list("dtypes", [], "Only these.")
    app.run(main)
