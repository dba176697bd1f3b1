"""plan: `vmem-jax plan`, how a training step would fit, without running it."""

from __future__ import annotations

import argparse
import sys

import jax
from rich.console import Console

import vmem_jax
from vmem_jax.cli.options import (
    Subparsers,
    add_command,
    add_step_options,
    budget_of,
    positive,
)
from vmem_jax.cli.user_step import add_user_options, step_of
from vmem_jax.core.cards import TARGETS
from vmem_jax.devices.targets import target
from vmem_jax.progress import doing
from vmem_jax.report.trade import trade_table
from vmem_jax.techniques.jit_arguments import TECHNIQUES


def add_plan(commands: Subparsers) -> None:
    parser = add_command(
        commands, "plan", _plan, "show how a training step would fit, without running it"
    )
    add_planning_options(parser)
    parser.add_argument(
        "--sweep",
        type=positive,
        nargs="?",
        const=8,
        metavar="POINTS",
        help="in place of --budget: the seconds of a step for every number of bytes, in so many "
        "searches",
    )
    parser.add_argument("--save", metavar="PLAN.json", help="write the plan to this file")
    parser.add_argument(
        "--trace",
        metavar="TRACE.json",
        help="write the predicted timeline to this file, for ui.perfetto.dev or chrome://tracing; "
        "to a directory (without a suffix) for xprof",
    )


def add_planning_options(parser: argparse.ArgumentParser) -> None:
    """The options that say which step is planned, and how."""
    parser.add_argument(
        "model", help="as vgg16, resnet50 or gpt12w768; or your own step, path/to/train.py:step"
    )
    parser.add_argument("--batch", type=positive, help="of a model, images in a batch")
    parser.add_argument(
        "--budget",
        type=budget_of,
        help="a fraction of plain jit's peak, a size such as 12GiB, or 'device'",
    )
    parser.add_argument(
        "--image", type=positive, help="pixels of an image's side; else as published"
    )
    parser.add_argument("--tokens", type=positive, default=1024, help="of a sequence, for a gpt")
    parser.add_argument("--classes", type=positive, help="of labels, or different tokens")
    parser.add_argument("--optimizer", choices=("sgd", "momentum", "adamw"), default="sgd")
    parser.add_argument(
        "--target",
        choices=TARGETS,
        help="a card that is not there; needs vmem_jax[gpu-compile], no GPU",
    )
    parser.add_argument("--allow", nargs="+", choices=TECHNIQUES, help="what a plan may use")
    parser.add_argument(
        "--density",
        type=float,
        help="with 'compress': the share of the values behind ReLUs that is not zero",
    )
    add_user_options(parser)
    add_step_options(parser)


def _plan(arguments: argparse.Namespace) -> int:
    if (arguments.budget is None) == (arguments.sweep is None):
        raise ValueError("give --budget for one plan, or --sweep for the trade.")
    if arguments.sweep and (arguments.save or arguments.trace):
        raise ValueError("--save and --trace are for one plan, with --budget.")
    console = Console(width=None if sys.stdout.isatty() else 120)
    if arguments.target:  # before anything else looks for devices, so that JAX misses no driver
        target(arguments.target).device()
    name, step, shapes = step_of(arguments)
    where = arguments.target or jax.devices()[0].device_kind
    with doing(f"{name} for {where}"):
        if arguments.sweep:
            points = vmem_jax.pareto(step, *shapes, target=arguments.target, points=arguments.sweep)
            console.print(trade_table(name, points))
            return 0
        explanation = step.explain(*shapes, target=arguments.target)
    console.print(explanation.table())
    console.print(explanation.summary(), markup=False, highlight=False, soft_wrap=True)
    if arguments.save:
        step.plan(*shapes, target=arguments.target).save(arguments.save)
        console.print(f"saved to {arguments.save}", markup=False, highlight=False)
    if arguments.trace:
        explanation.save_trace(arguments.trace)
        console.print(f"timeline in {arguments.trace}", markup=False, highlight=False)
    return 0
