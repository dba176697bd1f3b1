"""profile: `vmem-jax profile`, the device, the steps of a model, and what a plan really does."""

from __future__ import annotations

import argparse
import inspect
import sys
from typing import Any

import jax
from rich.console import Console

import vmem_jax
from vmem_jax.capture import capture
from vmem_jax.cli import convolutions
from vmem_jax.cli.options import (
    Subparsers,
    add_command,
    add_model_options,
    bar,
    budget_of,
    job_of,
    not_timed,
    positive,
)
from vmem_jax.cli.user_step import add_user_options, is_own, own_step
from vmem_jax.devices.targets import target
from vmem_jax.profile.measured import measured_costs, measured_machine
from vmem_jax.profile.steps import SECONDS, StepProfile
from vmem_jax.profile.store import Store, identity
from vmem_jax.report.profile import costs_table, machine_table
from vmem_jax.techniques.jit_arguments import TECHNIQUES


def add_profile(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "profile",
        _profile,
        "measure this device, and the steps of a model on it; what was measured before is kept",
    )
    parser.add_argument(
        "model",
        nargs="?",
        help="as vgg16, resnet50 or gpt12w768, or path/to/train.py:step; none: only the device",
    )
    parser.add_argument("--batch", type=positive, help="images in a batch; goes with a model")
    parser.add_argument(
        "--image", type=positive, help="pixels of an image's side; else as published"
    )
    parser.add_argument("--tokens", type=positive, default=1024, help="of a sequence, for a gpt")
    parser.add_argument("--classes", type=positive, help="of labels, or different tokens")
    parser.add_argument("--optimizer", choices=("sgd", "momentum", "adamw"), default="sgd")
    parser.add_argument("--refresh", action="store_true", help="measure everything again")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="run the step inside --budget under JAX's profiler, and show each of its transfers "
        "and stalls as predicted and as they were",
    )
    parser.add_argument("--budget", type=budget_of, help="for --compare, as in `vmem-jax plan`")
    parser.add_argument(
        "--allow",
        nargs="+",
        choices=TECHNIQUES,
        help="techniques for --compare's plan; by default those that are of use here",
    )
    parser.add_argument(
        "--trace",
        metavar="TRACE.json",
        help="for --compare, write both as lanes to this file, or to a directory for xprof",
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="begin to time no further step after so long"
    )
    add_user_options(parser)
    convolutions.add_options(parser)
    add_model_options(parser)


def _profile(arguments: argparse.Namespace) -> int:
    own = is_own(arguments)
    if arguments.model is None and arguments.batch is not None:
        raise ValueError("a model and --batch go together.")
    if own and (arguments.compare or arguments.conv):
        raise ValueError("--compare and --conv are for models of the library.")
    if arguments.compare and None in (arguments.model, arguments.budget):
        raise ValueError("--compare needs a model and --budget.")
    if not arguments.compare and (arguments.budget or arguments.trace or arguments.allow):
        raise ValueError("--budget, --trace and --allow are for --compare.")
    if not arguments.seconds >= 0:
        raise ValueError(f"--seconds must be 0 or more, not {arguments.seconds}.")
    convolutions.check(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    if arguments.target:  # before anything else looks for devices, so that JAX misses no driver
        target(arguments.target).device()
    if arguments.conv:
        work = job_of(arguments)
        jaxpr = jax.jit(work.step).trace(work.state_shapes(), work.batch).jaxpr
        convolutions.run(arguments, console, jaxpr, work.name)
        return 0
    device = jax.devices()[0]
    with bar(console, "device") as on_progress:
        machine = measured_machine(device, refresh=arguments.refresh, on_progress=on_progress)
    console.print(machine_table(machine))
    if arguments.model is not None:
        if own:
            fun, args = own_step(arguments)
            fun = inspect.unwrap(fun)
            name = fun.__name__
        else:
            work = job_of(arguments)
            fun, args, name = work.step, (work.state_shapes(), work.batch), work.name
        captured = capture(jax.jit(fun).trace(*args).jaxpr)
        with bar(console, "steps") as on_progress:
            found = measured_costs(
                captured,
                device,
                machine=machine,
                seconds=arguments.seconds,
                refresh=arguments.refresh,
                on_progress=on_progress,
            )
        console.print(costs_table(name, captured.program, found.costs))
        console.print(_profiled(name, found), markup=False, highlight=False, soft_wrap=True)
        if arguments.compare:
            _compare(arguments, console, work, device)
    path = Store(identity(device)).path
    console.print(f"kept in {path}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _compare(
    arguments: argparse.Namespace, console: Console, work: Any, device: jax.Device
) -> None:
    """Runs the step of `work` in the budget and lays its transfers beside the predicted ones."""
    from vmem_jax.profile.observe import observe
    from vmem_jax.report.compare import compare
    from vmem_jax.report.xspace import save_trace

    step = vmem_jax.jit(
        work.step,
        budget=arguments.budget,
        policy=vmem_jax.Auto(cache=False),  # what a cache holds crosses no link
        allow=arguments.allow,
        donate_argnums=0,
    )
    shapes = work.state_shapes(), work.batch
    with console.status(f"planning and compiling {work.name}"):
        compiled, explanation = step.lower(*shapes).compile(), step.explain(*shapes)
    if compiled.plan.moves and compiled.arena is None:
        raise ValueError("this plan moves by XLA's own copies, which tell no times: --compare")
    state = jax.jit(work.init)(jax.random.key(0))
    batch = work.random_batch(jax.random.key(1))

    def call() -> Any:
        nonlocal state
        state, metrics = step(state, batch)
        return state, metrics

    with console.status(f"running {work.name} under JAX's profiler"):
        observed = observe(call, device, compiled.arena)
    comparison = compare(
        explanation.program,
        explanation.timeline,
        explanation.costs,
        observed.runs,
        budget=explanation.budget,
        notes=observed.notes,
    )
    if comparison.rows:
        console.print(comparison.table())
    said = [str(compiled.plan), comparison.summary()]
    if arguments.trace:
        save_trace(arguments.trace, *comparison.lanes)
        said.append(f"lanes in {arguments.trace}")
    console.print("\n".join(said), markup=False, highlight=False, soft_wrap=True)


def _profiled(name: str, found: StepProfile) -> str:
    """What timing the steps gave, in words."""
    error = found.costs.error
    text = (
        f"{name}: {found.distinct} distinct of {len(found.costs.seconds)} steps, {found.measured} "
        f"measured, {found.scaled} scaled from a part of the batch, {found.calibrated} calibrated "
        f"({found.reused} known before), in {found.seconds:.1f} s. Predicted step time: "
        f"{sum(found.costs.seconds) * 1e3:.3f} ms. "
    )
    if error is None:
        text += "Error of the calibrated roofline: unknown, too little was measured."
    else:
        text += f"Median error of the calibrated roofline on the measured steps: {error:.0%}."
    return text + not_timed(found.untimed)
