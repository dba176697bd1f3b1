"""Whole training steps by plain jit, by what is picked by hand, and by vmem_jax, in turns.

    python benchmarks/training_steps.py --model=decoder --ways=plain,checkpoint,dots,@dots,19.1GiB
    python benchmarks/training_steps.py --model=vit --scanned=false --ways=plain,exact*4,0.5,0.33
    python benchmarks/training_steps.py --model=convnext --ways=plain,recompute@0.33*2 --traces=here

The networks are in `step_models`, what is picked by hand in `by_hand`. A way is one of those
hand-picked policies; or BUDGET, POLICY, POLICY@BUDGET, each with *PARTS behind it for so many
sub-batches. A budget is a size, a share of plain's need, or "@" and a way by hand, for what that one
compiled to; without a budget it is what plain needs. Without a policy it is `auto`. "lowest" is
`auto` at its minimum peak, compiled and not timed. "torch.compile" is of the unrolled ResNets;
torch.compile@SHARE has that activation memory budget. It runs in a process of its own
(`torch_resnet`).

All ways run in one process and take turns, block by block, on one donated state. A row has the
median, the least and the most milliseconds a step of a way over its blocks, what the compiler says
it needs, and what was predicted; a way that cannot be made has its error. The loss after each way's
first step from the same state is in its row, too. With --traces=DIRECTORY two steps of each way run
under JAX's profiler: DIRECTORY gets the instructions of each, the microseconds of each kernel, and
those in which any runs.
With --plans=DIRECTORY a way by vmem_jax takes its plan from there, or keeps it there if it has none:
what was planned with `--target` on a machine without the card is only compiled where the card is,
which is half of the work or less. A way is planned again where XLA makes more of its plan than fits.
With `--target=h200` all is compiled for that card, and nothing runs. Rows then say what the kernels
of a step move in memory, by `kernel_classes`: where "exact", which keeps what the backward pass
needs and computes nothing again, moves more than plain, its fences cost what no plan brings back.

Several of these may run at once with the same `--lock=FILE`: they compile and run first steps
together, and each times its ways alone, when all have compiled. XLA then times kernels to choose
from while others run, and what it keeps of the card's memory for that is not there for the others.

With --mesh=DEVICES the step is fully sharded (Rajbhandari et al., "ZeRO", 2020, stage 3): the batch
is split over so many devices, and so are the rows of each weight matrix and of its moments. GiB are
those of one device.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import json
import pathlib
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import records
from absl import app, flags, logging
from by_hand import POLICIES, SEGMENTS
from kernel_classes import launched
from locks import held
from peers import Peer
from step_models import BATCHES, MODELS, UNROLLED, Training
from traces import traced

import vmem_jax
from vmem_jax.compiler.compile import LARGE_NBYTES, with_ours
from vmem_jax.core.need import need_nbytes
from vmem_jax.devices.targets import target
from vmem_jax.jax_compat import NOT_CONFIGURED

FLAGS = flags.FLAGS

WHOLE = 2**18
"""Elements of the smallest weight that a mesh splits."""

LOWEST = "lowest"
"""The way that is `auto` at its minimum peak."""

LEAST_ROUNDS = 3
"""Blocks of a way that a row has, where the process is ended before it has timed all."""

TORCH = "torch.compile"
"""The way that is `torch.compile`."""

WAY = re.compile(
    r"(?:(?P<policy>[a-z]+)@?)?(?P<budget>@[a-z_]+|[\d.]+(?:[KMG]iB)?)?(?:\*(?P<parts>\d+))?"
)


def main(_: Any) -> None:
    if FLAGS.target:
        jax.config.update("jax_num_cpu_devices", FLAGS.mesh)  # to describe a mesh with
    batch = FLAGS.batch or BATCHES[FLAGS.model]
    options: dict[str, Any] = {}
    for name in ("layers", "width", "tokens", "attention", "scanned", "stacked"):
        if FLAGS[name].present:
            options[name] = FLAGS[name].value
    make = lambda hand: _accumulating(MODELS[FLAGS.model](hand, batch, **options))
    given = make("plain")
    state = jax.eval_shape(given.init, jax.random.key(0))
    data = jax.eval_shape(given.batch, jax.random.key(1))
    if FLAGS.mesh > 1:
        state, data = _sharded(state, data)
        make = _returning(make, state)
    about = {"model": FLAGS.model, "batch": batch, **options, "profile": bool(FLAGS.profile)}
    about["scanned"] = FLAGS.scanned and FLAGS.model not in UNROLLED
    about |= {"allow": FLAGS.allow} if FLAGS.allow else {}
    about |= {"accumulate": FLAGS.accumulate} if FLAGS.accumulate > 1 else {}
    about |= {"mesh": FLAGS.mesh} if FLAGS.mesh > 1 else {}
    about |= {"device": FLAGS.target or jax.devices()[0].device_kind, "jax": jax.__version__}
    about["commit"] = records.commit()
    rows: dict[str, dict[str, Any]] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(records.ENDED))
    try:
        _measure(make, given, state, data, about, rows)
    except SystemExit as ended:
        for row in rows.values():
            if "ms" not in row:
                row.setdefault("error", str(ended))
        raise
    finally:  # of a process that is ended, too
        records.append(pathlib.Path(FLAGS.out), rows.values())
        for row in rows.values():
            print(json.dumps(row), flush=True)


def _accumulating(given: Training) -> Training:
    """`given`, whose gradients are added over the parts of its batch that `--accumulate` says."""
    if FLAGS.accumulate == 1:
        return given
    if given.accumulated is None:
        raise ValueError(f"{FLAGS.model!r} has no form that accumulates gradients.")
    return given.accumulated(FLAGS.accumulate)


def _measure(
    make: Callable[[str], Training],
    given: Training,
    state: Any,
    data: Any,
    about: dict[str, Any],
    rows: dict[str, dict[str, Any]],
) -> None:
    """Compiles each way and times them all: adds their rows, which say `about` all, to `rows`."""
    started = time.perf_counter()
    is_timed = FLAGS.rounds and not FLAGS.target
    drawing = concurrent.futures.ThreadPoolExecutor(1)
    drawn = drawing.submit(_drawn, given) if is_timed else None  # while ways compile
    steps: dict[str, Any] = {}
    for way in FLAGS.ways:
        row = rows[way] = {"way": way, **about}
        if FLAGS.seconds and time.perf_counter() - started > FLAGS.seconds:
            row["error"] = f"{records.NOT_COMPILED}={FLAGS.seconds} were over"
            continue
        with held(FLAGS.lock, alone=False):
            begun = time.perf_counter()
            try:
                if way in POLICIES or way == SEGMENTS:
                    steps[way], found = _by_hand(make(way).step, state, data)
                elif way.partition("@")[0] == TORCH:
                    steps[way], found = _by_torch(way, about["batch"])
                elif way == LOWEST:
                    found = _lowest(given.step, state, data)
                else:
                    gib = {name: row.get("gib") for name, row in rows.items()}
                    steps[way], found = _budgeted(given.step, way, gib, state, data)
                row |= {**found, "seconds_to_compile": time.perf_counter() - begun}
                if FLAGS.target and way in steps:
                    row["moved_gib"] = _moved(steps[way].as_text())
            except Exception as error:  # a row says so, and the other ways go on
                row["error"] = f"{type(error).__name__}: {error}"[:600]
        print(json.dumps(row), flush=True)
    if drawn is not None:
        first, samples = drawn.result()
        there = _placed(state)
        # each way begins from it; 13 GiB of pageable memory take 10 s to come
        first = jax.device_put(first, jax.tree.map(_pinned, there))
        # copies: steps give the memory of a state to the next one
        start = lambda: jax.device_put(first, there, may_alias=False)
        samples = jax.device_put(samples, _placed(data))
        with held(FLAGS.lock, alone=False):  # first runs load kernels, which takes seconds
            state = _begin(start, samples, steps, rows)
        with held(FLAGS.lock, alone=True):
            _time(start, state, samples, steps, rows)


def _moved(text: str) -> dict[str, float]:
    """What a compiled step reads and writes, in all and by class of kernel."""
    found: collections.Counter[str] = collections.Counter()
    for one in launched(text).values():
        found[one.name] += one.times * one.nbytes
    return {name: nbytes / 2**30 for name, nbytes in [("all", found.total()), *found.items()]}


def _drawn(given: Training) -> tuple[Any, Any]:
    """A first state and a batch, in the host's memory: each shape of weight is its own program,
    which compiles for a CPU in less time."""
    with jax.default_device(jax.devices("cpu")[0]):
        return given.init(jax.random.key(0)), given.batch(jax.random.key(1))


def _placed(shapes: Any) -> Any:
    """Where each of `shapes` is on the device, or the mesh."""
    alone = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda a: a.sharding or alone, shapes)


def _pinned(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """As `sharding`, in the host's pinned memory."""
    return sharding.with_memory_kind("pinned_host")


def _sharded(state: Any, data: Any) -> tuple[Any, Any]:
    """Both, split over `--mesh` devices; what is small or does not divide is whole on each."""
    mesh = jax.sharding.Mesh(jax.devices()[: FLAGS.mesh], ("data",))

    def split(a: jax.ShapeDtypeStruct, at: int) -> jax.ShapeDtypeStruct:
        sharding = jax.NamedSharding(mesh, jax.P(*[None] * at, *(["data"] if at < a.ndim else [])))
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

    def weight(a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        is_split = a.size >= WHOLE and a.shape[-2] % FLAGS.mesh == 0
        return split(a, a.ndim - 2 if is_split else a.ndim)

    return jax.tree.map(weight, state), jax.tree.map(lambda a: split(a, 0), data)


def _returning(make: Callable[[str], Training], state: Any) -> Callable[[str], Training]:
    """`make` whose steps return the state split as `state` is."""
    abstract = lambda a: jax.NamedSharding(a.sharding.mesh.abstract_mesh, a.sharding.spec)

    def made(hand: str) -> Training:
        training = make(hand)

        def step(given: Any, data: Any) -> tuple[Any, jax.Array]:
            new, loss = training.step(given, data)
            return jax.lax.with_sharding_constraint(new, jax.tree.map(abstract, state)), loss

        return dataclasses.replace(training, step=step)

    return made


def _by_hand(step: Callable, *args: Any) -> tuple[Any, dict[str, Any]]:
    """The step by plain jit, with what is picked by hand in it; and what its row says."""
    options: list[dict[str, Any]] = [{}]
    if FLAGS.target:
        large = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(args)) >= LARGE_NBYTES
        ours = lambda described: with_ours({}, "gpu", 0, described, fenced=False, large=large)
        options = [ours(True), ours(False)]  # as vmem_jax does
        leaves, tree = jax.tree.flatten(args)
        shardings = target(FLAGS.target).shardings([a.sharding for a in leaves])
        there = lambda a, on: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=on)
        args = jax.tree.unflatten(tree, map(there, leaves, shardings))
    lowered = jax.jit(step, donate_argnums=0).lower(*args)
    try:
        compiled = lowered.compile(options[0])
    except jax.errors.JaxRuntimeError as error:
        if not FLAGS.target or not any(each in str(error) for each in NOT_CONFIGURED):
            raise
        compiled = lowered.compile(options[-1])
    return compiled, {"gib": need_nbytes(compiled) / 2**30}


def _by_torch(way: str, batch: int) -> tuple[Peer, dict[str, Any]]:
    """The process of a network by `torch.compile`; and what its row says."""
    name, _, dtype = FLAGS.model.partition("_")
    peer = Peer(name, str(batch), dtype or "bfloat16", way.partition("@")[2] or "1")
    found = dict(peer.about)
    return peer, {"gib": found.pop("nbytes") / 2**30, **found}


def _lowest(step: Callable, *args: Any) -> dict[str, Any]:
    """What the row of the step at its minimum peak says."""
    options = {"donate_argnums": 0, "allow": FLAGS.allow, "profile": FLAGS.profile}
    found = vmem_jax.lowest(step, *args, target=FLAGS.target, **options)
    return {
        "gib": found.nbytes / 2**30,
        "predicted_ms": 1e3 * found.seconds,
        "predicted_gib": found.plan.predicted_peak / 2**30,
        "plan": str(found.plan),
    }


def _budgeted(
    step: Callable, way: str, gib: dict[str, float | None], *args: Any
) -> tuple[Any, dict[str, Any]]:
    """The step of a way by vmem_jax; and what its row says."""
    if (parsed := WAY.fullmatch(way)) is None:
        raise ValueError(f"--ways has {way!r}, which is no way by hand and no POLICY@BUDGET*PARTS.")
    budget: Any = parsed["budget"] or 1.0
    if isinstance(budget, str) and budget[0] == "@":
        if (found := gib.get(budget[1:])) is None:
            raise ValueError(f"{way!r} needs the way {budget[1:]!r} before it.")
        budget = int(found * 2**30)
    elif isinstance(budget, str) and not budget.endswith("iB"):
        budget = float(budget)
    kept = _plan_file(way) if FLAGS.plans else None

    def made_by(plan: vmem_jax.Plan | None) -> Any:
        budgeted = vmem_jax.jit(
            step,
            budget=budget if plan is None else None,  # a plan has its own
            policy=parsed["policy"] or "auto",
            sub_batches=int(parsed["parts"]) if parsed["parts"] else None,
            donate_argnums=0,
            profile=FLAGS.profile,
            allow=FLAGS.allow,
            plan=plan,
        )
        return budgeted.lower(*args).compile(target=FLAGS.target)

    made = None
    if kept is not None and kept.exists():
        try:
            made = made_by(vmem_jax.Plan.load(kept))
        except vmem_jax.PlanError as error:
            logging.warning("%s is planned again: %s", way, error)
    if made is None:
        made = made_by(None)
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            made.plan.save(kept)
    last = made.attempts[-1]
    return made, {
        "gib": made.need_nbytes / 2**30,
        "predicted_ms": 1e3 * made.plan.predicted_seconds,
        "predicted_plain_ms": 1e3 * sum(last.costs.seconds),
        "predicted_gib": last.predicted_need / 2**30,
        "compiles": len(made.attempts),
        "plan": str(made.plan),
    }


def _plan_file(way: str) -> pathlib.Path:
    """Where the plan of a way is kept, with all in its name that the step depends on."""
    asked = ("batch", "layers", "width", "tokens", "attention", "scanned", "stacked", "accumulate")
    asked += ("mesh", "allow", "profile")
    options = "".join(f"_{n}{FLAGS[n].value}" for n in asked if FLAGS[n].present)
    name = re.sub("[^a-zA-Z0-9.]+", "_", f"{FLAGS.model}{options}_{way}")
    return pathlib.Path(FLAGS.plans) / f"{name}.json"


def _begin(
    start: Callable[[], Any], data: Any, steps: dict[str, Any], rows: dict[str, dict[str, Any]]
) -> Any:
    """Runs each way twice from the same state, and adds the losses to its row; drops ways that fail.
    Returns the last one's state."""
    state = None
    for way, step in [*steps.items()]:
        if isinstance(step, Peer):
            continue
        del state
        begun = time.perf_counter()
        state = start()
        try:
            state, loss = step(state, data)
            state, after = step(state, data)
            rows[way] |= {"loss": float(loss), "loss_after": float(after)}
            logging.info("%s: two steps in %.1f s", way, time.perf_counter() - begun)
        except Exception as error:
            rows[way]["error"] = f"{type(error).__name__}: {error}"[:600]
            del steps[way]
            state = None
    return start() if state is None else state


def _time(
    start: Callable[[], Any],
    state: Any,
    data: Any,
    steps: dict[str, Any],
    rows: dict[str, dict[str, Any]],
) -> None:
    """Adds to each row what its way takes, also where the process is ended after `LEAST_ROUNDS`."""
    for way, step in [*steps.items()] if FLAGS.traces else []:
        if isinstance(step, Peer):
            continue
        name = f"{FLAGS.model}_{re.sub('[^a-zA-Z0-9.]', '_', way)}"
        run = lambda state, step=step: step(state, data)
        try:
            state = traced(pathlib.Path(FLAGS.traces) / name, step, run, state)
        except Exception as error:
            rows[way]["error"] = f"{type(error).__name__}: {error}"[:600]
            del steps[way]
            state = start()
    blocks: dict[str, list[float]] = {way: [] for way in steps}
    try:
        for _ in range(FLAGS.rounds):
            for way, step in steps.items():
                if isinstance(step, Peer):
                    blocks[way].append(step.block(FLAGS.steps))
                    continue
                state, loss = step(state, data)
                jax.block_until_ready(loss)
                begun = time.perf_counter()
                for _ in range(FLAGS.steps):
                    state, loss = step(state, data)
                jax.block_until_ready((state, loss))
                blocks[way].append(1e3 * (time.perf_counter() - begun) / FLAGS.steps)
        for peer in steps.values():
            if isinstance(peer, Peer):
                peer.close()
    finally:
        least = min(LEAST_ROUNDS, FLAGS.rounds)
        enough = {way: ms for way, ms in blocks.items() if len(ms) >= least}
        for way, ms in enough.items():
            rows[way] |= {"ms": statistics.median(ms), "ms_least": min(ms), "ms_most": max(ms)}
            if "plain" in enough:
                rows[way]["of_plain"] = rows[way]["ms"] / statistics.median(enough["plain"])


if __name__ == "__main__":
    flags.DEFINE_enum("model", "decoder", [*MODELS], "the network")
    flags.DEFINE_list("ways", "plain,checkpoint,dots,@dots,@checkpoint", "see above")
    flags.DEFINE_string("out", "steps.jsonl", "where rows are added")
    flags.DEFINE_string("target", None, "a card to compile for that is not there")
    flags.DEFINE_string("lock", "", "file by which several of these take turns; see above")
    flags.DEFINE_string("plans", "", "directory that plans are kept in; see above")
    flags.DEFINE_string("traces", "", "directory for instructions and kernels")
    flags.DEFINE_enum("attention", "cudnn", ["xla", "cudnn", "chunks"], "of the decoder")
    flags.DEFINE_bool("scanned", True, "layers in one scan, or unrolled")
    flags.DEFINE_bool("stacked", True, "of transformers: a weight of all layers is one array")
    flags.DEFINE_bool("profile", None, "measure steps first (`jit`'s argument)")
    flags.DEFINE_list("allow", None, "techniques that plans may use (`jit`'s argument)")
    flags.DEFINE_integer("layers", None, "layers, where other than the model's own")
    flags.DEFINE_integer("width", None, "of the residual stream, or of a first stage")
    flags.DEFINE_integer("tokens", None, "in a sequence")
    flags.DEFINE_integer("batch", None, "samples, of all devices together")
    flags.DEFINE_integer("accumulate", 1, "parts of the batch whose gradients a scan adds")
    flags.DEFINE_integer("mesh", 1, "devices that the batch and the state are split over")
    flags.DEFINE_integer("rounds", 5, "blocks of each way; 0 to compile alone")
    flags.DEFINE_integer("steps", 8, "in a block")
    flags.DEFINE_integer("seconds", 0, "compile no further way after so many; 0 for no limit")
    app.run(main)
