"""One program with several options: what came out, as one row for each."""

from __future__ import annotations

import dataclasses
import functools
import linecache
import re
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.extend.core import jaxpr_as_fun

import vmem_jax
from vmem_jax.api import records
from vmem_jax.capture import capture
from vmem_jax.errors import VmemError

from . import rounding
from .options import Options
from .programs import Program, Spec, build
from .results import WRONG, compare

Row = dict[str, Any]

FIT, REFUSED, BUDGET, UNTRUE = "fit", "refused", "budget_error", "untrue"
OVER, CRASHED, ENDED, HUNG, INVALID = "over", "crashed", "ended", "hung", "invalid"

FINDINGS = (WRONG, OVER, CRASHED, ENDED, HUNG, UNTRUE)
"""Outcomes that must not be. The others: it fits and has plain's results; an error on purpose; no
plan fits; and "invalid", where plain jit itself fails, or comparing results does not end, so that
the program says nothing."""

Own = Callable[[], AbstractContextManager[None]]
"""Entered while results are compared: what is run for that takes no time of the library's."""

GIVEN = ("transport", "donate_argnums", "host_budget", "batch_argnums")
"""Arguments of `vmem_jax.jit` that stand beside `plan`."""

OUR_ROOT = str(Path(vmem_jax.__file__).parent)


class Memory(NamedTuple):
    """Bytes of a program that is compiled by plain `jax.jit`.

    Attributes:
      need: arguments + outputs − aliased + temporaries.
      floor: what plans leave: that without temporaries, and the largest workspace of a product by
        cuBLAS. On Hopper each has 32 MiB, beside which these programs are small. Three programs of
        1,717 on an H100 fit below it, since XLA makes the products of their plans itself.
    """

    need: int
    floor: int


@dataclasses.dataclass(frozen=True)
class Plain:
    """A program as plain `jax.jit` runs it.

    Attributes:
      compiled: with what is not used kept, as the library counts it: it is there.
      memory: what it takes where the given arguments are donated. XLA may need more than without,
        since padding between temporaries differs.
      reference: makes the results in double precision.
      rounded: makes the results of runs that round at random, as `rounding.runs` has them.
      for_gpu: on a CPU, makes the results of the step as it is captured for a GPU, which rewrites
        more of it; None elsewhere.
    """

    program: Program
    compiled: Any
    memory: Callable[[tuple[int, ...]], Memory]
    expected: Any
    reference: Callable[[], Any]
    rounded: Callable[[], Sequence[Any]]
    for_gpu: Callable[[], Any] | None

    @classmethod
    def of(cls, spec: Spec) -> Plain:
        """Compiles and runs it."""
        program = build(spec)
        args = program.fresh()

        def compile(donated: tuple[int, ...] = ()) -> Any:
            step = jax.jit(program.step, keep_unused=True, donate_argnums=donated)
            return step.lower(*args).compile()

        compiled = compile()
        memory = lambda donated: memory_of(compile(donated) if donated else compiled)
        expected = jax.block_until_ready(compiled(*args))
        double = functools.cache(lambda: _in_double(spec))
        rounded = functools.cache(lambda: [*rounding.runs(program.step, program.fresh)])
        on_cpu = jax.default_backend() == "cpu"
        for_gpu = functools.cache(lambda: _captured_for_gpu(program)) if on_cpu else None
        made = program, compiled, functools.cache(memory), expected, double, rounded
        return cls(*made, for_gpu)

    @property
    def need_nbytes(self) -> int:
        return need_nbytes(self.compiled)


def check(plain: Plain, options: Options, ask: bool, own: Own) -> Row:
    """What becomes of a program with some options.

    Args:
      ask: whether a lowest peak that is named is asked for as the budget.
    """
    began = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row = _checked(plain, options, ask, own)
    except Exception as error:
        row = _raised(error)
        if isinstance(error, vmem_jax.LayersError) and options.jit["policy"] == "auto":
            row |= {
                "outcome": CRASHED,
                "signature": f"crashed:another policy's error:{_place(error)}",
            }
    more = {"layers": plain.program.layers, "plain_need": plain.need_nbytes}
    return {**row, **more, "seconds": round(time.perf_counter() - began, 2)}


def invalid(error: Exception) -> Row:
    """A row for a program that plain jit does not take."""
    trace = traceback.format_exc()
    return {"outcome": INVALID, "signature": "", "detail": _first_line(error), "trace": trace}


def memory_of(compiled: Any) -> Memory:
    """What `compiled` takes, of which its text tells the workspaces."""
    need = need_nbytes(compiled)
    products = [line for line in compiled.as_text().splitlines() if '"__cublas' in line]
    workspaces = [int(n) for line in products for n in re.findall(r"\bs8\[(\d+)\]", line)]
    held = need - compiled.memory_analysis().temp_size_in_bytes
    return Memory(need, min(held + max(workspaces, default=0), need))


def need_nbytes(compiled: Any) -> int:
    """Arguments + outputs − aliased + temporaries, as the compiler counts them: read here anew, so
    that a mistake of the library's own count is seen."""
    stats = compiled.memory_analysis()
    buffers = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    return buffers - stats.alias_size_in_bytes


def _checked(plain: Plain, options: Options, ask: bool, own: Own) -> Row:
    program, donated = plain.program, tuple(options.jit.get("donate_argnums", ()))
    if plain.for_gpu is not None:
        got = plain.for_gpu()
        with own():
            agreed, why = compare(program, plain.expected, got, plain.reference, plain.rounded)
        if agreed == WRONG:
            return {"outcome": WRONG, "signature": f"{WRONG}:captured for a GPU", "detail": why}
    donating = plain.memory(donated)
    # shares, and what is left whatever the plan, are those of a step that gives up the same arguments
    alike = options.form == "share" or options.of == "room"
    memory = donating if alike else plain.memory(())
    keywords, budget = options.keywords(*memory), options.nbytes(*memory)
    possible = {"floor": donating.floor, "possible": budget >= donating.floor}
    try:
        step = vmem_jax.jit(program.step, **keywords)
        if options.mode == "shapes":
            shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), program.fresh())
            step.plan(*shapes)
        compiled = step.lower(*program.fresh()).compile()
    except vmem_jax.BudgetError as error:
        return {**_no_fit(error, plain, donating, keywords, ask), **possible}
    fitting = {"need": need_nbytes(compiled), "budget": budget, "attempts": len(compiled.attempts)}
    fitting |= possible
    if need_nbytes(compiled) > budget:
        return {
            "outcome": OVER,
            "signature": f"over:{options.form}:{options.jit['policy']}",
            "detail": f"needs {fitting['need']} of {budget}",
            **fitting,
        }
    if options.mode == "plan":
        saved = vmem_jax.Plan.from_json(compiled.plan.to_json())
        given = {n: keywords[n] for n in GIVEN if n in keywords}
        step = vmem_jax.jit(program.step, plan=saved, **given)
    elif options.mode == "explain":
        str(step.explain(*program.fresh()))
        str(compiled.timeline)
    runs = jax.jit(lambda *args: step(*args)) if options.mode == "inner" else step
    agreed, why = "exact", ""
    for _ in range(2 if compiled.plan.moves else 1):  # again: with an arena that was used
        got = jax.block_until_ready(runs(*program.fresh()))
        with own():
            one, what = compare(program, plain.expected, got, plain.reference, plain.rounded)
        agreed, why = (one, what) if _worse(one, agreed) else (agreed, why)
    # on a GPU kernels are chosen by time, and some add in any order
    untouched = not compiled.plan.fenced and jax.default_backend() == "cpu"
    if (
        untouched
        and agreed != "exact"
        and options.mode != "inner"
        and "donate_argnums" not in keywords
    ):
        agreed, why = WRONG, why or "the untouched program has other bits than plain jit's"
    if agreed == WRONG:
        what = "not finite" if "off by inf" in why else WRONG
        return {
            "outcome": WRONG,
            "signature": f"{what}:{options.jit['policy']}",
            "detail": why,
            **fitting,
        }
    return {"outcome": FIT, "signature": "", "detail": "", "agreed": agreed, **fitting}


def _worse(a: str, b: str) -> bool:
    order = ("exact", "close", "chaotic", WRONG)
    return order.index(a) > order.index(b)


def _no_fit(
    error: vmem_jax.BudgetError, plain: Plain, donating: Memory, keywords: dict[str, Any], ask: bool
) -> Row:
    """Whether what a BudgetError says is true; of the lowest peak where `ask`.

    Args:
      donating: what plain jit takes with the same donation.
    """
    named, policy = error.lowest_peak, keywords["policy"]
    numbers = {"budget": error.budget, "lowest_peak": named, "asked": False}
    row = {"outcome": BUDGET, "signature": "", "detail": str(error)[:300], **numbers}
    untrue = lambda what, why: {
        **row,
        "outcome": UNTRUE,
        "signature": f"untrue:{what}:{policy}",
        "detail": f"named {named}, {why}",
    }
    if named <= error.budget:
        return untrue("not above the budget", f"which is not above {error.budget}")
    if named > max(plain.need_nbytes, donating.need):
        return untrue("above plain", f"but plain jit needs {donating.need}")
    if not ask:
        return row
    row["asked"] = True
    args, again = plain.program.fresh(), {**keywords, "budget": named}
    records.forget()  # as whoever edits the budget starts another process
    try:
        compiled = vmem_jax.jit(plain.program.step, **again).lower(*args).compile()
    except vmem_jax.BudgetError as second:
        share = second.lowest_peak / named
        return untrue("lowest", f"then {second.lowest_peak}: {share:.3f} times")
    if need_nbytes(compiled) > named:
        over = f"over:lowest:{policy}"
        return {**row, "outcome": OVER, "signature": over, "detail": f"{need_nbytes(compiled)}"}
    if error.compiled and error.lowest_plan is not None:
        given = {n: keywords[n] for n in GIVEN if n in keywords}
        step = vmem_jax.jit(plain.program.step, plan=error.lowest_plan, **given)
        need = need_nbytes(step.lower(*args).compile())
        if need > named:
            return untrue("plan", f"its plan needs {need}")
    return row


def _raised(error: Exception) -> Row:
    """A row for an error: on purpose, or a crash."""
    if _on_purpose(error):
        return {
            "outcome": REFUSED,
            "signature": "",
            "detail": f"{type(error).__name__}: {_first_line(error)}",
        }
    trace = "".join(traceback.format_exception(error))
    return {
        "outcome": CRASHED,
        "signature": f"crashed:{_kind(error)}:{_place(error)}",
        "detail": f"{type(error).__name__}: {_first_line(error)}",
        "trace": trace[-6000:],
    }


def _on_purpose(error: Exception) -> bool:
    """Whether vmem_jax raised it knowingly: its own kind, or a ValueError or TypeError with a message
    from a `raise` of its own."""
    if isinstance(error, VmemError):
        return True
    if not isinstance(error, ValueError | TypeError) or not str(error):
        return False
    frame = traceback.extract_tb(error.__traceback__)[-1]
    said = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return frame.filename.startswith(OUR_ROOT) and said.startswith("raise ")


def _kind(error: Exception) -> str:
    """The type of an error; of the runtime's, with its status."""
    name = type(error).__name__
    return f"{name} {str(error).split(':')[0]}" if name == "JaxRuntimeError" else name


def _place(error: Exception) -> str:
    """The innermost function of the library, which a defect keeps from program to program."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if f.filename.startswith(OUR_ROOT)]
    if not ours:
        return "outside"
    return f"{Path(ours[-1].filename).relative_to(OUR_ROOT).as_posix()}:{ours[-1].name}"


def _first_line(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error))[:300]


def _captured_for_gpu(program: Program) -> Any:
    """The results, on this CPU, of the equations that are planned for a GPU."""
    args = program.fresh()
    traced = jax.jit(program.step).trace(*args)
    flat = capture(traced.jaxpr, platform="gpu").flat
    outs = jax.jit(jaxpr_as_fun(flat))(*jax.tree.leaves(args))
    return jax.block_until_ready(jax.tree.unflatten(jax.tree.structure(traced.out_info), outs))


def _in_double(spec: Spec) -> Any:
    with jax.enable_x64(True):
        program = build(spec, double=True)
        return jax.block_until_ready(jax.jit(program.step)(*program.fresh()))
