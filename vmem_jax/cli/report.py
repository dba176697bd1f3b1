"""report: `vmem-jax report`, a page about the memory of a step, without running it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

import vmem_jax
from vmem_jax.cli.options import Subparsers, add_command, positive
from vmem_jax.cli.plan import add_planning_options
from vmem_jax.cli.user_step import step_of
from vmem_jax.devices.targets import target
from vmem_jax.progress import doing
from vmem_jax.report.page import require_plotly


def add_report(commands: Subparsers) -> None:
    parser = add_command(
        commands, "report", _report, "write a page about the memory of a training step"
    )
    add_planning_options(parser)
    parser.add_argument("--out", default="memory.html", help="the file to write")
    parser.add_argument(
        "--sweep",
        type=positive,
        nargs="?",
        const=8,
        metavar="POINTS",
        help="with the seconds of a step for every number of bytes, in so many searches, predicted",
    )


def _report(arguments: argparse.Namespace) -> int:
    require_plotly()
    console = Console(width=None if sys.stdout.isatty() else 120)
    if arguments.target:  # before anything else looks for devices, so that JAX misses no driver
        target(arguments.target).device()
    name, step, args = step_of(arguments)
    points: Sequence[vmem_jax.ParetoPoint] = ()
    with doing(name):
        if arguments.sweep:
            points = vmem_jax.pareto(
                step, *args, target=arguments.target, points=arguments.sweep, compile=False
            )
        path = step.report(*args, path=arguments.out, target=arguments.target, points=points)
    console.print(f"report in {path}", markup=False, highlight=False, soft_wrap=True)
    return 0
