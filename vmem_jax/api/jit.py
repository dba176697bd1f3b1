"""jit: the function that users call. trace → capture → plan → rewrite → compile → check → run."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from vmem_jax import jax_compat as compat
from vmem_jax.api import corrections
from vmem_jax.api.cache import with_cache
from vmem_jax.api.entry import CompiledStep
from vmem_jax.api.garbage import uncollected
from vmem_jax.api.planner import plan_step
from vmem_jax.api.rivals import rivals_of
from vmem_jax.api.stages import REFUSED, Compiled, Lowered, run, run_directly
from vmem_jax.api.sweep import front, point_of
from vmem_jax.api.tune import tuned
from vmem_jax.capture import capture
from vmem_jax.capture.product_workspaces import Products
from vmem_jax.compiler.compile import left_out, products_of
from vmem_jax.core.machine import Machine
from vmem_jax.core.pareto_point import ParetoPoint
from vmem_jax.core.plan import Plan
from vmem_jax.devices.device import devices_of
from vmem_jax.errors import BudgetError, DifferentiationError, parse_budget
from vmem_jax.policy import AbstractPolicy
from vmem_jax.report.explain import Explanation, explain
from vmem_jax.report.page import require_plotly, save_page
from vmem_jax.report.picture import picture
from vmem_jax.rewrite.rewrite import rewrite
from vmem_jax.search.attempt import Attempt
from vmem_jax.techniques import StepContext
from vmem_jax.techniques.jit_arguments import (
    density_of,
    host_nbytes,
    policy_of,
    sub_batches_of,
    transport_of,
)
from vmem_jax.techniques.settings import Settings
from vmem_jax.tracing import arguments, frameworks, hosted
from vmem_jax.tracing.batch_arguments import batch_arguments
from vmem_jax.tracing.traced import TracedStep


def jit(
    fun: Callable | None = None,
    *,
    budget: int | float | str | None = None,
    policy: str | AbstractPolicy = "auto",
    allow: Sequence[str] | None = None,
    plan: Plan | None = None,
    host_budget: int | str | None = None,
    transport: str = "auto",
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    batch_argnums: int | Sequence[int] = (),
    batch_argnames: str | Sequence[str] = (),
    sub_batches: int | None = None,
    density: float | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    machine: Machine | None = None,
    profile: bool | None = None,
    tune: bool = False,
) -> Any:
    """`jax.jit` inside a memory budget. The compiler confirms that the step fits before it runs.

    Args:
      fun: a training step, or any function: raw JAX, Flax (Linen, NNX), Equinox, Optax. Without it
        `jit` is a decorator.
      budget: the device memory that the compiled step may need (arguments + outputs − aliased +
        temporaries), per device: bytes, `"12GiB"`, a fraction of plain jit's compiled need
        (`0.5`), or `"device"` (what is free now).
      policy: one of `POLICIES`, by name or as an instance with its options. "keep" leaves the
        program untouched. Choosing a policy also allows the techniques that it `needs`.
      allow: the techniques that a plan may use. "order": other orders and exact residuals.
        "recompute": values are dropped and computed again. "offload": values wait in pinned host
        memory. "stream": arguments in pinned host memory are fetched when they are read, and the
        results that replace them return there. "workspace": convolutions run in micro-batches, with
        smaller workspaces. "sub_batches": the batch runs in parts, one after another. "logits":
        the product that makes the logits of a large vocabulary, the loss and both gradients run on
        some tokens at a time (policy "auto"). "bits": masks wait for the backward pass as bits, eight
        in a byte (policy "auto"). "carry": convolutions in 16 bits compute the
        normalisations and sums around them (on an H100 or H200, policies "auto" and "exact";
        elsewhere where it is named). "row_kernels": softmaxes that XLA would read several times
        are one kernel (the same cards and policies). "compress": values wait without
        their zeros. By default all but the last one; "offload" and "workspace" need a GPU with
        measured times (`profile`), and "offload" without them is used only where nothing else fits,
        or takes far longer.
      host_budget: the most pinned host memory that the step may use: bytes or `"64GiB"`.
      transport: how bytes move: "ffi" (the native extension, with an arena and counters),
        "memory_kinds" (XLA's own copies; no effect on a CPU), or "auto": the extension if it was
        built for the device, else XLA's own copies on a GPU.
      plan: a plan made before, for exactly this step. Nothing is planned then.
      donate_argnums, donate_argnames, static_argnums, static_argnames, compiler_options: as in
        `jax.jit`.
      batch_argnums, batch_argnames: the arguments that hold the batch, along the first dimensions of
        their arrays. By default those that are neither donated nor returned and whose first
        dimensions agree.
      sub_batches: the number of parts in which the batch runs, one after another; 1 keeps it whole.
        By default the number that is predicted to be fastest within the budget (policy "auto").
      density: with "compress", the share of elements behind ReLUs and masks that is not zero, from 0
        to 1. By default the zeros of all large residuals are counted on the arguments of the first
        call.
      machine: the rates for predicted times. By default those of the device, by its name and by what
        `vmem-jax profile` or `profile=True` measured on it.
      profile: `True` times the distinct steps on the device in the first call, if they were not timed
        before (up to 90 s); on a GPU with the extension also cuDNN's plans for the step's
        convolutions (up to 90 s more). `None` times nothing and uses what was measured; `False`
        ignores that too.
      tune: time some of the first calls for each set of shapes; these wait for their results. Time up
        to four other plans in the calls after them, and keep the fastest: those whose predictions are
        within the error of the first one's; one that is planned again from the measurement, if this
        differs from the prediction by more than 5 %; on a GPU also the fastest with XLA's other
        kernels for products. What was measured corrects later predictions for this step.

    Returns:
      A `BudgetedStep`, called like `fun`.

    Raises:
      ValueError, TypeError: an argument is invalid.
      BudgetError: in the first call, if no plan fits. Nothing over the budget ever runs.
    """
    if fun is None:
        return functools.partial(
            jit,
            budget=budget,
            policy=policy,
            allow=allow,
            plan=plan,
            host_budget=host_budget,
            transport=transport,
            donate_argnums=donate_argnums,
            donate_argnames=donate_argnames,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            batch_argnums=batch_argnums,
            batch_argnames=batch_argnames,
            sub_batches=sub_batches,
            density=density,
            compiler_options=compiler_options,
            machine=machine,
            profile=profile,
            tune=tune,
        )
    if not callable(fun):
        raise TypeError(f"`fun` must be a function. Got {type(fun).__name__}.")
    if budget is None and plan is None:
        raise TypeError("`budget` is missing: bytes, '12GiB', a fraction such as 0.5, or 'device'.")
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(f"`plan` must be a Plan (`Plan.load(path)`). Got {type(plan).__name__}.")
    if plan is not None and tune:
        raise ValueError(
            "`tune` may make another plan, but `plan` is given: leave one of them out."
        )
    chosen, allowed, named, required = policy_of(policy, allow)
    signature = arguments.signature(
        getattr(fun, "__wrapped__", fun) if _is_jitted(fun) else fun,
        static_argnums,
        static_argnames,
        donate_argnums,
        donate_argnames,
        batch_argnums,
        batch_argnames,
    )
    settings = Settings(
        getattr(fun, "__name__", BudgetedStep.__name__),
        signature,
        None if budget is None else parse_budget(budget),
        chosen,
        allowed,
        named,
        required,
        plan,
        host_nbytes(host_budget),
        transport_of(transport),
        dict(compiler_options or {}),
        machine,
        profile,
        sub_batches_of(sub_batches, chosen),
        density_of(density),
    )
    return BudgetedStep(fun, settings, tune)


def _config() -> Hashable:
    """The part of JAX's configuration that a traced step depends on."""
    config: Any = jax.config
    return (
        config.jax_enable_x64,
        config.jax_default_matmul_precision,
        config.jax_numpy_dtype_promotion,
        config.jax_numpy_rank_promotion,
    )


def _is_jitted(fun: Any) -> bool:
    return hasattr(fun, "__wrapped__") and hasattr(fun, "lower")


class BudgetedStep:
    """A function that runs inside its budget. Made by `jit`."""

    def __init__(self, fun: Callable, settings: Settings, tune: bool) -> None:
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._settings = settings
        self._tune = tune
        self._entries: dict[Hashable, CompiledStep] = {}
        self._last: tuple[Hashable, Any] | None = None  # (configuration, compiled) of plain calls
        self._ran = weakref.WeakSet[Attempt]()  # compiled plans that have run

    # -- the public face

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._last is not None and self._last[0] == _config():
            # the usual call, of nothing but arrays
            out = run_directly(self._settings.name, self._last[1], args, kwargs)
            if out is not REFUSED:  # else of other shapes or tracers
                return out
        return self._call(args, kwargs)

    def _call(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        call = frameworks.prepare(self._settings.signature, args, kwargs)
        leaves, tree = jax.tree.flatten(call.tree)
        tracers = [x for x in leaves if compat.is_tracer(x)]
        if any(not compat.is_jit_tracer(x) for x in tracers):
            raise DifferentiationError(
                f"`{self._settings.name}` is a budgeted step: it is not differentiable and cannot be "
                "batched, since its memory was planned as it stands. Put `grad`, `jvp` or `vmap` "
                "inside: budget the whole training step, `vmem_jax.jit(lambda *a: "
                "jax.grad(f)(*a), budget=...)`."
            )
        if any(hosted.is_hosted_tracer(x) for x in tracers):
            raise ValueError(
                f"`{self._settings.name}` cannot stream arguments in host memory inside another "
                "jit, which would own them. Call it outside, or hand it `jax.device_put(x, "
                "jax.memory.Space.Device)`."
            )
        entry = self._entry(call, leaves, tree, inlined=bool(tracers))
        traced = entry.traced
        if tracers:  # the rewritten equations go into the outer jit, whose compiler does the rest
            best = entry.best
            outs = jaxpr_as_fun(rewrite(traced.captured, best.plan, entry.transport))(*leaves)
            return call.finish(jax.tree.unflatten(traced.out_tree, outs), traced.aux)
        # The first run is waited for: memory may have gone since the step was planned, and who
        # learns it later than at the call gets no numbers.
        first = entry.best not in self._ran
        out = run(self._settings.name, entry, call, leaves, args, kwargs, wait=first)
        self._ran.add(entry.best)
        if entry.tuner is None and traced.whole is not None:
            self._last = (_config(), entry.best.compiled)
        return out

    def plan(self, *args: Any, target: str | None = None, **kwargs: Any) -> Plan:
        """The plan for these arguments (arrays, or `jax.ShapeDtypeStruct`s), compiled and checked.

        Args:
          target: the name of a card, "h200", to plan and compile for without having it. Needs
            `vmem_jax[gpu-compile]`.
        """
        return self._entry_for(args, kwargs, target).best.plan

    def explain(self, *args: Any, target: str | None = None, **kwargs: Any) -> Explanation:
        """A report of what was decided and what it costs; print it. Compiles plain jit to compare."""
        entry = self._entry_for(args, kwargs, target)
        plain = entry.plain_need
        if plain is None:
            plain = StepContext(self._settings, entry.traced, target=target).plain_need
        captured = entry.traced.captured
        program = captured.program
        platform = "gpu" if target is not None else devices_of(entry.traced.avals)[0].platform
        spared = entry.policy.spared(program), left_out(platform, len(program.steps))
        return explain(
            program,
            entry.costs,
            entry.best.plan,
            budget=entry.budget,
            plain_need=plain,
            compiled_need=entry.best.need,
            tuning=entry.tuning,
            log=entry.log,
            spared="\n".join(filter(None, spared)),
            stacked="\n".join(map(str, (*captured.stacked, *captured.whole))),
            cache=entry.cache,
        )

    def report(
        self,
        *args: Any,
        path: str | Path = "memory.html",
        target: str | None = None,
        points: Sequence[ParetoPoint] = (),
        **kwargs: Any,
    ) -> Path:
        """Writes a page about the memory of a step: plain jit and the plan, byte by byte over time.

        The page is one file that needs no network. It has the bytes by kind and by layer with the
        budget and both peaks, the lanes of compute and copies, the largest values with what is
        decided about them and why, and the trade of seconds against bytes. All times are predicted.

        Args:
          args, kwargs: as `fun` takes them, arrays or `jax.ShapeDtypeStruct`s.
          path: of the file.
          target: a card that is not there, "h200".
          points: of the trade, as `vmem_jax.pareto` gives them; by default the plans that were
            compiled to find this one.

        Returns:
          `path`.

        Raises:
          ImportError: Plotly is missing: `pip install "vmem_jax[report]"`.
          BudgetError: no plan fits.
        """
        require_plotly()
        data = self.report_data(*args, target=target, points=points, **kwargs)
        return save_page(data, path)

    def report_data(
        self,
        *args: Any,
        target: str | None = None,
        points: Sequence[ParetoPoint] = (),
        **kwargs: Any,
    ) -> dict[str, Any]:
        """What `report` shows, as values of JSON, in bytes and seconds."""
        explanation = self.explain(*args, target=target, **kwargs)
        entry = self._entry_for(args, kwargs, target)
        assert entry.whole is not None, "every entry of a step has it"
        shown = [*points] or [point_of(attempt) for attempt in front(entry.attempts)]
        device = target or devices_of(entry.traced.avals)[0].device_kind
        return picture(*entry.whole, explanation, shown, self._settings.name, device)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """As `jax.jit(fun).lower(*args)`; `.compile()` returns the planned and checked step."""
        call = frameworks.prepare(self._settings.signature, args, kwargs)
        planned = lambda target: self._entry_for(args, kwargs, target)
        return Lowered(self._settings, call, planned)

    def with_budget(self, budget: int | float | str) -> BudgetedStep:
        """The same step within another `budget`, as `jit` takes it."""
        settings = dataclasses.replace(self._settings, budget=parse_budget(budget), plan=None)
        return BudgetedStep(self._fun, settings, self._tune)

    def clear_cache(self) -> None:
        """Forgets every plan and compiled step."""
        self._entries.clear()
        self._last = None

    # -- trace, plan, prove

    def _entry_for(self, args: tuple, kwargs: dict, target: str | None) -> CompiledStep:
        call = frameworks.prepare(self._settings.signature, args, kwargs)
        leaves, tree = jax.tree.flatten(call.tree)
        return self._entry(call, leaves, tree, target)

    def _entry(
        self,
        call: arguments.Call,
        leaves: list[Any],
        tree: Any,
        target: str | None = None,
        inlined: bool = False,
    ) -> CompiledStep:
        avals = hosted.committed(tuple(map(arguments.aval_of, leaves)))
        key = (
            tree,
            call.static,
            target,
            inlined,
            tuple((a.shape, a.dtype, a.weak_type, a.sharding) for a in avals),
            _config(),
        )
        entry = self._entries.get(key)
        if entry is None:
            with uncollected():
                step = self._context(call, avals, leaves, tree, target, inlined)
                whole = step.traced.captured.program, step.costs
                entry = dataclasses.replace(plan_step(step), whole=whole)
            caches = self._settings.policy.caches
            if not self._tune or target is not None or inlined:
                entry = with_cache(dataclasses.replace(entry, rivals=()), caches)
            else:

                def settle(found: CompiledStep, ran: Sequence[tuple[Attempt, float]]) -> None:
                    corrections.keep(step, ran)
                    # plans are compared without one: their caches would take more than the budget
                    self._entries[key] = with_cache(found, caches)

                rivals = functools.partial(rivals_of, step, entry)
                entry = tuned(self._settings.name, entry, rivals, settle)
            self._entries[key] = entry
        return entry

    @uncollected()
    def context(self, args: tuple, kwargs: dict, target: str | None) -> StepContext:
        """The step for these arguments as it is traced, not yet planned."""
        call = frameworks.prepare(self._settings.signature, args, kwargs)
        leaves, tree = jax.tree.flatten(call.tree)
        avals = hosted.committed(tuple(map(arguments.aval_of, leaves)))
        return self._context(call, avals, leaves, tree, target)

    def _context(
        self,
        call: arguments.Call,
        avals: tuple,
        leaves: list[Any],
        tree: Any,
        target: str | None,
        inlined: bool = False,
    ) -> StepContext:
        platform = "gpu" if target is not None else devices_of(avals)[0].platform
        traced = self._trace(call, avals, tree, platform, products_of(avals, target))
        hosted.check(
            self._settings.name,
            traced.names,
            avals,
            traced.donated,
            traced.hosted,
            allowed="stream" in self._settings.allowed,
        )
        return StepContext(self._settings, traced, leaves, target, inlined)

    def _trace(
        self, call: arguments.Call, avals: tuple, tree: Any, platform: str, products: Products
    ) -> TracedStep:
        paths = [p for p, _ in jax.tree_util.tree_flatten_with_path(call.tree)[0]]
        donated = tuple(call.donated(path) for path in paths)
        names = tuple(arguments.leaf_names(self._settings.signature, call.tree))
        found: dict[str, Any] = {}

        def flat(*leaves: Any) -> Any:
            out, found["aux"] = call.fun(jax.tree.unflatten(tree, leaves))
            outs, found["tree"] = jax.tree.flatten(out)
            found["paths"] = [p for p, _ in jax.tree_util.tree_flatten_with_path(out)[0]]
            return outs

        plain = jax.jit(flat).trace(*map(hosted.on_device, avals)).jaxpr
        out_avals = [v.aval for v in compat.open_jaxpr(plain).outvars]
        pairs = hosted.pairs(avals, [p[2:] for p in paths], out_avals, found["paths"])
        shardings = [a.sharding for a in avals]
        captured = capture(plain, names, donated, shardings, pairs, platform, products)
        whole = None
        if call.plain and not pairs:  # the same leaves in the same order, as the caller holds them
            by_position, by_name = call.tree
            whole = jax.tree.structure((tuple(by_position.values()), by_name))
        batch = batch_arguments(self._settings.signature, paths, names, avals, donated, out_avals)
        return TracedStep(
            plain, captured, avals, donated, names, found["tree"], found["aux"], whole, pairs, batch
        )


__all__ = ["BudgetError", "BudgetedStep", "Compiled", "Lowered", "jit"]
