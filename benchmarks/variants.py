"""The variants of one train step that are compared, each compiled and with its own state."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import parse_qsl

import jax
import jax.numpy as jnp
from absl import logging
from decisions import counting
from jax.extend.core import jaxpr_as_fun

import vmem_jax
from vmem_jax.capture.flatten import drop_dead
from vmem_jax.core.need import need_nbytes
from vmem_jax.core.simulate import Timeline
from vmem_jax.devices.device import total_nbytes
from vmem_jax.errors import LayersError, SubBatchError, WorkspaceError, parse_size, show_nbytes
from vmem_jax.jax_compat import DESCRIBED_OPTIONS
from vmem_jax.models import Job
from vmem_jax.policy import AbstractPolicy

WRAPPED = ("checkpoint", "offload")
"""Variants without a budget: the step as JAX's own users would write it, by `job(wrap=...)`."""

REFUSALS = (vmem_jax.BudgetError, LayersError, SubBatchError, WorkspaceError)
"""What a policy says of a step that it cannot plan."""

_AS_LOW = 0.02
"""Of plain jit's loss: what rounding does to one in another order, after some twenty steps."""


def is_size(asked: str) -> bool:
    """Whether a budget in words is so many bytes, as 12GiB."""
    return asked[-1:].isalpha() and not asked.startswith(("none", "least"))


def why_plain_does(asked: str, plain_need: int) -> str:
    """Why a budget in words says nothing beside plain jit, which meets it; "" where it does."""
    if not is_size(asked) or parse_size(asked, "--ways") < plain_need:
        return ""
    return f"plain jit needs {show_nbytes(plain_need)}"


def outcome_of(error: Exception) -> str:
    """A failure as a row has it: what a policy says in full, of others the beginning."""
    text = str(error) if isinstance(error, REFUSALS) else str(error)[:300]
    return f"{type(error).__name__}: {text}"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a step is compiled, and whether it runs there.

    Attributes:
      target: a card that is not there, for which it is compiled alone; None for the devices here.
      density: of what ReLUs leave, for plans that compress; None to count zeros on the devices here.
    """

    target: str | None = None
    density: float | None = None

    @property
    def options(self) -> dict[str, str]:
        """Of the compiler, for plain jit."""
        return {} if self.target is None else DESCRIBED_OPTIONS["gpu"]

    def shapes(self, work: Job) -> tuple:
        """The arguments of a step as shapes, on that card where it is not there."""
        shapes = work.state_shapes(), work.batch
        if self.target is None:
            return shapes
        from vmem_jax.devices.targets import target

        sharding = target(self.target).sharding()
        placed = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
        return jax.tree.map(placed, shapes)

    def arguments(self, work: Job, techniques: str) -> tuple:
        """What a step is planned from with `techniques`: shapes, or data to count the zeros of."""
        if "compress" not in techniques or self.density is not None:
            return self.shapes(work)
        return initial_states(work)(), jax.jit(work.random_batch)(jax.random.key(1))

    def all_nbytes(self, shapes: tuple) -> int:
        """Bytes of all memory of the device."""
        return total_nbytes(jax.tree.leaves(shapes), self.target)

    def budget_nbytes(self, asked: str, plain_need: int | None, shapes: tuple) -> int | None:
        """Bytes of a budget in words; None for the least that a policy reaches.

        Raises:
          ValueError: it is no budget, or a fraction of a need that is not known.
        """
        if asked == "least":
            return None
        if asked == "none":
            return self.all_nbytes(shapes)
        try:
            fraction = float(asked)
        except ValueError:
            return parse_size(asked, "--budgets")
        if plain_need is None:
            raise ValueError(f"--budgets={asked} is a share of --plain_need, which is not known.")
        return int(fraction * plain_need)


def initial_states(work: Job) -> Callable[[], Any]:
    """What draws the state before the first step, by one program for each distinct draw.

    All draws in one program are hundreds of kernels, none of which XLA shares: those of VGG-116
    take a GPU's compiler most of a minute.
    """
    key = jax.random.key(0)
    jaxpr, shapes = jax.make_jaxpr(work.init, return_shape=True)(key)
    drawn = jaxpr_as_fun(drop_dead(jaxpr))

    def draw() -> Any:
        leaves = map(jnp.asarray, drawn(key))  # a literal comes as NumPy's
        return jax.block_until_ready(jax.tree.unflatten(jax.tree.structure(shapes), leaves))

    return draw


class Variant:
    """One variant of the step: compiled, with its own state.

    Whatever it fails with is its outcome, so that the others go on.

    Attributes:
      run: (state, batch) -> (state, metrics); None where it failed.
      seconds: a step, of each timed block.
      warm_seconds: of the last step that was not kept; 0 before.
      plain_seconds: the median of plain jit's blocks, which took turns with these.
      plain_loss: plain jit's after as many steps from the same state.
    """

    def __init__(
        self, name: str, budget: float | None, asked: str, build: Callable[[], Any]
    ) -> None:
        self.name, self.budget, self.asked = name, budget, asked
        self.facts: dict[str, Any] = {}
        self.seconds: list[float] = []
        self.warm_seconds = 0.0
        self.plain_seconds: float | None = None
        self.plain_loss: float | None = None
        self.outcome = "ok"
        self.run: Callable | None = None
        start = time.perf_counter()
        try:
            self.run, self.facts = build()
        except Exception as error:
            self.outcome = outcome_of(error)
            if isinstance(error, vmem_jax.BudgetError):
                self.facts = {"lowest": error.lowest_peak, "lowest_compiled": error.compiled}
            elif not isinstance(error, REFUSALS):
                logging.exception("%s@%s", name, asked)
        self.compile_seconds = time.perf_counter() - start
        self.state: Any = None
        self.loss: float | None = None

    def time(self, batch: Any, steps: int, keep: bool) -> None:
        """Runs one block of steps; a device or a host that runs out of memory ends the variant."""
        if self.run is None:
            return
        try:
            start = time.perf_counter()
            for _ in range(steps):
                self.state, metrics = self.run(self.state, batch)
            jax.block_until_ready((self.state, metrics))
        except Exception as error:
            self.outcome = outcome_of(error)
            self.run = self.state = None
            self.seconds.clear()
            return
        seconds = (time.perf_counter() - start) / steps
        if keep:
            self.seconds.append(seconds)
            self.loss = float(metrics["loss"])
        else:
            self.warm_seconds = seconds

    def compare(self, seconds: float, loss: float | None) -> None:
        """Keeps what plain jit took and came to, and warns of what came to something else."""
        self.plain_seconds, self.plain_loss = seconds, loss
        if self.loss is None or loss is None or abs(self.loss - loss) <= _AS_LOW * abs(loss):
            return
        text = "%s@%s has a loss of %.4f after steps after which plain jit's is %.4f"
        logging.warning(text, self.name, self.asked, self.loss, loss)


def plain(work: Job, place: Place) -> Callable[[], Any]:
    """The step under `jax.jit`."""

    def build() -> tuple[Callable, dict]:
        lowered = jax.jit(work.step, donate_argnums=0).lower(*place.shapes(work))
        compiled = lowered.compile(place.options)
        pinned = compiled.memory_analysis().host_temp_size_in_bytes
        return compiled, {"need": need_nbytes(compiled), "compiles": 1, "pinned_nbytes": pinned}

    return build


def budgeted(
    work: Job,
    place: Place,
    policy: str,
    nbytes: int | None,
    known: Sequence[int] = (),
    searched: bool = False,
) -> Callable[[], Any]:
    """The step under `vmem_jax.jit`.

    Args:
      policy: as the flag `--policies` has it; a density behind its transport stands for `place`'s.
      nbytes: the budget; None for the least that the policy reaches.
      known: the fewest bytes to which other compilations came, in rising order.
      searched: whether one of them looked for the least; then 2 % more are tried, and what comes of
        that, in place of looking again.

    Raises:
      ValueError: there is no such policy or option.
    """
    name, techniques, transport, density, *_ = [*policy.split(":"), "", "", ""]
    if density:
        place = dataclasses.replace(place, density=float(density))
    compiled = functools.partial(_compiled, work, place, policy_of(name), techniques, transport)

    def build() -> tuple[Callable, dict]:
        if nbytes is not None:
            return compiled(nbytes)
        near = [size + size // 50 for size in known]
        tried = near
        if not searched:
            # what is there in any case, and next to nothing else: the error tells the least
            floor = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(place.shapes(work)))
            tried = [floor + floor // 100]
        for each in tried:
            try:
                return compiled(each)
            except vmem_jax.BudgetError as error:
                if not error.compiled:
                    raise
                least, plan = error.lowest_peak, error.lowest_plan
        # nothing met that budget, so what it came to need not be the least
        lower = [] if searched else [n for n, size in zip(near, known, strict=True) if size < least]
        for each in (*lower, least):
            with contextlib.suppress(vmem_jax.BudgetError):
                return compiled(each)
        return compiled(least, plan)

    return build


def _compiled(
    work: Job,
    place: Place,
    policy: str | AbstractPolicy,
    techniques: str,
    transport: str,
    nbytes: int,
    plan: vmem_jax.Plan | None = None,
) -> tuple[Callable, dict]:
    step = vmem_jax.jit(
        work.step,
        budget=nbytes,
        policy=policy,
        plan=plan,
        allow=("order", *techniques.split("+")) if techniques else None,
        transport=transport or "auto",
        density=place.density,
        donate_argnums=0,
    )
    with counting() as counters:
        compiled = step.lower(*place.arguments(work, techniques)).compile(place.target)
    return step, {**facts_of(compiled, nbytes), "plan_seconds": counters["plan"].seconds}


def policy_of(text: str) -> str | AbstractPolicy:
    """The policy of `text`: its name, and behind "?" its options as in a URL's query.

    Raises:
      ValueError: there is no such policy or option.
    """
    name, _, query = text.partition("?")
    if name not in vmem_jax.POLICIES:
        raise ValueError(f"`{text}`: no policy {name!r}; there is {', '.join(vmem_jax.POLICIES)}.")
    if not query:
        return name
    options: dict[str, Any] = dict(parse_qsl(query, strict_parsing=True))
    known = [field.name for field in dataclasses.fields(vmem_jax.POLICIES[name])]
    if unknown := set(options) - set(known):
        raise ValueError(f"`{text}`: no option {sorted(unknown)}; `{name}` has {', '.join(known)}.")
    truths = {"true": True, "false": False}
    options = {key: truths.get(value, value) for key, value in options.items()}
    if "limit" in options:
        options["limit"] = parse_size(options["limit"], text)
    return vmem_jax.POLICIES[name](**options)


def facts_of(compiled: Any, nbytes: int) -> dict[str, Any]:
    """What a compiled budgeted step tells, as fields of a Record."""
    attempts = sorted(compiled.attempts, key=lambda a: -(a.plan.budget or 0))
    return {
        "budget_nbytes": nbytes,
        "need": compiled.need_nbytes,
        "predicted_need": attempts[0].predicted_need,
        "first_need": attempts[0].need,
        "average_nbytes": average_nbytes(compiled.timeline),
        "compiles": len(attempts),
        "recomputed": len(compiled.plan.recomputed),
        "divided": len(compiled.plan.divided),
        "compressed": len(compiled.plan.compressed),
        "sub_batches": compiled.plan.sub_batches,
        "transfers": len(compiled.plan.transfers),
        "moved_nbytes": compiled.moved_nbytes,
        "pinned_nbytes": compiled.pinned_nbytes,
        "predicted_seconds": compiled.plan.predicted_seconds,
    }


def average_nbytes(timeline: Timeline) -> int:
    """Bytes live on an average moment of a step, by prediction; waits belong to the step before."""
    ends = (*timeline.start[1:], timeline.seconds)
    pairs = zip(timeline.live_nbytes, timeline.start, ends, strict=True)
    return round(sum(live * (end - begin) for live, begin, end in pairs) / timeline.seconds)


def without_transfers(work: Job, plan: vmem_jax.Plan) -> Callable[[], Any]:
    """The same plan with everything left on the device: what its transfers cost."""
    still = dataclasses.replace(plan, transfers=(), budget=None)
    return lambda: (vmem_jax.jit(work.step, plan=still, donate_argnums=0), {})
