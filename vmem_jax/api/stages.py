"""stages: a budgeted step before it runs, as `jax.stages` has it: lowered, compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from vmem_jax import jax_compat as compat
from vmem_jax.api import run_notes
from vmem_jax.api.entry import CompiledStep
from vmem_jax.core.looped import slices_nbytes
from vmem_jax.core.parked import parks
from vmem_jax.core.plan import Plan
from vmem_jax.core.planned import simulate_plan
from vmem_jax.core.simulate import Timeline
from vmem_jax.core.tensor_cache import Traffic
from vmem_jax.errors import DifferentiationError
from vmem_jax.rewrite.rewrite import rewrite
from vmem_jax.rewrite.transfers import layout_of
from vmem_jax.search.attempt import Attempt
from vmem_jax.techniques.settings import Settings
from vmem_jax.tracing import arguments, frameworks
from vmem_jax.transfer.arena import Arena
from vmem_jax.transfer.compression import Store


def run(
    name: str,
    entry: CompiledStep,
    call: arguments.Call,
    leaves: Sequence[Any],
    args: tuple,
    kwargs: dict,
    wait: bool = False,
) -> Any:
    """Runs a compiled step on the leaves of `call`, which are those of `args` and `kwargs`.

    Args:
      name: of the step.
      wait: for the results, so that an error of the run is raised here.
    """
    traced = entry.traced
    arguments.check_donation(traced.names, leaves, traced.donated)
    compiled = entry.tuner or entry.best.compiled
    try:
        outs = compiled(*leaves) if traced.whole is None else compiled(*args, **kwargs)
        if wait:
            jax.block_until_ready(outs)
    except RuntimeError as error:
        run_notes.note(error, name, entry.best.compiled, leaves)
        raise
    if traced.whole is not None:
        return outs
    return call.finish(jax.tree.unflatten(traced.out_tree, outs), traced.aux)


REFUSED = object()
"""What `run_directly` returns in place of a result."""


def run_directly(name: str, compiled: Any, args: tuple, kwargs: dict) -> Any:
    """Runs a compiled step that takes the arguments of its user unchanged.

    The compiled step checks their tree, shapes and shardings itself, before anything runs, and faster
    than we could: looking at each of 400 arrays in Python takes 2 to 4 ms.

    Args:
      name: of the step.

    Returns:
      Its results; REFUSED for other arguments, of which the caller says what is wrong.
    """
    try:
        return compiled(*args, **kwargs)
    except (TypeError, ValueError):
        return REFUSED
    except RuntimeError as error:
        run_notes.note(error, name, compiled, (args, kwargs))
        raise


class Lowered:
    """A budgeted step for given arguments, not yet compiled."""

    def __init__(
        self,
        settings: Settings,
        call: arguments.Call,
        planned: Callable[[str | None], CompiledStep],
    ) -> None:
        self._settings, self._call, self._planned = settings, call, planned

    def compile(self, target: str | None = None) -> Compiled:
        """The planned and compiled step. Raises BudgetError if none fits.

        Args:
          target: the name of a card to compile for without having it; the result cannot be called.
        """
        entry = self._planned(target)
        return Compiled(self._settings, self._call, entry, runs=target is None)

    def as_text(self) -> str:
        """The StableHLO of the planned step."""
        entry = self._planned(None)
        jaxpr = rewrite(entry.traced.captured, entry.best.plan, entry.transport)
        return jax.jit(jaxpr_as_fun(jaxpr)).lower(*entry.traced.avals).as_text()


class Compiled:
    """A compiled budgeted step; called like the user's function, with the arguments that it was
    compiled for. It holds its executable: nothing is planned or compiled when it is called."""

    def __init__(
        self, settings: Settings, call: arguments.Call, entry: CompiledStep, runs: bool
    ) -> None:
        self._settings, self._entry, self._runs = settings, entry, runs
        self._tree, self._static = jax.tree.structure(call.tree), call.static
        self._ran = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step.

        Raises:
          TypeError: the step was compiled for other arguments.
          ValueError: the step was compiled for a `target`.
        """
        name, entry = self._settings.name, self._entry
        if self._ran and entry.tuner is None and entry.traced.whole is not None:
            out = run_directly(name, entry.best.compiled, args, kwargs)
            if out is not REFUSED:
                return out
        if not self._runs:
            raise ValueError(
                f"`{name}` was compiled for a card that is not there, so it cannot run. Leave out "
                "`target` to compile for the devices of the arguments."
            )
        call = frameworks.prepare(self._settings.signature, args, kwargs)
        leaves, tree = jax.tree.flatten(call.tree)
        if any(map(compat.is_tracer, leaves)):
            raise DifferentiationError(
                f"`{name}` is compiled, and cannot be traced: call the step that `vmem_jax.jit` "
                "returned inside of other transformations."
            )
        if (tree, call.static) != (self._tree, self._static):
            raise TypeError(
                f"`{name}` was compiled for arguments of the structure {self._tree}, and is called "
                f"with {tree}, or with other static arguments. Compile it for those, or call the "
                "step that `vmem_jax.jit` returned."
            )
        traced = entry.traced
        for label, leaf, made in zip(traced.names, leaves, traced.avals, strict=True):
            given = arguments.aval_of(leaf)
            if (given.shape, given.dtype) != (made.shape, made.dtype):
                raise TypeError(
                    f"`{name}` was compiled for `{label}` as {made.dtype}{list(made.shape)}, and is "
                    f"called with {given.dtype}{list(given.shape)}. Compile it for that, or call the "
                    "step that `vmem_jax.jit` returned."
                )
        out = run(name, entry, call, leaves, args, kwargs)
        self._ran = True
        return out

    @property
    def plan(self) -> Plan:
        return self._entry.best.plan

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """Every plan that was compiled; the last is the one that runs."""
        return self._entry.attempts

    @property
    def arena(self) -> Arena | None:
        """The host memory of the plan's transfers, with its counters and its tensor cache.

        None where nothing is moved, or by XLA's own copies (`transport="memory_kinds"`).
        """
        transport = self._entry.transport
        return None if transport is None else transport.arena

    @property
    def compression(self) -> Store | None:
        """The store of the compressed values, with counters of their density and overflow on every
        device; None if nothing is compressed."""
        return getattr(self._entry.best.compiled, "store", None)

    @property
    def transport(self) -> str | None:
        """The name of the plan's transport, "ffi" or "memory_kinds"; None without transfers."""
        transport = self._entry.transport
        return None if transport is None else transport.name

    @property
    def moved_nbytes(self) -> int:
        """Bytes that leave for host memory in a step; hosted outputs are among them, also those that
        leave by slices."""
        program = self._entry.traced.captured.program
        out = [t.buffer for t in self.plan.transfers if t.buffer not in program.streamed_in]
        slices = sum(slices_nbytes(program.buffers[b]) for b in self.plan.looped)
        times = lambda b: program.steps[program.producer[b]].times  # once for each sub-batch
        slices += sum(step.times * step.returned for step in program.steps)
        return sum(times(b) * program.buffers[b].nbytes for b in out) + slices

    @property
    def pinned_nbytes(self) -> int:
        """Bytes of host memory in which tensors are parked; state in host memory is not counted."""
        program = self._entry.traced.captured.program
        if not parks(program, self.plan):
            return 0
        stats = self.memory_analysis()
        return max(layout_of(program, self.plan).nbytes, stats.host_temp_size_in_bytes)

    @property
    def cache(self) -> tuple[Traffic, Traffic] | None:
        """The predicted traffic of a step without its tensor cache, and with it; None without.

        The cache is what the budget leaves, in the policies "auto" and "superneurons". It is device
        memory outside of XLA's pool, and is held until the step is freed.
        """
        return self._entry.cache

    @property
    def timeline(self) -> Timeline:
        """The predicted execution of the plan."""
        program = self._entry.traced.captured.program
        return simulate_plan(program, self.plan, self._entry.costs)

    @property
    def need_nbytes(self) -> int:
        """Bytes that the step needs by the compiler's figures."""
        return self._entry.best.need

    def memory_analysis(self) -> Any:
        return self._entry.best.compiled.memory_analysis()

    def cost_analysis(self) -> Any:
        return self._entry.best.compiled.cost_analysis()

    def as_text(self) -> str:
        return self._entry.best.compiled.as_text()
