"""convolutions: `vmem-jax profile --conv`, what cuDNN takes for each convolution of a model."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from vmem_jax.cli.options import bar, not_timed
from vmem_jax.conv import cudnn
from vmem_jax.conv.database import Database
from vmem_jax.conv.layers import convolutions_of, kernels_of
from vmem_jax.conv.profiler import Profile, profile
from vmem_jax.conv.timings import like
from vmem_jax.core.cards import TARGETS
from vmem_jax.errors import parse_size, show_nbytes
from vmem_jax.policy.workspace_division import front
from vmem_jax.policy.workspace_reuse import BatchSizes, reuse
from vmem_jax.report.convolutions import configurations_table, plot, totals_table


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--conv",
        choices=[size.value for size in BatchSizes],
        help="time cuDNN's plans for the model's convolutions, for micro-batches of these sizes",
    )
    parser.add_argument(
        "--workspace", help="for --conv, what each kernel may use, 64MiB for instance"
    )
    parser.add_argument("--plot", metavar="DIRECTORY", help="for --conv, draw their desirable sets")
    parser.add_argument(
        "--target",
        choices=TARGETS,
        help="for --conv, list the plans for a card that is not there; nothing is timed then",
    )


def check(arguments: argparse.Namespace) -> None:
    """Raises ValueError for options that do not go together."""
    if arguments.conv and arguments.model is None:
        raise ValueError("--conv needs a model and --batch.")
    if not arguments.conv and (arguments.workspace or arguments.plot or arguments.target):
        raise ValueError("--workspace, --plot and --target are for --conv.")
    if arguments.target and (arguments.workspace or arguments.plot):
        raise ValueError("--target times nothing, so there is nothing for --workspace and --plot.")


def run(arguments: argparse.Namespace, console: Console, jaxpr: Any, name: str) -> None:
    """Times the convolutions of `jaxpr`, and shows and draws what came out."""
    limit = None if arguments.workspace is None else parse_size(arguments.workspace, "--workspace")
    sizes, counts = BatchSizes(arguments.conv), convolutions_of(jaxpr)
    if not counts:
        raise ValueError(f"{name} has no convolution that a library may do.")
    target: Any = arguments.target or jax.devices()[0]
    library, *more = map(cudnn.Cudnn, [target] if arguments.target else like(target))
    database = cudnn.database(target)
    with bar(console, "plans") as on_progress:
        found = profile(
            kernels_of(jaxpr),
            sizes,
            library,
            database,
            more=more,
            deadline=math.inf if arguments.target else arguments.seconds,
            refresh=arguments.refresh,
            on_progress=on_progress,
        )
    if arguments.target:
        console.print(_listed(database, counts))
        found = dataclasses.replace(found, untimed=())  # the table says it of all
    else:
        _show(console, found, counts, limit, arguments.plot)
    console.print(_words(name, found, len(counts)), markup=False, highlight=False, soft_wrap=True)
    console.print(f"kept in {database.path}", markup=False, highlight=False, soft_wrap=True)


def _show(
    console: Console, found: Profile, counts: Any, limit: int | None, directory: str | None
) -> None:
    chosen = {}
    for i, (convolution, micros) in enumerate(found.micros.items()):
        configurations = front(micros, convolution.batch)
        if not configurations:
            continue
        chosen[convolution] = reuse(convolution, micros, limit)
        console.print(configurations_table(convolution, configurations, chosen[convolution]))
        if directory:
            Path(directory).mkdir(parents=True, exist_ok=True)
            plot(convolution, configurations, Path(directory) / f"{i:03d}.svg")
    console.print(totals_table({c: chosen[c] for c in counts if c in chosen}, counts))


def _listed(database: Database, counts: Any) -> Table:
    """How many plans there are of each convolution, and what they want; none was timed."""
    table = Table(
        "convolution", "times", "plans", "smallest workspace", "largest", title="not timed"
    )
    entries = database.load()
    for convolution, count in counts.items():
        micros = entries[convolution].micros if convolution in entries else ()
        wanted = sorted(m.workspace for m in micros)
        ends = [show_nbytes(n) for n in (wanted[0], wanted[-1])] if wanted else ["", ""]
        table.add_row(str(convolution), str(count), str(len(micros)), *ends)
    return table


def _words(name: str, found: Profile, distinct: int) -> str:
    text = (
        f"{name}: {distinct} distinct convolutions, {found.timed} algorithms timed now, "
        f"{found.reused} known before, {found.hopeless} left out as hopeless, "
        f"in {found.seconds:.1f} s."
    )
    return text + not_timed(found.untimed)
