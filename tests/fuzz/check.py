"""One program with several options: what came out, as one row for each."""

from __future__ import annotations

import functools
import linecache
import re
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

import vmem_jax
from vmem_jax.errors import VmemError

from .options import Options
from .programs import Program, Spec, build
from .results import WRONG, compare

Row = dict[str, Any]

FIT, REFUSED, BUDGET, UNTRUE = "fit", "refused", "budget_error", "untrue"
OVER, CRASHED, ENDED, HUNG, INVALID = "over", "crashed", "ended", "hung", "invalid"

FINDINGS = (WRONG, OVER, CRASHED, ENDED, HUNG, UNTRUE)
"""Outcomes that must not be. The others: it fits and has plain's results; an error on purpose; no
plan fits; and "invalid", where plain jit itself fails, so that the program says nothing."""

OUR_ROOT = str(Path(vmem_jax.__file__).parent)


def check(spec: Spec, options: Sequence[tuple[int, Options, bool]]) -> Iterator[Row]:
    """A row for each of the options: their index, the options, and whether a lowest peak that is
    named is asked for as the budget."""
    try:
        program = build(spec)
        plain = jax.jit(program.step).lower(*program.fresh()).compile()
        expected = jax.block_until_ready(plain(*program.fresh()))
    except Exception as error:  # a program that JAX does not take
        found = {"signature": "", "detail": _first_line(error), "trace": traceback.format_exc()}
        yield from (
            {"option": i, "outcome": INVALID, "seconds": 0.0, **found} for i, _, _ in options
        )
        return
    reference = functools.cache(lambda: _in_double(spec))
    for index, one, ask in options:
        began = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                row = _checked(program, plain, expected, one, ask, reference)
        except Exception as error:
            row = _raised(error)
        row = {"option": index, **row, "layers": program.layers, "plain_need": need_nbytes(plain)}
        yield {**row, "seconds": round(time.perf_counter() - began, 2)}


def need_nbytes(compiled: Any) -> int:
    """Arguments + outputs − aliased + temporaries, as the compiler counts them: read here anew, so
    that a mistake of the library's own count is seen."""
    stats = compiled.memory_analysis()
    buffers = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    return buffers - stats.alias_size_in_bytes


def _checked(
    program: Program, plain: Any, expected: Any, options: Options, ask: bool, reference: Any
) -> Row:
    need = need_nbytes(plain)
    keywords, budget = options.keywords(need), options.nbytes(need)
    try:
        step = vmem_jax.jit(program.step, **keywords)
        if options.mode == "shapes":
            shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), program.fresh())
            step.plan(*shapes)
        compiled = step.lower(*program.fresh()).compile()
    except vmem_jax.BudgetError as error:
        return _no_fit(error, program, keywords, budget, need, ask)
    fitting = {"need": need_nbytes(compiled), "budget": budget, "attempts": len(compiled.attempts)}
    if need_nbytes(compiled) > budget:
        return {
            "outcome": OVER,
            "signature": f"over:{options.jit['policy']}",
            "detail": "",
            **fitting,
        }
    if options.mode == "plan":
        saved = vmem_jax.Plan.from_json(compiled.plan.to_json())
        given = {
            n: keywords[n] for n in ("transport", "donate_argnums", "host_budget") if n in keywords
        }
        step = vmem_jax.jit(program.step, plan=saved, **given)
    elif options.mode == "explain":
        str(step.explain(*program.fresh()))
        str(compiled.timeline)
    runs = jax.jit(lambda *args: step(*args)) if options.mode == "inner" else step
    agreed, why = "exact", ""
    for _ in range(2 if compiled.plan.moves else 1):  # again: with an arena that was used
        got = jax.block_until_ready(runs(*program.fresh()))
        one, what = compare(program, plain, expected, got, reference)
        agreed, why = (one, what) if _worse(one, agreed) else (agreed, why)
    untouched = not compiled.plan.fenced and options.mode != "inner"
    if untouched and agreed != "exact" and not keywords.get("donate_argnums"):
        agreed, why = WRONG, why or "the untouched program has other bits than plain jit's"
    if agreed == WRONG:
        return {
            "outcome": WRONG,
            "signature": f"wrong:{options.jit['policy']}",
            "detail": why,
            **fitting,
        }
    return {"outcome": FIT, "signature": "", "detail": "", "agreed": agreed, **fitting}


def _worse(a: str, b: str) -> bool:
    order = ("exact", "close", "chaotic", WRONG)
    return order.index(a) > order.index(b)


def _no_fit(
    error: vmem_jax.BudgetError,
    program: Program,
    keywords: dict,
    budget: int,
    plain_need: int,
    ask: bool,
) -> Row:
    named = {"budget": budget, "lowest_peak": error.lowest_peak, "asked": False}
    row = {"outcome": BUDGET, "signature": "", "detail": str(error)[:300], **named}
    policy = keywords["policy"]
    if error.lowest_peak <= budget:
        return {**row, "outcome": UNTRUE, "signature": f"untrue:not above the budget:{policy}"}
    if error.lowest_peak > plain_need:
        detail = f"named {error.lowest_peak}; plain jit needs {plain_need}"
        return {
            **row,
            "outcome": UNTRUE,
            "signature": f"untrue:above plain:{policy}",
            "detail": detail,
        }
    if not ask:
        return row
    again = {**keywords, "budget": error.lowest_peak}
    try:
        compiled = vmem_jax.jit(program.step, **again).lower(*program.fresh()).compile()
    except vmem_jax.BudgetError as second:
        share = second.lowest_peak / error.lowest_peak
        detail = f"named {error.lowest_peak}, then {second.lowest_peak}: {share:.3f} times"
        return {
            **row,
            "asked": True,
            "outcome": UNTRUE,
            "signature": f"untrue:{policy}",
            "detail": detail,
        }
    if need_nbytes(compiled) > error.lowest_peak:
        return {**row, "outcome": OVER, "signature": f"over:{policy}"}
    return {**row, "asked": True}


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
        "signature": f"crashed:{type(error).__name__}:{_place(error)}",
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


def _place(error: Exception) -> str:
    """The innermost function of the library, which a defect keeps from program to program."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if f.filename.startswith(OUR_ROOT)]
    if not ours:
        return "outside"
    return f"{Path(ours[-1].filename).relative_to(OUR_ROOT).as_posix()}:{ours[-1].name}"


def _first_line(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error))[:300]


def _in_double(spec: Spec) -> Any:
    with jax.enable_x64(True):
        program = build(spec, double=True)
        return jax.block_until_ready(jax.jit(program.step)(*program.fresh()))
