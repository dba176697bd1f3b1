"""Records what is decided about many train steps, and compares two such records.

    python benchmarks/decisions.py --out=rows.jsonl
    python benchmarks/decisions.py --compare=benchmarks/results/decisions_h200.jsonl,rows.jsonl

Nothing runs: each case of `decision_cases.CASES` is planned and compiled for a card that is not
there, in a process of its own, one after another. A row says what its plan does (as a digest), what
that was predicted to need and to take and what it compiled to, and what finding it took: plans,
compiles, CPU seconds. A case that fails is a row with its error.

The comparison prints what differs. Its exit status is 1 where a case no longer fits its budget, its
predicted seconds or its lowest peak get worse, or the sum of compiles or of planning's CPU seconds
rises, each by more than its tolerance.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import re
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import decision_rows
import jax
import jax.numpy as jnp
import numpy as np
import records
from absl import app, flags, logging
from decision_cases import CASES, F32, Case
from decision_rows import DEFAULT, Decision, Tolerances

import vmem_jax
from vmem_jax.models import job

FLAGS = flags.FLAGS
DEVICES = 4
"""CPU devices that each case has, to describe the mesh of a sharded step with."""


def cpu_seconds() -> float:
    """Of this process, all its threads, and the processes that it waited for, such as ptxas."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class Counter:
    """Counts the outermost calls of functions, and their CPU seconds."""

    def __init__(self) -> None:
        self.calls, self.seconds, self._depth = 0, 0.0, 0

    def wrap(self, fun: Callable) -> Callable:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            began = cpu_seconds()
            try:
                return fun(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.calls += 1
                    self.seconds += cpu_seconds() - began

        return counted


def hooks() -> dict[str, list[tuple[type, str]]]:
    """The methods of classes that are counted, by what they do; those that there are.

    Nothing else of the search is known here, so that it can be replaced.
    """
    methods = {
        "plan": [(policy, "plan") for policy in vmem_jax.POLICIES.values()],
        "lower": [(jax.stages.Traced, "lower")],
        "compile": [(jax.stages.Lowered, "compile")],
    }
    return {n: [(o, m) for o, m in each if hasattr(o, m)] for n, each in methods.items()}


@contextlib.contextmanager
def counting() -> Iterator[dict[str, Counter]]:
    """Counts the calls of `hooks` until it ends; what has no method is not among the counters."""
    methods = [(name, *method) for name, each in hooks().items() for method in each]
    counters = {name: Counter() for name, *_ in methods}
    inherited = object()
    before = [vars(owner).get(method, inherited) for _, owner, method in methods]
    for name, owner, method in methods:
        setattr(owner, method, counters[name].wrap(getattr(owner, method)))
    try:
        yield counters
    finally:
        for (_, owner, method), own in zip(methods, before, strict=True):
            if own is inherited:
                delattr(owner, method)
            else:
                setattr(owner, method, own)


def _plain(value: Any) -> Any:
    """`value` as JSON has it, without the seconds that something was measured to take."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.name != "seconds"]
        return [_plain(getattr(value, name)) for name in names]
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, int | float | str | None) else str(value)


def digest_of(plan: Any) -> str:
    """What `plan` does, as 16 hexadecimal digits."""
    fields = ("order", "transfers", "looped", "convolutions", "sub_batches")
    text = json.dumps([_plain(getattr(plan, field, None)) for field in fields])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def facts_of_plan(plan: Any) -> dict[str, Any]:
    """What a plan does, as fields of a Decision."""
    return {
        "digest": digest_of(plan),
        "recomputed": len(plan.order) - len(set(plan.order)),
        "transfers": len(plan.transfers),
        "sub_batches": plan.sub_batches,
        "predicted_seconds": plan.predicted_seconds,
    }


def arguments(case: Case, shapes: Any) -> Any:
    """The (state, batch) of a step, as shapes; over several devices the batch is split over "data",
    and of the state what can be over "model"."""
    if not case.mesh:
        return shapes
    devices = np.array(jax.devices()[: int(np.prod(case.mesh))]).reshape(case.mesh)
    mesh, P = jax.sharding.Mesh(devices, ("data", "model")), jax.sharding.PartitionSpec
    parts = case.mesh[1]

    def split(a: Any, spec: Any) -> Any:
        sharding = jax.sharding.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

    def weight(a: Any) -> Any:
        over = a.ndim > 1 and parts > 1 and a.shape[-1] % parts == 0
        return split(a, P(*[None] * (a.ndim - 1), "model") if over else P())

    state, batch = shapes
    return jax.tree.map(weight, state), jax.tree.map(lambda a: split(a, P("data")), batch)


def budget_of(asked: str, shapes: Any, devices: int) -> int | float | str:
    """The budget of a case as `vmem_jax.jit` takes it."""
    if asked == "minimum":
        nbytes = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(shapes)) // devices
        return nbytes + nbytes // 100
    return asked if asked[-1].isalpha() else float(asked)


def _warm_up(case: Case, device: str) -> None:
    """Whatever the first step of a process does: the described card, modules that load late."""
    square = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    _, x = arguments(case, (square, square))
    step = lambda x: x - jax.grad(lambda x: jnp.tanh(jnp.tanh(x @ x) @ x).sum())(x)
    vmem_jax.jit(step, budget="1GiB").lower(x).compile(target=device)


def decide(case: Case, device: str) -> dict[str, Any]:
    """Plans and compiles a case; the fields of its Decision."""
    if case.dtype == F32:
        jax.config.update("jax_default_matmul_precision", "highest")
    _warm_up(case, device)
    sizes = {name: getattr(case, name) for name in ("batch", "dtype", "image", "tokens")}
    work = job(case.model, optimizer=case.optimizer, **sizes)
    shapes = work.state_shapes(), work.batch
    args = arguments(case, shapes)
    policies = vmem_jax.POLICIES
    budget = budget_of(case.asked, shapes, int(np.prod(case.mesh)))
    step = vmem_jax.jit(
        work.step,
        budget=budget,
        policy=policies[case.policy](**dict(case.options)) if case.options else case.policy,
        allow=case.allow or None,
        sub_batches=case.sub_batches,
        donate_argnums=0,
    )
    began = cpu_seconds()
    with counting() as counters:
        try:
            facts = _facts(step.lower(*args).compile(target=device))
        except Exception as error:
            facts = _failed(error)
        spent = cpu_seconds() - began
    calls = {name: counter.calls for name, counter in counters.items()}
    seconds = {name: round(counter.seconds, 3) for name, counter in counters.items()}
    planning = spent - seconds.get("lower", 0.0) - seconds.get("compile", 0.0)
    return {
        **({"budget_nbytes": budget} if isinstance(budget, int) else {}),
        **facts,
        "plans": calls.get("plan"),
        "compiles": calls.get("compile"),
        "policy_seconds": seconds.get("plan"),
        "planning_seconds": round(planning, 3),
        "lowering_seconds": seconds.get("lower"),
        "compile_seconds": seconds.get("compile"),
    }


def _facts(compiled: Any) -> dict[str, Any]:
    attempts = getattr(compiled, "attempts", ())
    return {
        "outcome": "ok",
        "budget_nbytes": compiled.plan.budget,
        **facts_of_plan(compiled.plan),
        "predicted_need": attempts[-1].predicted_need if attempts else None,
        "need": compiled.need_nbytes,
    }


def _failed(error: Exception) -> dict[str, Any]:
    facts: dict[str, Any] = {"outcome": f"{type(error).__name__}: {str(error)[:300]}"}
    if not isinstance(error, vmem_jax.BudgetError):
        return facts
    plan = error.lowest_plan
    named = {"lowest": error.lowest_peak, "lowest_compiled": error.compiled}
    of_plan = {} if plan is None else facts_of_plan(plan)
    return {**facts, "budget_nbytes": error.budget, **named, **of_plan}


def _child(case: Case, device: str, commit: str, results: Connection) -> None:
    """Sends the row of a case, from a process of its own."""
    origin = records.origin(commit)
    with tempfile.TemporaryDirectory() as empty:
        os.environ["VMEM_JAX_CACHE"] = empty  # no times that were measured on this machine
        try:
            facts = decide(case, device)
        except Exception as error:
            logging.exception("%s cannot be asked for", case.name)
            facts = {"outcome": f"{type(error).__name__}: {str(error)[:300]}"}
    results.send(dataclasses.asdict(Decision(case.name, device=device, **facts, **origin)))


def run(case: Case, device: str, limit: float, commit: str = "") -> Decision:
    """The row of a case, which has `limit` seconds in a process of its own."""
    context = multiprocessing.get_context("fork")  # with all modules loaded, and no backend yet
    results, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(case, device, commit, theirs))
    process.start()
    theirs.close()
    try:
        if not results.poll(limit):
            return Decision(case.name, f"Timeout: {limit:g} s passed", device=device, commit=commit)
        return Decision(**results.recv())
    except EOFError:
        process.join()
        outcome = f"Crash: the process ended with status {process.exitcode}"
        return Decision(case.name, outcome, device=device, commit=commit)
    finally:
        process.kill()
        process.join()


def record() -> None:
    """Writes the rows, each as soon as it is there."""
    out = Path(FLAGS.out)
    rows = decision_rows.read(out) if out.exists() else {}
    chosen = [case for case in CASES if re.search(FLAGS.only, case.name)]
    place = {case.name: i for i, case in enumerate(CASES)}
    commit = FLAGS.commit or records.commit()
    for case in chosen:
        if FLAGS.resume and case.name in rows:
            continue
        row = rows[case.name] = run(case, FLAGS.device, FLAGS.limit, commit)
        decision_rows.write(out, sorted(rows.values(), key=lambda r: place.get(r.case, len(place))))
        print(
            f"{row.case}: {row.outcome[:100]}, {row.plans} plans, {row.compiles} compiles, "
            f"{row.planning_seconds} s of planning, {row.compile_seconds} s of compiling",
            flush=True,
        )


def compare() -> int:
    """Prints what differs; returns the exit status."""
    before, after = (decision_rows.read(Path(path)) for path in FLAGS.compare)
    names = [field.name for field in dataclasses.fields(Tolerances)]
    limits = Tolerances(**{name: FLAGS[f"tolerate_{name}"].value for name in names})
    found = decision_rows.changes(before, after, limits, FLAGS.partial)
    print(decision_rows.table(found))
    worse = [change for change in found if change.worse]
    cases = len({change.case for change in found if change.case in before})
    print(f"{len(before.keys() & after.keys())} cases compared, {cases} differ, {len(worse)} worse")
    return int(bool(worse))


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    if not FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    if FLAGS.compare:
        if len(FLAGS.compare) != 2:
            raise app.UsageError("--compare takes two files")
        sys.exit(compare())
    if not FLAGS.out:
        raise app.UsageError("--out or --compare says what to do")
    # Of the processes of the cases, which begin without a backend.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_enable_compilation_cache", False)  # what compiling takes is recorded
    record()


def define_flags() -> None:
    define = flags.DEFINE_float
    flags.DEFINE_string("out", "", "File for the rows; rows of other cases that it has are kept.")
    flags.DEFINE_string("only", "", "Only cases in whose name this regular expression is found.")
    flags.DEFINE_bool("resume", False, "Leave out cases that --out has a row of.")
    define("limit", 300.0, "Seconds by a clock after which a case is ended.")
    flags.DEFINE_string("device", "h200", "The card to compile for.")
    flags.DEFINE_string("commit", "", "Commit of the code, where there is no git checkout.")
    flags.DEFINE_list("compare", [], "Two files of rows, the older first: prints what differs.")
    flags.DEFINE_bool("partial", False, "Compare only cases that both files have.")
    share = "By what share this may rise: "
    define("tolerate_seconds", DEFAULT.seconds, share + "the predicted seconds of a case.")
    define("tolerate_lowest", DEFAULT.lowest, share + "the lowest peak of a case.")
    define("tolerate_compiles", DEFAULT.compiles, share + "the sum of all compiles.")
    define("tolerate_planning", DEFAULT.planning, share + "the sum of planning's CPU seconds.")


if __name__ == "__main__":
    define_flags()
    app.run(main)
