"""options: what several commands of the command line have in common."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import vmem_jax
from vmem_jax.errors import parse_budget

if TYPE_CHECKING:
    from vmem_jax.models import Job  # needs Flax, which only some commands do

Subparsers = Any  # argparse gives the type of add_subparsers() no public name


def add_command(
    commands: Subparsers, name: str, run: Callable[[argparse.Namespace], int], about: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=about,
        description=about,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """The options that say which step is meant and how it is to fit."""
    parser.add_argument("--policy", choices=sorted(vmem_jax.POLICIES), default="auto")
    add_model_options(parser)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The options of a model that every command has."""
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="type of computation and parameters",
    )
    parser.add_argument("--head-width", type=int, help="VGG's hidden fully connected layers")


def budget_of(text: str) -> int | float | str:
    """A number up to 1 is a fraction of plain jit's need; a larger one bytes; else a size."""
    budget: int | float | str = text
    with contextlib.suppress(ValueError):
        number = float(text)
        budget = int(number) if number > 1 and number.is_integer() else number
    try:
        return parse_budget(budget)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {number}")
    return number


def job_of(arguments: argparse.Namespace) -> Job:
    """The training step that the options of `plan` and `profile` name."""
    from vmem_jax.models import job

    return job(
        arguments.model,
        batch=arguments.batch,
        image=arguments.image,
        tokens=arguments.tokens,
        classes=arguments.classes,
        dtype=arguments.dtype,
        optimizer=arguments.optimizer,
        head_width=arguments.head_width,
    )


def not_timed(reasons: Sequence[str]) -> str:
    """Lines for what was left out, and why: the first ten of `reasons`."""
    lines = [*reasons[:10], *([f"{len(reasons) - 10} more"] if len(reasons) > 10 else [])]
    return "".join(f"\nnot timed: {line}" for line in lines)


def progress_of(console: Console, *, in_logs: bool = True) -> Progress:
    """Bars on a terminal; elsewhere only their last state, or nothing if not `in_logs`."""
    return Progress(
        TextColumn("{task.description:8}"),
        BarColumn(bar_width=8),
        MofNCompleteColumn(),
        TextColumn("{task.fields[metrics]}"),
        TextColumn("{task.fields[peak]}"),
        console=console,
        disable=not (in_logs or console.is_terminal),
    )


@contextlib.contextmanager
def bar(console: Console, name: str) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on a terminal, as a function of what is done, of how much, and what is next."""
    with progress_of(console, in_logs=False) as progress:
        task = progress.add_task(name, total=None, metrics="", peak="")
        yield lambda done, total, what: progress.update(
            task, completed=done, total=total, metrics=what
        )
