"""train: `vmem-jax train`, on handwritten digits, plain and inside a budget."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from rich.console import Console

import vmem_jax
from vmem_jax.cli.options import (
    Subparsers,
    add_command,
    add_step_options,
    budget_of,
    positive,
    progress_of,
)
from vmem_jax.core.need import need_nbytes
from vmem_jax.errors import show_nbytes


def add_train(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "train",
        _train,
        "train on handwritten digits with plain jax.jit and inside a budget, and compare",
    )
    parser.add_argument("--model", default="resnet20", help="vgg or resnet and a depth")
    parser.add_argument("--batch", type=positive, default=64, help="images in a batch")
    parser.add_argument("--image", type=positive, default=32, help="pixels of an image's side")
    parser.add_argument(
        "--budget",
        type=budget_of,
        default=0.5,
        help="a fraction of plain jit's peak, a size such as 800MB, or 'device'",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=positive, default=44, help="batches to train on")
    length.add_argument("--epochs", type=positive, help="passes over the 1,437 training images")
    parser.add_argument("--optimizer", choices=("sgd", "momentum", "adamw"), default="adamw")
    parser.add_argument("--learning-rate", type=float, help="default: the optimiser's own")
    parser.add_argument("--seed", type=int, default=0, help="of the parameters and the batches")
    parser.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="train with plain jax.jit too, from the same state on the same batches",
    )
    add_step_options(parser)


def _train(arguments: argparse.Namespace) -> int:
    from vmem_jax.models import batches, digits, job
    from vmem_jax.models.data import TRAIN_IMAGES

    batch = arguments.batch
    if batch > TRAIN_IMAGES:
        raise ValueError(f"--batch {batch} is more than the {TRAIN_IMAGES} images to train on.")
    count = arguments.steps
    if arguments.epochs:
        count = arguments.epochs * (TRAIN_IMAGES // batch)
    work = job(
        arguments.model,
        batch=batch,
        image=arguments.image,
        classes=10,
        dtype=arguments.dtype,
        optimizer=arguments.optimizer,
        learning_rate=arguments.learning_rate,
        head_width=arguments.head_width,
    )
    data = digits(arguments.image)
    console = Console()
    with console.status(f"initialising {work.name}"):
        # Plain arrays are kept on the host: each run starts from a copy that it may donate.
        start = jax.device_get(jax.jit(work.init)(jax.random.key(arguments.seed)))

    def run(name: str, step: Callable, peak: str) -> float:
        feed = batches(data.train_images, data.train_labels, batch, arguments.seed)
        return _run(console, name, step, jax.device_put(start), feed, count, peak)

    shapes = work.state_shapes(), work.batch
    with console.status("compiling with plain jax.jit"):
        plain = jax.jit(work.step, donate_argnums=0).lower(*shapes).compile()
    plain_need = need_nbytes(plain)
    console.print(f"plain jax.jit needs {show_nbytes(plain_need)}", highlight=False)
    budget = arguments.budget
    if isinstance(budget, float):
        budget = int(budget * plain_need)
    step = vmem_jax.jit(work.step, budget=budget, policy=arguments.policy, donate_argnums=0)
    with console.status(f"planning and compiling for {_show_budget(budget)}"):
        compiled = step.lower(*shapes).compile()
    need = compiled.need_nbytes
    share = f"{need / plain_need:.0%} of plain"
    console.print(
        f"vmem_jax needs {show_nbytes(need)} ({share}) of a budget of {_show_budget(budget)}, "
        f"with {len(compiled.plan.recomputed)} of {len(compiled.plan.order)} steps recomputed",
        highlight=False,
        soft_wrap=True,
    )
    losses = ""
    if arguments.compare:
        try:
            losses = f"plain {run('plain', plain, f'peak {show_nbytes(plain_need)}'):.4f}, "
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            losses = "plain out of memory, "
    losses += f"vmem_jax {run('vmem_jax', step, f'peak {share}'):.4f}"
    console.print(
        f"{work.name}, {count} steps of {batch} images. Peak: plain {show_nbytes(plain_need)}, "
        f"vmem_jax {show_nbytes(need)} ({share}). Final loss: {losses}.",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def _run(
    console: Console,
    name: str,
    step: Callable,
    state: Any,
    feed: Iterator[Any],
    count: int,
    peak: str,
) -> float:
    """Trains for `count` batches of `feed` under a progress bar; returns the last batch's loss."""
    metrics: dict[str, Any] = {}
    with progress_of(console) as progress:
        task = progress.add_task(name, total=count, metrics="", peak=peak)
        began = time.perf_counter()
        for done in range(1, count + 1):
            images, labels = next(feed)
            state, metrics = step(state, (images, labels))
            loss, accuracy = float(metrics["loss"]), float(metrics["accuracy"])
            rate = done * len(labels) / (time.perf_counter() - began)
            shown = f"loss {loss:.3f} accuracy {accuracy:.2f} {rate:.0f} images/s"
            progress.update(task, advance=1, metrics=shown)
    return float(metrics["loss"])


def _show_budget(budget: int | float | str) -> str:
    if isinstance(budget, float):
        return f"{budget:.0%} of plain jit's peak"
    return show_nbytes(budget) if isinstance(budget, int) else f"what the {budget} has free"
