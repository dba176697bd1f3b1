"""StepContext: the step as techniques see it, with the settings of `jit` and the card."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from vmem_jax.capture.kernel_gradients import as_misread
from vmem_jax.capture.opened_loops import opened
from vmem_jax.capture.row_major import as_spread
from vmem_jax.capture.small_updates import as_apart
from vmem_jax.capture.softmax import as_summed_apart
from vmem_jax.capture.transposed_convolutions import as_spreading
from vmem_jax.capture.unpadded import as_unpadded
from vmem_jax.capture.whole_rows import as_turned
from vmem_jax.capture.zeroed_stacks import as_zeroed
from vmem_jax.compiler.compile import compile_jaxpr
from vmem_jax.core.cards import machine_for
from vmem_jax.core.costs import Costs, analytic, of_parts
from vmem_jax.core.machine import Machine
from vmem_jax.core.need import need_nbytes
from vmem_jax.core.parked import parks
from vmem_jax.core.plan import Plan
from vmem_jax.core.program import END
from vmem_jax.core.simulate import simulate
from vmem_jax.devices.device import devices_of
from vmem_jax.errors import HostMemoryError
from vmem_jax.jax_compat import SIZED_OPTIONS, ClosedJaxpr, open_jaxpr
from vmem_jax.policy.order import lower_order
from vmem_jax.profile.measured import costs_of
from vmem_jax.progress import doing
from vmem_jax.rewrite.compression import sites
from vmem_jax.rewrite.rewrite import rewrite
from vmem_jax.rewrite.transfers import layout_of
from vmem_jax.techniques.settings import Settings
from vmem_jax.tracing.traced import TracedStep
from vmem_jax.transfer.compression import Store
from vmem_jax.transfer.executable import Moving
from vmem_jax.transfer.transport_choice import choose, open_transport

T = TypeVar("T")


class StepContext:
    """A traced step for its devices, or for a card that need not be present.

    Args:
      leaves: the step's arguments, or their shapes.
      target: the name of that card; None for the devices of the arguments.
      inlined: whether the step is called inside another jit.
    """

    def __init__(
        self,
        settings: Settings,
        traced: TracedStep,
        leaves: Sequence[Any] = (),
        target: str | None = None,
        inlined: bool = False,
    ) -> None:
        self.settings, self.traced, self.leaves = settings, traced, leaves
        self.target, self.inlined = target, inlined
        # not itself: a dropped step goes at once, without a collection of cycles
        self._whole: StepContext | None = None
        self._known: dict[str, Any] = {}

    def of(self, traced: TracedStep) -> StepContext:
        """The same for another form of the step, whose `whole` stays the step as it was traced."""
        form = StepContext(self.settings, traced, self.leaves, self.target, self.inlined)
        form._whole = self.whole
        return form

    @property
    def whole(self) -> StepContext:
        """The step as it was traced, of which this may be another form."""
        return self._whole or self

    def cached(self, key: str, make: Callable[[], T]) -> T:
        """What `make` returns, made once for this step."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    @functools.cached_property
    def devices(self) -> list[jax.Device]:
        return devices_of(self.traced.avals)

    @property
    def platform(self) -> str:
        return "gpu" if self.target is not None else self.devices[0].platform

    @property
    def machine(self) -> Machine:
        """The rates of the user's `machine`, or those of the card by its name."""
        return self.settings.machine or machine_for(self.target or self.devices[0].device_kind)

    @functools.cached_property
    def costs(self) -> Costs:
        """The costs of the step with its batch as a whole. What runs inside a loop that is not opened
        takes what it takes plain jit."""
        form = self.opened
        return self._own_costs if form is None else self._with_loop(self._own_costs, form)

    @functools.cached_property
    def _own_costs(self) -> Costs:
        settings, captured = self.settings, self.traced.captured
        if captured.program.opened:
            whole = self.whole
            closed = whole.traced.captured.program
            return of_parts(captured.program, self.machine, closed, whole._own_costs)
        if self.target is not None:
            return analytic(captured.program, self.machine)
        device, machine = self.devices[0], settings.machine
        return costs_of(captured, device, machine=machine, profile=settings.profile)

    @functools.cached_property
    def opened(self) -> StepContext | None:
        """The form whose largest loop of a training step is planned inside; None without such."""
        captured = opened(self.traced.captured)
        if captured is None:
            return None
        return self.of(dataclasses.replace(self.traced, captured=captured))

    @property
    def plain_costs(self) -> Costs:
        """The same as plain jit runs it."""
        captured, machine = self.traced.captured, self.machine
        program = captured.program
        costs = as_misread(self.costs, program, captured.misread)
        written, eqns = captured.written, open_jaxpr(captured.flat).eqns
        costs = as_spread(costs, program, captured.variables, written.spread, machine)
        costs = as_spreading(costs, program, eqns, written.spreading)
        costs = as_zeroed(costs, program, captured.flat, captured.shards, machine)
        known = eqns, captured.variables, written.lengths
        costs, program = as_unpadded(costs, program, *known, machine)
        costs = as_turned(costs, program, written.turned, machine)
        costs = as_summed_apart(costs, program, eqns, machine)
        return as_apart(costs, program, machine)

    def _with_loop(self, costs: Costs, form: StepContext) -> Costs:
        """`costs` with what plain jit takes for the loop that is opened in `form`."""
        program, inside = form.traced.captured.program, form.plain_costs.seconds
        each = zip(program.steps, inside, strict=True)
        looped = sum(seconds for step, seconds in each if step.times > 1)
        [end] = (s for s, step in enumerate(program.steps) if step.op == END)
        made = {form.traced.captured.variables[b] for b in program.steps[end].writes}
        ours, seconds = self.traced.captured, [*costs.seconds]
        for s, step in enumerate(ours.program.steps):
            if made.intersection(ours.variables[b] for b in step.writes):
                seconds[s] = looped
        return dataclasses.replace(costs, seconds=tuple(seconds))

    @functools.cached_property
    def peak_by_order(self) -> int:
        """Bytes that the step peaks at by its order alone."""
        program = self.traced.captured.program
        return simulate(program, lower_order(program, self.costs), self.costs).peak

    @property
    def transport(self) -> str:
        """The name of the transport, "ffi" or "memory_kinds"; "" if no value can be moved."""
        return self._moving[0]

    @property
    def immovable(self) -> str:
        """Why no value moves as long as anything else fits in little more time; "" if values may."""
        return self._moving[1]

    @functools.cached_property
    def _moving(self) -> tuple[str, str]:
        settings, captured = self.settings, self.traced.captured
        named = "offload" in settings.named or (
            settings.plan is not None and parks(captured.program, settings.plan)
        )
        if not named and self.platform == "cpu":
            return "", "a CPU's memory is the host's own (`allow` may name it all the same)"
        mesh = captured.shards.mesh
        how, why = choose(settings.transport, self.platform, self.devices, mesh, self.inlined)
        if how and not named and not self.costs.sources:
            why = (
                "its times are a roofline's, so transfers are left for budgets that nothing else "
                "meets, or only in far more time: measure times with `profile=True` or "
                "`vmem-jax profile`, or let `allow` name it"
            )
        return how, why

    @functools.cached_property
    def plain(self) -> Any:
        """The step as plain jit compiles it, with all arguments on the device."""
        return self._compile(self.traced, self.traced.plain, is_plain=True)

    @functools.cached_property
    def plain_need(self) -> int:
        """Bytes that plain jit needs; its code is not optimised to know them."""
        if "plain" in vars(self) or self.platform not in SIZED_OPTIONS:
            return need_nbytes(self.plain)
        return need_nbytes(self._compile(self.traced, self.traced.plain, is_plain=True, sized=True))

    def compile(self, traced: TracedStep, plan: Plan) -> Any:
        """Compiles `traced`, a form of this step, by `plan`.

        Raises:
          HostMemoryError: the plan parks more in host memory than is allowed.
          CompileError: XLA refuses the rewritten program.
        """
        if not plan.fenced:
            own = self.traced.plain
            return self._compile(self.traced, own, plan, True) if plan.options else self.plain
        mover, store, captured = None, None, traced.captured
        if parks(captured.program, plan):
            layout, limit = layout_of(captured.program, plan), self.settings.host_budget
            nbytes = layout.nbytes * len(self.devices)
            if limit is not None and nbytes > limit:
                raise HostMemoryError(nbytes=nbytes, limit_nbytes=limit, limit="`host_budget`")
            mover = open_transport(self.transport, layout, limit, captured.shards.mesh)
        if captured.program.compressed:
            store = Store(sites(captured))
        jaxpr = rewrite(captured, plan, mover, 0 if store is None else store.id)
        compiled = self._compile(traced, jaxpr, plan)
        if mover is None and store is None:
            return compiled
        return Moving(compiled, mover, store, [] if self.target else self.devices)

    def _compile(
        self,
        traced: TracedStep,
        jaxpr: ClosedJaxpr,
        plan: Plan | None = None,
        is_plain: bool = False,
        sized: bool = False,
    ) -> Any:
        settings = self.settings
        own = () if plan is None else plan.options
        with doing(f"compiling {'plain jit' if is_plain else 'a plan'} of {settings.name}"):
            return compile_jaxpr(
                traced,
                jaxpr,
                self.target,
                name=settings.name,
                sig=settings.signature,
                options={**dict(own), **settings.compiler_options},
                streams=not is_plain,
                sized=sized,
            )
