"""The command line: vmem-jax train | plan | report | profile | info. A command is a file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import vmem_jax
from vmem_jax.cli.info import add_info
from vmem_jax.cli.plan import add_plan
from vmem_jax.cli.profile import add_profile
from vmem_jax.cli.report import add_report
from vmem_jax.cli.train import add_train
from vmem_jax.errors import VmemError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, or 2 for what the user can put right."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except (VmemError, ValueError, ImportError, OSError) as error:
        if arguments.traceback:
            raise
        print(f"vmem-jax {arguments.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vmem-jax", description=vmem_jax.__doc__)
    parser.add_argument("--version", action="version", version=vmem_jax.__version__)
    parser.add_argument("--traceback", action="store_true", help="show where an error was raised")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (add_train, add_plan, add_report, add_profile, add_info):
        add(commands)
    return parser
