"""The command line: vmem-jax train | plan | profile | info. A command is one parser, one function."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import vmem_jax
from vmem_jax.capture import capture
from vmem_jax.errors import VmemError, parse_budget, show_nbytes
from vmem_jax.jit import MEANS
from vmem_jax.profile.measured import measured_costs, measured_machine
from vmem_jax.profile.steps import SECONDS, StepProfile
from vmem_jax.profile.store import Store, identity
from vmem_jax.prove.device import total_nbytes
from vmem_jax.prove.prove import need_nbytes
from vmem_jax.prove.targets import TARGETS, target
from vmem_jax.report.profile import costs_table, machine_table
from vmem_jax.transfer.extension import describe

if TYPE_CHECKING:
    from vmem_jax.models import Job  # needs Flax, which only some commands do

Subparsers = Any  # argparse gives the type of add_subparsers() no public name


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
    for add in (_add_train, _add_plan, _add_profile, _add_info):
        add(commands)
    return parser


def _add_command(
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


def _add_step_options(parser: argparse.ArgumentParser) -> None:
    """The options that say which step is meant and how it is to fit."""
    parser.add_argument("--policy", choices=sorted(vmem_jax.POLICIES), default="auto")
    _add_model_options(parser)


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    """The options of a model that every command has."""
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="type of computation and parameters",
    )
    parser.add_argument("--head-width", type=int, help="VGG's hidden fully connected layers")


def _budget(text: str) -> int | float | str:
    """A number up to 1 is a fraction of plain jit's need; a larger one bytes; else a size."""
    budget: int | float | str = text
    with contextlib.suppress(ValueError):
        number = float(text)
        budget = int(number) if number > 1 and number.is_integer() else number
    try:
        return parse_budget(budget)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {number}")
    return number


# -- train


def _add_train(commands: Subparsers) -> None:
    parser = _add_command(
        commands,
        "train",
        _train,
        "train on handwritten digits with plain jax.jit and inside a budget, and compare",
    )
    parser.add_argument("--model", default="resnet20", help="vgg or resnet and a depth")
    parser.add_argument("--batch", type=_positive, default=64, help="images in a batch")
    parser.add_argument("--image", type=_positive, default=32, help="pixels of an image's side")
    parser.add_argument(
        "--budget",
        type=_budget,
        default=0.5,
        help="a fraction of plain jit's peak, a size such as 800MB, or 'device'",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=_positive, default=44, help="batches to train on")
    length.add_argument("--epochs", type=_positive, help="passes over the 1,437 training images")
    parser.add_argument("--optimizer", choices=("sgd", "momentum", "adamw"), default="adamw")
    parser.add_argument("--learning-rate", type=float, help="default: the optimiser's own")
    parser.add_argument("--seed", type=int, default=0, help="of the parameters and the batches")
    parser.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="train with plain jax.jit too, from the same state on the same batches",
    )
    _add_step_options(parser)


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
    with _progress(console) as progress:
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


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:8}"),
        BarColumn(bar_width=8),
        MofNCompleteColumn(),
        TextColumn("{task.fields[metrics]}"),
        TextColumn("{task.fields[peak]}"),
        console=console,
    )


def _show_budget(budget: int | float | str) -> str:
    if isinstance(budget, float):
        return f"{budget:.0%} of plain jit's peak"
    return show_nbytes(budget) if isinstance(budget, int) else f"what the {budget} has free"


# -- plan


def _add_plan(commands: Subparsers) -> None:
    parser = _add_command(
        commands, "plan", _plan, "show how a training step would fit, without running it"
    )
    parser.add_argument("model", help="vgg or resnet and a depth: vgg16, vgg116, resnet50")
    parser.add_argument("--batch", type=_positive, required=True, help="images in a batch")
    parser.add_argument(
        "--budget",
        type=_budget,
        required=True,
        help="a fraction of plain jit's peak, a size such as 12GiB, or 'device'",
    )
    parser.add_argument("--image", type=_positive, default=224, help="pixels of an image's side")
    parser.add_argument("--classes", type=_positive, default=1000)
    parser.add_argument("--optimizer", choices=("sgd", "momentum", "adamw"), default="sgd")
    parser.add_argument(
        "--target",
        choices=TARGETS,
        help="a card that is not there; needs vmem_jax[gpu-compile], no GPU",
    )
    parser.add_argument("--save", metavar="PLAN.json", help="write the plan to this file")
    parser.add_argument(
        "--trace",
        metavar="TRACE.json",
        help="write the predicted timeline to this file, for ui.perfetto.dev or chrome://tracing",
    )
    _add_step_options(parser)


def _job(arguments: argparse.Namespace) -> Job:
    """The training step that the options of `plan` and `profile` name."""
    from vmem_jax.models import job

    return job(
        arguments.model,
        batch=arguments.batch,
        image=arguments.image,
        classes=arguments.classes,
        dtype=arguments.dtype,
        optimizer=arguments.optimizer,
        head_width=arguments.head_width,
    )


def _plan(arguments: argparse.Namespace) -> int:
    console = Console(width=None if sys.stdout.isatty() else 120)
    if arguments.target:  # before anything else looks for devices, so that JAX misses no driver
        target(arguments.target).device()
    work = _job(arguments)
    step = vmem_jax.jit(
        work.step, budget=arguments.budget, policy=arguments.policy, donate_argnums=0
    )
    shapes = work.state_shapes(), work.batch
    where = arguments.target or jax.devices()[0].device_kind
    with console.status(f"planning and compiling {work.name} for {where}"):
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


# -- profile


def _add_profile(commands: Subparsers) -> None:
    parser = _add_command(
        commands,
        "profile",
        _profile,
        "measure this device, and the steps of a model on it; what was measured before is kept",
    )
    parser.add_argument("model", nargs="?", help="vgg or resnet and a depth; none: only the device")
    parser.add_argument("--batch", type=_positive, help="images in a batch; goes with a model")
    parser.add_argument("--image", type=_positive, default=224, help="pixels of an image's side")
    parser.add_argument("--classes", type=_positive, default=1000)
    parser.add_argument("--optimizer", choices=("sgd", "momentum", "adamw"), default="sgd")
    parser.add_argument("--refresh", action="store_true", help="measure everything again")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="run the step inside --budget under JAX's profiler, and show each of its transfers "
        "and stalls as predicted and as they were",
    )
    parser.add_argument("--budget", type=_budget, help="for --compare, as in `vmem-jax plan`")
    parser.add_argument(
        "--allow",
        nargs="+",
        choices=MEANS,
        help="means for --compare's plan; by default those that are of use here",
    )
    parser.add_argument(
        "--trace", metavar="TRACE.json", help="for --compare, write both as lanes to this file"
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="begin to time no further step after so long"
    )
    _add_model_options(parser)


def _profile(arguments: argparse.Namespace) -> int:
    if (arguments.model is None) != (arguments.batch is None):
        raise ValueError("a model and --batch go together.")
    if arguments.compare and None in (arguments.model, arguments.budget):
        raise ValueError("--compare needs a model and --budget.")
    if not arguments.compare and (arguments.budget or arguments.trace or arguments.allow):
        raise ValueError("--budget, --trace and --allow are for --compare.")
    if not arguments.seconds >= 0:
        raise ValueError(f"--seconds must be 0 or more, not {arguments.seconds}.")
    console = Console(width=None if sys.stdout.isatty() else 160)
    device = jax.devices()[0]
    with _bar(console, "device") as on_progress:
        machine = measured_machine(device, refresh=arguments.refresh, on_progress=on_progress)
    console.print(machine_table(machine))
    if arguments.model is not None:
        work = _job(arguments)
        captured = capture(jax.jit(work.step).trace(work.state_shapes(), work.batch).jaxpr)
        with _bar(console, "steps") as on_progress:
            found = measured_costs(
                captured,
                device,
                machine=machine,
                seconds=arguments.seconds,
                refresh=arguments.refresh,
                on_progress=on_progress,
            )
        console.print(costs_table(work.name, captured.program, found.costs))
        console.print(_profiled(work.name, found), markup=False, highlight=False, soft_wrap=True)
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
    from vmem_jax.report.trace import save

    step = vmem_jax.jit(work.step, budget=arguments.budget, allow=arguments.allow, donate_argnums=0)
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
        save(comparison.trace(), arguments.trace)
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
    for reason in found.untimed[:10]:
        text += f"\nnot timed: {reason}"
    if len(found.untimed) > 10:
        text += f"\nnot timed: {len(found.untimed) - 10} more"
    return text


@contextlib.contextmanager
def _bar(console: Console, name: str) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar, as a function of what is done, of how much, and what is next."""
    with _progress(console) as progress:
        task = progress.add_task(name, total=None, metrics="", peak="")
        yield lambda done, total, what: progress.update(
            task, completed=done, total=total, metrics=what
        )


# -- info


def _add_info(commands: Subparsers) -> None:
    _add_command(commands, "info", _info, "show versions, devices, and what can be compiled for")


def _info(arguments: argparse.Namespace) -> int:
    print(f"vmem_jax {vmem_jax.__version__}, Python {platform.python_version()}")
    for package in ("jax", "jaxlib", "flax", "optax", "equinox", "scikit-learn"):
        try:
            print(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"{package} is not installed")
    try:  # first, so that JAX misses no driver when it looks for devices
        target(TARGETS[0]).device()
        deviceless = ", ".join(TARGETS)
    except ImportError:
        deviceless = 'none, pip install "vmem_jax[gpu-compile]"'
    for device in jax.devices():
        here = jax.ShapeDtypeStruct((), "float32", sharding=_on(device))
        print(f"device {device}: {device.device_kind}, {show_nbytes(total_nbytes([here]))}")
    print(f"policies: {', '.join(sorted(vmem_jax.POLICIES))}")
    print(f"device-less compiler: {deviceless}")
    print(f"transfers: {describe()}")
    return 0


def _on(device: jax.Device) -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(device)


if __name__ == "__main__":
    sys.exit(main())
