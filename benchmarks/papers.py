"""Makes the rows of the papers' tables and figures.

    python benchmarks/papers.py --table=vdnn_fig11 --device=h200 --out=rows.jsonl
    python benchmarks/papers.py --table=vdnn_fig11,vdnn_fig14 --out=rows.jsonl      # on a GPU

--networks=vgg16:256, --dtypes=bfloat16 and --ways=auto@least take a part of a table, --core the least
that makes its statement. What is run for one, and what its paper says, is in benchmarks/tables/. A
row that is in --out is not run again, whichever table asked for it.

On a GPU all rows of a network and dtype come from one process of run.py, in which they take turns
with plain jit; it is timed again with rows that were missing. What has no row when --seconds are
over is logged and waits for the next call. --done=FILES leaves out what other files have, --list
says what is left. With --device=h200 nothing runs: steps are compiled for a card that need not be
there, each in its own process with a limit of time, and what needs the card is left out; such rows
have a file of their own. Failures are rows too: a budget that cannot be met (with the lowest peak),
memory that runs out, and of steps that are only compiled a limit that passes and a process that
dies. docs/papers.md is made from the rows by benchmarks/pages.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import computed
import jax
import manifest
import records
import variants
from absl import app, flags
from manifest import Case
from records import LEAST_OF, Record

from vmem_jax.core.cards import TARGETS
from vmem_jax.errors import show_nbytes

HERE = Path(__file__).parent
FLAGS = flags.FLAGS

ON_THE_CARD = "ucudnn"
"""The policy that plans with what was timed on the card alone."""


def selected() -> list[manifest.Table]:
    wanted = map(manifest.load, manifest.names() if FLAGS.table == ["all"] else FLAGS.table)
    return [dataclasses.replace(t, cases=t.core) if FLAGS.core else t for t in wanted]


def case_of(row: Record) -> Case:
    return Case(row.model, row.batch, row.dtype, row.variant, row.asked)


def plain_of(case: Case) -> Case:
    """The reference of `case`."""
    return Case(case.model, case.batch, case.dtype, "plain")


def is_selected(case: Case) -> bool:
    """Whether `case` is of the part that the flags ask for."""
    return (
        (not FLAGS.dtypes or case.dtype in FLAGS.dtypes)
        and (not FLAGS.networks or case.network in FLAGS.networks)
        and (not FLAGS.ways or case.how in ("plain", *FLAGS.ways))
    )


def unneeded(table: manifest.Table, case: Case, rows: Mapping[Case, Record]) -> str:
    """Why `case` says nothing beside plain jit's row in `rows`; "" where it does."""
    plain = rows.get(plain_of(case))
    if plain is None or plain.need is None or not table.below_plain:
        return ""
    return variants.why_plain_does(case.asked, plain.need)


def min_peak_of(case: Case, rows: dict[Case, Record]) -> int | None:
    """Bytes of the budget of `case`, which is what another policy needs at the least."""
    own = [row for other, row in rows.items() if plain_of(other) == plain_of(case)]
    return records.min_peak_of(own, case.asked.removeprefix(LEAST_OF))


def command_of(like: Case, ways: Iterable[str], out: Path, **more: object) -> list[str]:
    """run.py for `ways` of the step of `like`."""
    found = {
        "model": like.model,
        "batch": like.batch,
        "dtype": like.dtype,
        "precision": like.precision,
        "learning_rate": manifest.LEARNING_RATE,
        "device": FLAGS.device,
        "ways": ",".join(ways),
        "out": out,
        "commit": FLAGS.commit or records.commit(),
        "rounds": FLAGS.rounds,
        "steps": FLAGS.steps,
    }
    if FLAGS.device == "here":
        found["profile"] = FLAGS.profile
        found["conv"] = FLAGS.conv
    words = [f"--{name}={value}" for name, value in (found | more).items()]
    return [sys.executable, str(HERE / "run.py"), *words]


def run(case: Case, plain: Record | None) -> Record:
    """The row of `case`, made in a process of its own."""
    more: dict[str, object] = {"known": FLAGS.out if Path(FLAGS.out).exists() else ""}
    if plain is not None and plain.need is not None:
        more["plain_need"] = plain.need
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.jsonl"
        command = command_of(case, [case.how], out, **more)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=FLAGS.limit)
        except subprocess.TimeoutExpired:
            return failed(case, plain, records.time_limit(FLAGS.limit))
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


def compile_cases(table: manifest.Table, out: Path, rows: dict[Case, Record]) -> None:
    """Compiles what is not in `rows` and writes each row as soon as it is there."""
    pairs = ((plain_of(case), case) for case in table.cases)
    for case in filter(is_selected, dict.fromkeys(itertools.chain(*pairs))):
        if case in rows and FLAGS.resume:
            continue
        label = f"{table.name}: {case.network} {case.dtype} {case.how}"
        why = unneeded(table, case, rows)
        if case.variant.startswith(ON_THE_CARD):
            why = "it plans with what was timed on the card"
        if case.asked.startswith(LEAST_OF) and not min_peak_of(case, rows):
            why = "no row says how much that is"
        if why:
            print(f"{label}: not run: {why}", flush=True)
            continue
        row = run(case, rows.get(plain_of(case)))
        rows[case] = row
        records.write(out, rows.values())
        need = show_nbytes(row.need) if row.need is not None else ""
        print(f"{label}: {need} {row.outcome[:160]}", flush=True)


def cannot_fit(known: Record | None) -> bool:
    """Whether a compiled row says that no plan fits, in minutes of search, and not what would."""
    if known is None or not known.outcome.startswith("BudgetError"):
        return False
    return known.asked != "least" or not known.lowest_compiled


Group = tuple[Case, list[str], list[str]]
"""Plain jit of a network and dtype, the ways to run, and those that say something below its need."""


def missing(tables: list[manifest.Table], out: Path) -> Iterator[Group]:
    """What has no row yet, in `out` when it is asked for or in the files of `--done`."""
    groups: dict[Case, dict[str, bool]] = {}  # by plain; ways, and whether only below its need
    known, done = read_all(FLAGS.known), read_all(FLAGS.done)
    every = [(table, case) for table in tables for case in table.cases]
    # cores first, since a time may pass
    for table, case in sorted(every, key=lambda each: each[1] not in each[0].core):
        if not is_selected(case):
            continue
        if cannot_fit(known.get(case)):
            print(f"{case.network} {case.dtype} {case.how}: no plan when it was compiled alone")
            continue
        if unneeded(table, case, done):
            continue
        group = groups.setdefault(plain_of(case), {})
        group[case.how] = table.below_plain and group.get(case.how, True)
    for plain, group in groups.items():
        rows = done.keys() | read(out).keys() if FLAGS.resume else set()
        there = {case.how for case in rows if plain_of(case) == plain}
        ways = [way for way in group if way not in there and way != "plain"]
        if ways or ("plain" in group and "plain" not in there):
            yield plain, ways, [way for way in ways if group[way]]


def run_groups(tables: list[manifest.Table], out: Path) -> None:
    """Times what is missing, with plain jit, a process for each network and dtype."""
    for plain, ways, below in missing(tables, out):
        print(f"{plain.network} {plain.dtype}: {', '.join(ways) or 'plain'}", flush=True)
        if FLAGS.list:
            continue
        more = {"together": FLAGS.together, "seconds": FLAGS.seconds}
        more["known"] = ",".join([*FLAGS.known, *FLAGS.done])
        more |= {"below_plain": ",".join(below)}
        command = command_of(plain, ["plain", *ways], out, **more)
        if status := subprocess.run(command, check=False).returncode:
            print(f"{plain.network} {plain.dtype}: exit {status}", flush=True)
        if out.exists():
            records.write(out, read(out).values())


def read(out: Path) -> dict[Case, Record]:
    """The rows of `out`; of one that was run again the last."""
    return {case_of(row): row for row in records.read(out)} if out.exists() else {}


def read_all(paths: Iterable[str]) -> dict[Case, Record]:
    """The rows of several files; of one that is in more of them the last."""
    return {case: row for path in paths for case, row in read(Path(path)).items()}


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
    out, tables = Path(FLAGS.out), selected()
    for table in tables:
        if table.computed and FLAGS.calculate and not FLAGS.list:
            cells = computed.COMPUTED[table.computed](table)
            path = out.with_name(f"{table.name}_computed.jsonl")
            path.write_text("".join(json.dumps(dataclasses.asdict(cell)) + "\n" for cell in cells))
            print(f"{table.name}: {len(cells)} figures calculated", flush=True)
    wanted = [table for table in tables if table.runs]
    if FLAGS.device == "here":
        run_groups(wanted, out)
        for table in tables if FLAGS.scripts and not FLAGS.list else ():
            run_scripts(table, out)
        return
    rows = read(out)
    for table in wanted:
        compile_cases(table, out, rows)


def define_flags() -> None:
    """The flags of every command that makes rows by `run`."""
    flags.DEFINE_enum("device", "here", ["here", *TARGETS], "Compile for this card, run nothing.")
    flags.DEFINE_string("out", None, "File of the rows.", required=True)
    flags.DEFINE_float("limit", 600.0, "Seconds for a row that is compiled, or a script.")
    flags.DEFINE_list("networks", [], "Only these, as vgg16:256.")
    flags.DEFINE_list("ways", [], "Only plain and these, as modnn@least.")
    flags.DEFINE_integer("rounds", 7, "Blocks of steps of each row.")
    flags.DEFINE_integer("steps", 4, "Steps in a block.")
    flags.DEFINE_float("profile", 40.0, "Seconds to time the steps of a network in, once; 0: none.")
    flags.DEFINE_float("conv", 120.0, "Seconds to time cuDNN's plans for a network in.")
    flags.DEFINE_string("commit", "", "Commit of the code, where there is no git checkout.")


if __name__ == "__main__":
    define_flags()
    flags.DEFINE_list("table", ["all"], "Names of benchmarks/tables/, or all.")
    flags.DEFINE_list(
        "known",
        [str(HERE / "results/papers_h200_compiled.jsonl")],
        "On a GPU: compiled rows that say what a policy needs at the least and what cannot fit.",
    )
    flags.DEFINE_bool("core", False, "Only the rows that the statements of the tables need.")
    flags.DEFINE_bool("resume", True, "Leave out the rows that --out and the files of --done have.")
    flags.DEFINE_list("done", [], "On a GPU: further files of rows that are not run again.")
    flags.DEFINE_bool("list", False, "On a GPU: say what would be run, and run nothing.")
    flags.DEFINE_bool("calculate", True, "Also make the tables that are calculations.")
    flags.DEFINE_list("dtypes", [], "Only these.")
    flags.DEFINE_bool("scripts", True, "On a GPU also run the further commands of the tables.")
    flags.DEFINE_integer("together", 6, "Variants that take turns with plain jit at a time.")
    flags.DEFINE_float("seconds", 0.0, "For a network and dtype on a GPU; 0: until all is timed.")
    app.run(main)
