"""jit: the pipeline on one screen. trace → capture → plan → rewrite → compile → prove → run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
from absl import logging
from jax.extend.core import jaxpr_as_fun

from vmem_jax import arguments, hosted
from vmem_jax import jax_compat as compat
from vmem_jax.batch_arguments import batch_arguments
from vmem_jax.capture import capture
from vmem_jax.compiling import compile_jaxpr
from vmem_jax.conv.choices import learner, with_choices
from vmem_jax.core.costs import MACHINES, Costs, Machine, analytic
from vmem_jax.core.plan import Plan
from vmem_jax.entry import Entry, Traced
from vmem_jax.errors import (
    BudgetError,
    DifferentiationError,
    PlanError,
    parse_budget,
    show_nbytes,
)
from vmem_jax.options import MEANS, host_nbytes, policy_of, sub_batches_of, transport_of
from vmem_jax.policy import AbstractPolicy, Auto
from vmem_jax.policy.convolving import Convolving
from vmem_jax.policy.streaming import Streaming
from vmem_jax.profile.measured import costs_of
from vmem_jax.prove.device import devices_of, limit_nbytes
from vmem_jax.prove.prove import Attempt, need_nbytes
from vmem_jax.prove.sub_batches import Member, prove_fastest
from vmem_jax.report.explain import Explanation, explain
from vmem_jax.rewrite.rewrite import rewrite
from vmem_jax.rewrite.transfers import layout_of, parks
from vmem_jax.splitting import part_costs, splits
from vmem_jax.stages import Compiled, Lowered
from vmem_jax.transfer.choice import choose, open_transport
from vmem_jax.transfer.executable import Moving
from vmem_jax.tune import tuned


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
    compiler_options: Mapping[str, Any] | None = None,
    machine: Machine | None = None,
    profile: bool | None = None,
    tune: bool = False,
) -> Any:
    """`jax.jit` inside a memory budget: the same results, and a proof that it fits.

    Args:
      fun: a training step, or any function: raw JAX, Flax (Linen, NNX), Equinox, Optax. Without it
        `jit` is a decorator.
      budget: the device memory that the compiled step may need (arguments + outputs − aliased +
        temporaries), per device: bytes, `"12GiB"`, a fraction of plain jit's compiled need
        (`0.5`), or `"device"` (what is free now).
      policy: one of `POLICIES`, by name or as an instance with its options. "keep" leaves the
        program untouched. What a policy cannot do without (`needs`) is asked for by choosing it.
      allow: the means that a plan may use: "order" (exact residuals), "recompute", "offload" (to
        pinned host memory, while other work runs), "stream" (arguments in pinned host memory come
        when they are read, and what takes their place in the state is returned there), "workspace"
        (convolutions in micro-batches, so that they take less). By default all that are of use here:
        "offload" and "workspace" on a GPU with measured times (`profile`). "sub_batches": the batch
        runs in parts, one after another.
      host_budget: the most pinned host memory that the step may take: bytes or `"64GiB"`.
      transport: the way that bytes are moved: "ffi" (the native extension, with an arena and
        counters), "memory_kinds" (XLA's own copies; on a CPU they are none), or "auto": the
        extension where it was built for the device, else XLA's own copies on a GPU.
      plan: a plan made before, for exactly this step; nothing is planned then.
      donate_argnums, donate_argnames, static_argnums, static_argnames, compiler_options: as in
        `jax.jit`.
      batch_argnums, batch_argnames: the arguments that hold the batch, along the first dimensions of
        their arrays. By default those that are neither donated nor returned and whose first
        dimensions agree.
      sub_batches: in how many parts the batch runs, one after another; 1 for as a whole. By default
        as many as are predicted to be fastest within the budget (policy "auto").
      machine: what to reckon time with (default: the device's, from its name, and what
        `vmem-jax profile` or `profile=True` measured on it before).
      profile: `True` times the distinct steps on the device on the first call, as far as that was
        not done before: up to 90 s; on a GPU with our extension also what cuDNN has for the step's
        convolutions, up to 90 s more. `False` ignores what was measured, too. By default nothing is
        timed, and what was is used.
      tune: time some of the first calls for each set of shapes, which makes those wait for their
        results. Where that differs from the prediction by more than 5 %, plan once more from the
        measurement, compile, time that too, and keep the faster. Without it no call waits.

    Returns:
      A `BudgetedStep`, called like `fun`.

    Raises:
      ValueError, TypeError: an argument makes no sense.
      BudgetError: on the first call, if no plan fits. Nothing over the budget is ever run.
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
    chosen, allowed, asked = policy_of(policy, allow)
    return BudgetedStep(
        fun,
        arguments.signature(
            getattr(fun, "__wrapped__", fun) if _is_jitted(fun) else fun,
            static_argnums,
            static_argnames,
            donate_argnums,
            donate_argnames,
            batch_argnums,
            batch_argnames,
        ),
        None if budget is None else parse_budget(budget),
        chosen,
        allowed,
        asked,
        plan,
        host_nbytes(host_budget),
        transport_of(transport),
        dict(compiler_options or {}),
        machine,
        profile,
        tune,
        sub_batches_of(sub_batches, chosen),
    )


def _config() -> Hashable:
    """What of JAX's configuration a traced step depends on."""
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

    def __init__(
        self,
        fun: Callable,
        sig: arguments.Signature,
        budget: int | float | str | None,
        policy: AbstractPolicy,
        allowed: tuple[str, ...],
        asked: tuple[str, ...],
        plan: Plan | None,
        host_budget: int | None,
        transport: str,
        compiler_options: dict[str, Any],
        machine: Machine | None,
        profile: bool | None,
        tune: bool,
        sub_batches: int | None,
    ) -> None:
        functools.update_wrapper(self, fun)
        self._sig = sig
        self._budget = budget
        self._policy = policy
        self._allowed, self._asked = allowed, asked
        self._plan = plan
        self._host_budget = host_budget
        self._transport = transport
        self._compile_jaxpr = functools.partial(
            compile_jaxpr, name=self._name, sig=sig, options=compiler_options
        )
        self._machine = machine
        self._profile = profile
        self._tune = tune
        self._sub_batches = sub_batches
        self._may_split = isinstance(policy, Auto) and "sub_batches" in policy.allow
        self._entries: dict[Hashable, Entry] = {}
        self._last: tuple[Hashable, Any] | None = None  # (configuration, compiled) of plain calls

    # -- the public face

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._last is not None and self._last[0] == _config():
            # The usual call, of nothing but arrays: the compiled step checks their tree, shapes and
            # shardings itself, faster than we could, and refuses before anything runs.
            try:
                return self._last[1](*args, **kwargs)
            except (TypeError, ValueError):
                pass  # other shapes or tracers: the long way knows them, or says what is wrong
        return self._call(args, kwargs)

    def _call(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        call = arguments.prepare(self._sig, args, kwargs)
        leaves, tree = jax.tree.flatten(call.tree)
        tracers = [x for x in leaves if compat.is_tracer(x)]
        if any(not compat.is_jit_tracer(x) for x in tracers):
            raise DifferentiationError(
                f"`{self._name}` is a budgeted step: it is not differentiable and cannot be "
                "batched, since its memory was planned as it stands. Put `grad`, `jvp` or `vmap` "
                "inside: budget the whole training step, `vmem_jax.jit(lambda *a: "
                "jax.grad(f)(*a), budget=...)`."
            )
        if any(hosted.is_hosted_tracer(x) for x in tracers):
            raise ValueError(
                f"`{self._name}` cannot stream arguments in host memory inside another jit, which "
                "would own them. Call it outside, or hand it `jax.device_put(x, "
                "jax.memory.Space.Device)`."
            )
        entry = self._entry(call, leaves, tree, inlined=bool(tracers))
        traced = entry.traced
        if tracers:  # the rewritten equations go into the outer jit, whose compiler does the rest
            best = entry.best
            outs = jaxpr_as_fun(rewrite(traced.captured, best.plan, best.transport))(*leaves)
            return call.finish(jax.tree.unflatten(traced.out_tree, outs), traced.aux)
        arguments.check_donation(traced.names, leaves, traced.donated)
        run = entry.tuner or entry.best.compiled
        if traced.whole is None:
            outs = run(*leaves)
            return call.finish(jax.tree.unflatten(traced.out_tree, outs), traced.aux)
        out = run(*args, **kwargs)
        if entry.tuner is None:
            self._last = (_config(), run)
        return out

    def plan(self, *args: Any, target: str | None = None, **kwargs: Any) -> Plan:
        """The plan for these arguments (arrays, or `jax.ShapeDtypeStruct`s), compiled and proved.

        Args:
          target: a card that is not there, "h200": plan for it and prove it with XLA:GPU's own
            compiler, on any machine with `vmem_jax[gpu-compile]`.
        """
        return self._entry_for(args, kwargs, target).best.plan

    def explain(self, *args: Any, target: str | None = None, **kwargs: Any) -> Explanation:
        """What was decided and what it costs, for people: print it. Compiles plain jit to compare."""
        entry = self._entry_for(args, kwargs, target)
        plain = entry.plain_need
        if plain is None:
            plain = need_nbytes(self._compile_plain(entry.traced, target))
        return explain(
            entry.traced.captured.program,
            entry.costs,
            entry.best.plan,
            budget=entry.budget,
            plain_need=plain,
            compiled_need=entry.best.need,
            compiles=len(entry.attempts),
            tuning=entry.tuning,
            unsplit=entry.unsplit,
        )

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """As `jax.jit(fun).lower(*args)`; `.compile()` gives the planned and proved step."""
        return Lowered(self, args, kwargs)

    def clear_cache(self) -> None:
        """Forgets every plan and compiled step."""
        self._entries.clear()
        self._last = None

    @property
    def _name(self) -> str:
        return getattr(self, "__name__", type(self).__name__)

    # -- trace, plan, prove

    def _entry_for(self, args: tuple, kwargs: dict, target: str | None) -> Entry:
        call = arguments.prepare(self._sig, args, kwargs)
        leaves, tree = jax.tree.flatten(call.tree)
        return self._entry(call, leaves, tree, target)

    def _entry(
        self,
        call: arguments.Call,
        leaves: list[Any],
        tree: Any,
        target: str | None = None,
        inlined: bool = False,
    ) -> Entry:
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
            traced = self._trace(call, avals, tree)
            hosted.check(
                self._name,
                traced.names,
                avals,
                traced.donated,
                traced.hosted,
                allowed="stream" in self._allowed,
            )
            entry = self._make(traced, target, inlined)
            if self._tune and target is None and not inlined:
                transport = entry.transport
                compile_plan = lambda plan: self._compile(traced, plan, None, transport)
                settle = functools.partial(self._entries.__setitem__, key)
                entry = tuned(self._name, entry, compile_plan, self._host_budget, settle)
            self._entries[key] = entry
        return entry

    def _trace(self, call: arguments.Call, avals: tuple, tree: Any) -> Traced:
        paths = [p for p, _ in jax.tree_util.tree_flatten_with_path(call.tree)[0]]
        donated = tuple(call.donated(path) for path in paths)
        names = tuple(arguments.leaf_names(self._sig, call.tree))
        found: dict[str, Any] = {}

        def flat(*leaves: Any) -> Any:
            out, found["aux"] = call.fun(jax.tree.unflatten(tree, leaves))
            outs, found["tree"] = jax.tree.flatten(out)
            found["paths"] = [p for p, _ in jax.tree_util.tree_flatten_with_path(out)[0]]
            return outs

        plain = jax.jit(flat).trace(*map(hosted.on_device, avals)).jaxpr
        out_avals = [v.aval for v in compat.open_jaxpr(plain).outvars]
        pairs = hosted.pairs(avals, [p[2:] for p in paths], out_avals, found["paths"])
        captured = capture(plain, names, donated, [a.sharding for a in avals], pairs)
        whole = None
        if call.plain and not pairs:  # the same leaves in the same order, as the caller holds them
            by_place, by_name = call.tree
            whole = jax.tree.structure((tuple(by_place.values()), by_name))
        batch = batch_arguments(self._sig, paths, names, avals, donated, out_avals)
        return Traced(
            plain, captured, avals, donated, names, found["tree"], found["aux"], whole, pairs, batch
        )

    def _make(self, traced: Traced, target: str | None, inlined: bool) -> Entry:
        asked = "offload" in self._asked or (
            self._plan is not None and parks(traced.captured.program, self._plan)
        )
        costs = self._costs(traced, target)
        transport, still = self._choose_transport(traced, costs, target, inlined, asked)
        if still and asked:
            raise ValueError(f"`{self._name}` cannot offload: {still}.")
        if still:
            logging.info("%s: nothing is offloaded: %s", self._name, still)
        given = self._sub_batches if self._plan is None else self._plan.sub_batches
        split = splits(self._name, traced, 1 if given is None and not self._may_split else given)

        @functools.cache
        def member(count: int) -> tuple[Traced, Member]:
            own = split.into(count)
            means = costs if count == 1 else part_costs(own, traced, costs, self._machine, target)
            if still and not own.hosted:
                means = dataclasses.replace(means, link=None)
            own = own.moved_by(transport)
            program, policy = own.captured.program, self._policy
            if own.hosted and means.link is not None:
                policy = Streaming(policy, means.link, moves=not still and count == 1)
            compile_plan = lambda plan: self._compile(own, plan, target, transport)
            one = Member(program, policy, means, compile_plan)
            convolves = any(step.convolution for step in program.steps)
            if self._plan is not None or not (convolves or "workspace" in self._asked):
                return own, one
            # of a part of the batch no convolution is timed, but those known are used
            profile = self._profile if count == 1 or not self._profile else None
            device = devices_of(own.avals)[0]
            wanted = self._allowed, self._asked
            means = with_choices(self._name, program, means, device, target, profile, *wanted)
            learn = learner(program, device, target, self._profile)
            if not self._policy.chooses_convolutions:
                policy = Convolving(policy)
            return own, Member(program, policy, means, compile_plan, learn)

        member(split.counts[0])  # what cannot be is said before anything is compiled
        budget, plain_need = self._budget_nbytes(traced, target)
        if self._plan is not None:
            count = self._plan.sub_batches
            traced, one = member(count)
            self._plan.check_made_for(one.program)
            compiled = one.compile_plan(self._plan)
            attempt = Attempt(self._plan, compiled, need_nbytes(compiled), one.costs)
            limit = budget if budget is not None else self._plan.budget
            if limit is not None and attempt.need > limit:
                raise PlanError(
                    f"the given plan compiles to {show_nbytes(attempt.need)} here, over its budget "
                    f"of {show_nbytes(limit)}. Plan again for this machine."
                )
            return Entry(traced, limit, plain_need, one.costs, (attempt,), transport, one.policy)
        try:
            of = lambda count: member(count)[1]
            count, attempts = prove_fastest(of, split.counts, budget, plain_need)
        except BudgetError as error:
            if split.why:
                error.adding(f"Its batch cannot run in parts: {split.why}.")
            raise
        best, (traced, one) = attempts[-1], member(count)
        need, compiles = show_nbytes(best.need), len(attempts)
        logging.info("%s: %s needs %s, after %d compiles", self._name, best.plan, need, compiles)
        made = (traced, budget, plain_need, best.costs, attempts, transport, one.policy)
        return Entry(*made, unsplit=split.why)

    def _choose_transport(
        self, traced: Traced, costs: Costs, target: str | None, inlined: bool, asked: bool
    ) -> tuple[str, str]:
        """(transport, ""), or ("", why the step cannot move anything, or does better without)."""
        devices = devices_of(traced.avals)
        platform = "gpu" if target is not None else devices[0].platform
        if not asked and platform == "cpu":
            return "", "a CPU's memory is the host's own (`allow` can name it all the same)"
        if not asked and not costs.sources:
            return "", (
                "its times are a roofline's, which does not tell what hides under them: measure "
                "them with `profile=True` or `vmem-jax profile`, or let `allow` name it"
            )
        return choose(self._transport, platform, devices, traced.captured.shards.mesh, inlined)

    def _costs(self, traced: Traced, target: str | None) -> Costs:
        if target is not None:
            machine = self._machine or MACHINES.get(target, MACHINES["h200"])
            return analytic(traced.captured.program, machine)
        device = devices_of(traced.avals)[0]
        return costs_of(traced.captured, device, machine=self._machine, profile=self._profile)

    def _budget_nbytes(self, traced: Traced, target: str | None) -> tuple[int | None, int | None]:
        """(budget in bytes, plain jit's need where that had to be compiled)."""
        if isinstance(self._budget, float):
            plain_need = need_nbytes(self._compile_plain(traced, target))
            return int(self._budget * plain_need), plain_need
        own = sum(b.nbytes for b in traced.captured.program.buffers[: len(traced.avals)])
        return limit_nbytes(self._budget, traced.avals, own, target), None

    def _compile_plain(self, traced: Traced, target: str | None) -> Any:
        return self._compile_jaxpr(traced, traced.plain, target)

    def _compile(self, traced: Traced, plan: Plan, target: str | None, transport: str) -> Any:
        if not plan.fenced:
            return self._compile_plain(traced, target)
        mover, captured = None, traced.captured
        if parks(captured.program, plan):
            layout = layout_of(captured.program, plan)
            mover = open_transport(transport, layout, self._host_budget, captured.shards.mesh)
        compiled = self._compile_jaxpr(traced, rewrite(captured, plan, mover), target, streams=True)
        if mover is None:
            return compiled
        return Moving(compiled, mover, [] if target else devices_of(traced.avals))


__all__ = ["MEANS", "BudgetError", "BudgetedStep", "Compiled", "Lowered", "jit"]
