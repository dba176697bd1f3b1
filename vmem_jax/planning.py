"""planning: a traced step, by what `jit` was told, planned, compiled and proved."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from absl import logging

from vmem_jax.arguments import Signature
from vmem_jax.compiling import compile_jaxpr
from vmem_jax.compressing import check_compression, ways_to_compress, with_compressed
from vmem_jax.conv.choices import learner, with_choices
from vmem_jax.conv.trials import try_ways
from vmem_jax.core.costs import MACHINES, Costs, Machine, analytic, machine_for
from vmem_jax.core.liveness import least_nbytes
from vmem_jax.core.plan import Plan
from vmem_jax.core.planned import predicted_need
from vmem_jax.entry import Entry, Traced
from vmem_jax.errors import BudgetError, LayersError, PlanError, show_nbytes
from vmem_jax.jax_compat import ClosedJaxpr
from vmem_jax.looping import loop_variants, with_kept
from vmem_jax.policy import AbstractPolicy
from vmem_jax.policy.base import Splitting
from vmem_jax.policy.convolving import Convolving
from vmem_jax.policy.exact import Exact
from vmem_jax.policy.streaming import Streaming
from vmem_jax.profile.measured import costs_of
from vmem_jax.prove.device import devices_of, limit_nbytes
from vmem_jax.prove.forms import Form, Proof, best_of
from vmem_jax.prove.placed import Placed, lowest_of, placed
from vmem_jax.prove.prove import Attempt, need_nbytes
from vmem_jax.prove.sub_batches import WORTH, Member
from vmem_jax.rewrite.compression import compressible, sites
from vmem_jax.rewrite.rewrite import rewrite
from vmem_jax.rewrite.transfers import layout_of, parks
from vmem_jax.splitting import Splits, part_costs, splits
from vmem_jax.transfer.choice import choose, open_transport
from vmem_jax.transfer.compression import Store
from vmem_jax.transfer.executable import Moving

_FREE = 1.01
"""Of the time of all steps: within this factor there is nothing to gain from compression."""

_NEAR = 1.25
"""Of a budget: a plan that is predicted to need no more is compiled where nothing else fits. That of
SuperNeurons for OverFeat(128) in strict float32 compiled to 17 % less than was predicted."""

_AS_PLACED = 1.03
"""Of a budget: a plan for loops that fits by what is live is compiled where XLA's heap is predicted
to take no more: that of a decoder of 1.1 billion weights compiled to 4 % less than was predicted."""

_VARIANTS = 3
"""Choices of what is compressed that are compiled, one after another, until one fits."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What `jit` was told, checked. Its arguments are explained there.

    Attributes:
      name: of the step.
      signature: its arguments: which are donated, static, the batch.
      allowed: all means that a plan may use.
      asked: those that are an error where they cannot be used.
    """

    name: str
    signature: Signature
    budget: int | float | str | None
    policy: AbstractPolicy
    allowed: tuple[str, ...]
    asked: tuple[str, ...]
    plan: Plan | None
    host_budget: int | None
    transport: str
    compiler_options: Mapping[str, Any]
    machine: Machine | None
    profile: bool | None
    sub_batches: int | None
    density: float | None

    @property
    def splitting(self) -> Splitting:
        """In how many sub-batches the step runs where `sub_batches` does not say."""
        return self.policy.splitting if "sub_batches" in self.allowed else Splitting.WHOLE


class Planning:
    """Plans one traced step for its devices, or for a card that is not there.

    Args:
      target: that card, by name.
      inlined: the step is called inside another jit.
    """

    def __init__(
        self, settings: Settings, traced: Traced, target: str | None = None, inlined: bool = False
    ) -> None:
        self._settings, self._traced = settings, traced
        self._target, self._inlined = target, inlined

    def entry(self, leaves: Sequence[Any]) -> Entry:
        """The step planned, compiled and proved.

        Args:
          leaves: its arguments, or their shapes; they are not kept.

        Raises:
          BudgetError: no plan fits.
          PlanError: the given one is for another step, or does not fit.
          ValueError: a means that was asked for cannot be used.
        """
        settings = self._settings
        if settings.plan is not None:
            return self._by_given(settings.plan)
        asked = settings.sub_batches
        if asked is None and settings.splitting is Splitting.WHOLE:
            asked = 1
        split = splits(settings.name, self._traced, asked)
        whole = {count: self._in(split, count) for count in split.counts[:1]}
        budget, plain_need = self._budget_nbytes()  # after what cannot be has been said
        uncompressed, others = "", list[_Made]()
        if "compress" in settings.asked and 1 in whole:
            (whole[1], *others), uncompressed = self._compressing(*whole[1], budget, leaves)
        own = self._forms(split, whole, others)
        loops = self._loops(budget)
        own = self._with_loops(own, loops, asked, budget)
        proof, lowest = best_of(own, budget, plain_need, (None, None))
        if proof is None and self._moves_at_last:
            logging.info("%s: no plan fits while nothing is moved", settings.name)
            moving = functools.partial(self._in, split, moves=True)
            at_last = [Form(moving, split.counts, settings.splitting)]
            at_last = self._with_loops(at_last, loops, asked, budget, moves=True)
            proof, lowest = best_of(at_last, budget, plain_need, (None, lowest))
        rivals = self._rivals(split, budget, proof) if proof else self._instead(split, budget)
        proof, lowest = best_of(rivals, budget, plain_need, (proof, lowest))
        if proof is None:
            assert lowest is not None, "what is not tried to the lowest is not the last"
            if split.why:
                lowest.adding(f"Its batch cannot run in parts: {split.why}.")
            raise lowest
        count, attempts = proof.count, proof.attempts
        best, (traced, one) = attempts[-1], proof.form.of(count)
        need, compiles = show_nbytes(best.need), len(attempts)
        logging.info("%s: %s needs %s, after %d compiles", settings.name, best.plan, need, compiles)
        if "compress" in settings.asked and not best.plan.compressed and not uncompressed:
            parts = "its batch runs in sub-batches, which do not compress"
            uncompressed = parts if count > 1 else "no plan with it fits when it is compiled"
        traced = dataclasses.replace(traced, plain=self._traced.plain)
        made = (traced, budget, plain_need, best.costs, attempts, one.policy)
        return Entry(*made, unsplit=split.why, uncompressed=uncompressed)

    def compile_plain(self) -> Any:
        """The step as plain jit compiles it, with all arguments on the device."""
        return self._compile_jaxpr(self._traced, self._traced.plain)

    def compile(self, traced: Traced, plan: Plan) -> Any:
        """`traced`, which is this step or the same in sub-batches, compiled by `plan`."""
        if not plan.fenced:
            return self.compile_plain()
        mover, store, captured = None, None, traced.captured
        if parks(captured.program, plan):
            layout, limit = layout_of(captured.program, plan), self._settings.host_budget
            mover = open_transport(self._transport, layout, limit, captured.shards.mesh)
        if captured.program.compressed:
            store = Store(sites(captured))
        jaxpr = rewrite(captured, plan, mover, 0 if store is None else store.id)
        compiled = self._compile_jaxpr(traced, jaxpr, streams=True)
        if mover is None and store is None:
            return compiled
        return Moving(compiled, mover, store, [] if self._target else devices_of(traced.avals))

    # -- what a plan is made from

    def _forms(
        self, split: Splits, first: dict[int, _Made], others: Sequence[_Made]
    ) -> list[Form[Traced]]:
        """The step in the forms that are proved one after another, until one fits.

        Args:
          first: what is made already.
          others: the whole batch with other choices of what waits compressed.
        """
        made, splitting = functools.partial(self._in, split), self._settings.splitting
        own = Form(made, split.counts, splitting, first, to_the_lowest=not self._moves_at_last)
        return [own, *(Form(made, (1,), splitting, {1: other}) for other in others)]

    def _loops(self, budget: int | None) -> tuple[Planning, ...]:
        """The step with other values stacked between its loops, where that may help."""
        settings = self._settings
        chooses = settings.policy.name == "auto" and "recompute" in settings.allowed
        if budget is None or not chooses or "compress" in settings.asked:
            return ()
        found = loop_variants(self._traced, self._machine, budget)
        return tuple(Planning(settings, v.traced, self._target, self._inlined) for v in found)

    @property
    def _machine(self) -> Machine:
        """What loops are planned for: the settings' machine, or that of the device by its name."""
        name = self._target or devices_of(self._traced.avals)[0].device_kind
        return self._settings.machine or machine_for(name)

    def _with_loops(
        self,
        own: list[Form[Traced]],
        loops: Sequence[Planning],
        asked: int | None,
        budget: int | None,
        moves: bool | None = None,
    ) -> list[Form[Traced]]:
        """Of `own` and the same for each of `loops` those that are predicted to fit, the fastest
        first; where none is, the one that is predicted to need the least."""
        settings, forms, nearly = self._settings, [*own], list[Form[Traced]]()
        for other in loops:
            split = splits(settings.name, other._traced, asked)
            made = functools.partial(other._in, split, moves=moves)
            form = Form(made, split.counts, settings.splitting)
            forms.append(dataclasses.replace(form, to_the_lowest=own[0].to_the_lowest))
            # XLA's heap may take a little less than predicted: then nothing else is recomputed
            alone = functools.partial(other._in, split, policy=Exact(), moves=moves)
            exact = Form(alone, (1,), settings.splitting, to_the_lowest=False)
            first = self._plans(exact, 1, budget, moves=False) if 1 in split.counts else None
            if first and not first.fits(budget) and first.fits(int(_AS_PLACED * (budget or 0))):
                exact.seconds = first.plan.predicted_seconds
                nearly.append(exact)
        if not loops:
            return own
        found = [[self._plans(f, c, budget, moves=False) for c in f.counts] for f in forms]
        if all(math.isinf(form.seconds) for form in forms):
            lowest = [min((p.need for p in plans if p), default=math.inf) for plans in found]
            forms = [dataclasses.replace(forms[lowest.index(min(lowest))], seconds=1e9)]
        forms = [form for form in (*nearly, *forms) if form.seconds < math.inf]
        return sorted(forms, key=lambda form: form.seconds)

    def _instead(self, split: Splits, budget: int | None) -> list[Form[Traced]]:
        """The step with each policy that the settings' one has instead of itself, as that would run
        by itself, and with a plan for `budget` or nearly; the fastest first."""
        forms = [f for f in self._others(split) if any(self._plans(f, c, budget) for c in f.counts)]
        return sorted(forms, key=lambda form: form.seconds)

    def _rivals(
        self, split: Splits, budget: int | None, proof: Proof[Traced]
    ) -> list[Form[Traced]]:
        """The same policies, in numbers of sub-batches of which it is predicted that they fit and are
        enough faster than `proof`; the fastest first."""
        settings, found = self._settings, list[Form[Traced]]()
        searched = not settings.policy.spared(self._traced.captured.program)
        if (
            self._still
            or "compress" in settings.asked
            or not (searched and settings.policy.instead)
        ):
            return []
        own, enough = proof.form.member, WORTH * proof.seconds
        # in more sub-batches it takes longer
        some = itertools.takewhile(lambda c: own(c).least_seconds() < enough, split.counts)
        open_ = [count for count in some if own(count).least_seconds(budget) < enough]
        for form in self._others(split):
            counts = []
            for count in (c for c in open_ if c in form.counts):
                if own(count).least_seconds() >= form.seconds:
                    break
                first = self._plans(form, count, budget)
                if first and first.fits(budget):
                    counts.append(count)
            if counts and form.seconds < enough:
                found.append(dataclasses.replace(form, counts=counts, splitting=Splitting.FASTEST))
        return sorted(found, key=lambda form: form.seconds)

    def _others(self, split: Splits) -> Iterator[Form[Traced]]:
        for policy in self._settings.policy.instead:
            made = functools.partial(self._in, split, policy=policy, moves=bool(self._transport))
            whole = policy.splitting is Splitting.WHOLE
            counts = [count for count in split.counts if count == 1 or not whole]
            yield Form(made, counts, policy.splitting)

    def _plans(
        self, form: Form[Traced], count: int, budget: int | None, moves: bool = True
    ) -> Placed | None:
        """What `form` plans for `budget` in `count` sub-batches, or its lowest plan where that nearly
        fits, noted there; None where that is nothing.

        Args:
          moves: whether it is of no use where nothing can be moved.
        """
        one = form.member(count)
        near = math.inf if budget is None else _NEAR * budget
        if (moves and one.costs.link is None) or least_nbytes(one.program) > near:
            return None
        first: Placed | None
        try:
            first = placed(one.program, one.policy, one.costs, budget)
        except BudgetError as error:
            first = lowest_of(one.program, error)
            if first is None or first.need > near:
                return None
        except LayersError:  # without layers, or without a backward pass, it is nothing for them
            return None
        limit = self._settings.host_budget
        if limit is not None and layout_of(one.program, first.plan).nbytes > limit:
            return None
        form.note(count, first, first.fits(budget))
        return first

    def _in(self, split: Splits, count: int, **how: Any) -> _Made:
        """The step in `count` sub-batches, as `_member` has it."""
        return self._member(split.into(count), count, **how)

    def _member(
        self,
        own: Traced,
        count: int,
        policy: AbstractPolicy | None = None,
        moves: bool | None = None,
    ) -> _Made:
        """`own`, the step in `count` sub-batches, with what plans and compiles it.

        Args:
          policy: in place of the settings' one.
          moves: whether it may move anything, by default where that is of use (`_still`).
        """
        settings, target = self._settings, self._target
        moves = not self._still if moves is None else moves
        policy = chosen = policy or settings.policy
        means = self._costs
        if count > 1:
            means = part_costs(own, self._traced, means, settings.machine, target)
        # within a loop buffers move by our own calls alone, and not while anything hosted does
        if not (moves and (count == 1 or self._transport == "ffi")) and not own.hosted:
            means = dataclasses.replace(means, link=None)
        own = own.moved_by(self._transport if moves else "")
        program = own.captured.program
        if own.hosted and means.link is not None:
            policy = Streaming(policy, means.link, moves=moves and count == 1)
        one = Member(program, policy, means, lambda plan: self.compile(own, plan))
        convolves = any(step.convolution for step in program.steps)
        if settings.plan is not None or not (convolves or "workspace" in settings.asked):
            return own, one
        # of a part of the batch no convolution is timed, but those known are used
        profile = settings.profile if count == 1 or not settings.profile else None
        device = devices_of(own.avals)[0]
        wanted = settings.allowed, settings.asked
        whole = None if count == 1 else (self._traced.captured.program, self._costs)
        means = with_choices(settings.name, program, means, device, target, profile, *wanted, whole)
        learn = learner(program, device, target, settings.profile)
        if not chosen.chooses_convolutions:
            policy = Convolving(policy)
        return own, dataclasses.replace(one, policy=policy, costs=means, learn=learn)

    @functools.cached_property
    def _costs(self) -> Costs:
        settings, captured = self._settings, self._traced.captured
        if self._target is not None:
            machine = settings.machine or MACHINES.get(self._target, MACHINES["h200"])
            return analytic(captured.program, machine)
        device = devices_of(self._traced.avals)[0]
        return costs_of(captured, device, machine=settings.machine, profile=settings.profile)

    @property
    def _transport(self) -> str:
        """How buffers move; "" where they cannot."""
        return self._moving[0]

    @property
    def _still(self) -> str:
        """Why the step moves nothing; "" where it may."""
        return self._moving[1]

    @property
    def _moves_at_last(self) -> bool:
        """Whether it moves nothing as long as any plan fits without, and then may."""
        return bool(self._transport and self._still) and "offload" in self._settings.allowed

    @functools.cached_property
    def _moving(self) -> tuple[str, str]:
        """(transport, why nothing moves); either may be "". Raises ValueError if moving was asked
        for and there is no transport."""
        settings, captured = self._settings, self._traced.captured
        asked = "offload" in settings.asked or (
            settings.plan is not None and parks(captured.program, settings.plan)
        )
        transport, still = self._choose_transport(asked)
        if still and asked:
            raise ValueError(f"`{settings.name}` cannot offload: {still}.")
        if still:
            logging.info("%s: nothing is offloaded: %s", settings.name, still)
        return transport, still

    def _choose_transport(self, asked: bool) -> tuple[str, str]:
        """(transport, why the step cannot move anything or does better without); either may be ""."""
        devices = devices_of(self._traced.avals)
        platform = "gpu" if self._target is not None else devices[0].platform
        if not asked and platform == "cpu":
            return "", "a CPU's memory is the host's own (`allow` can name it all the same)"
        mesh = self._traced.captured.shards.mesh
        how, why = choose(self._settings.transport, platform, devices, mesh, self._inlined)
        if how and not asked and not self._costs.sources:
            why = (
                "its times are a roofline's, which does not tell what hides under them, so that is "
                "left for budgets that nothing else fits: measure them with `profile=True` or "
                "`vmem-jax profile`, or let `allow` name it"
            )
        return how, why

    def _budget_nbytes(self) -> tuple[int | None, int | None]:
        """(budget in bytes, plain jit's need where that had to be compiled)."""
        budget, traced = self._settings.budget, self._traced
        if isinstance(budget, float):
            plain_need = need_nbytes(self.compile_plain())
            return int(budget * plain_need), plain_need
        own = sum(b.nbytes for b in traced.captured.program.buffers[: len(traced.avals)])
        return limit_nbytes(budget, traced.avals, own, self._target), None

    def _by_given(self, plan: Plan) -> Entry:
        """The step by the user's own `plan`."""
        if plan.compressed:
            found = compressible(self._traced.captured, 0)
            if not {b for b, _ in plan.compressed} <= {*found}:
                plan.check_made_for(self._traced.captured.program)  # which it cannot be
            return self._with_compressed(plan.compressed)._by(plan)
        if plan.kept is not None:
            own = with_kept(self._traced, plan.kept, self._machine)
            if own is not None:
                entry = Planning(self._settings, own, self._target, self._inlined)._by(plan)
                traced = dataclasses.replace(entry.traced, plain=self._traced.plain)
                return dataclasses.replace(entry, traced=traced)
        return self._by(plan)

    def _by(self, plan: Plan) -> Entry:
        """The step by the user's own `plan`, with what that compresses."""
        split = splits(self._settings.name, self._traced, plan.sub_batches)
        traced, one = self._in(split, plan.sub_batches)
        budget, plain_need = self._budget_nbytes()
        plan.check_made_for(one.program)
        if self._target is None:
            try_ways(one.program, plan, devices_of(traced.avals)[0])
        compiled = one.compile_plan(plan)
        predicted = predicted_need(one.program, plan)
        attempt = Attempt(plan, compiled, need_nbytes(compiled), predicted, one.costs)
        limit = budget if budget is not None else plan.budget
        if limit is not None and attempt.need > limit:
            raise PlanError(
                f"the given plan compiles to {show_nbytes(attempt.need)} here, over its budget "
                f"of {show_nbytes(limit)}. Plan again for this machine."
            )
        return Entry(traced, limit, plain_need, one.costs, (attempt,), one.policy)

    # -- what waits compressed

    def _compressing(
        self, traced: Traced, one: Member, budget: int | None, leaves: Sequence[Any]
    ) -> tuple[list[_Made], str]:
        """`traced`, the whole batch, and what plans it, with what waits compressed, the best by
        prediction first; or why nothing does.

        Tried is what is moved without it, with what is then moved besides, and all that can be.
        """
        settings, always = self._settings, self._settings.policy.compresses
        how = leaves, settings.density
        check_compression(settings.name, self._traced, *how, self._target, self._inlined)
        best, plan = self._planned(traced, one, budget)
        if best.fits and not always and plan.predicted_seconds <= _FREE * sum(one.costs.seconds):
            return [(traced, best.member)], "it fits without, and is as fast as it can be"
        ways, why = ways_to_compress(self._traced, *how, budget)
        if not ways:
            return [(traced, best.member)], why
        found, some = best, frozenset[int]()
        variants = [] if always else [best]
        buffer_of = {v: b for b, v in enumerate(self._traced.captured.variables)}
        while True:
            variables = found.traced.captured.variables
            moved = {buffer_of.get(variables[t.buffer], -1) for t in plan.transfers}
            more = some | (moved & ways.keys())
            if more == some:
                break
            some = more
            found, plan = self._planned_with(some, ways, budget)
            variants.append(found)
        if some != ways.keys() and not always:
            variants.append(self._planned_with(ways.keys(), ways, budget)[0])
        variants = sorted(variants or [best], key=lambda variant: variant.rank)
        if not variants[0].member.program.compressed:
            why = "no plan is predicted to be better with it"
        return [(variant.traced, variant.member) for variant in variants[:_VARIANTS]], why

    def _planned_with(
        self, some: Collection[int], ways: Mapping[int, int], budget: int | None
    ) -> tuple[_Variant, Plan]:
        """The step with `some` of `ways` compressed, and its plan."""
        other = self._with_compressed([(b, ways[b]) for b in some])
        return self._planned(*other._member(other._traced, 1), budget)

    def _planned(self, traced: Traced, one: Member, budget: int | None) -> tuple[_Variant, Plan]:
        """`traced`, which `one` plans, with its plan; the lowest, if none is within `budget`."""
        try:
            first = placed(one.program, one.policy, one.costs, budget)
        except BudgetError as error:
            if not isinstance(error.lowest_plan, Plan):
                raise
            return _Variant(traced, one, (True, error.lowest_peak)), error.lowest_plan
        one, plan = dataclasses.replace(one, first=first), first.plan
        pinned = layout_of(one.program, plan).nbytes if plan.moves else 0
        rank: tuple[bool, float] = (False, plan.predicted_seconds)
        for need, limit in ((first.need, budget), (pinned, self._settings.host_budget)):
            if limit is not None and need > limit:
                rank = (True, need)
        return _Variant(traced, one, rank), plan

    def _with_compressed(self, ways: Sequence[tuple[int, int]]) -> Planning:
        """The same for the step with each buffer of `ways` compressed into so many bytes."""
        traced = with_compressed(self._traced, ways)
        return Planning(self._settings, traced, self._target, self._inlined)

    def _compile_jaxpr(self, traced: Traced, jaxpr: ClosedJaxpr, streams: bool = False) -> Any:
        settings = self._settings
        return compile_jaxpr(
            traced,
            jaxpr,
            self._target,
            name=settings.name,
            sig=settings.signature,
            options=settings.compiler_options,
            streams=streams,
        )


_Made = tuple[Traced, Member]
"""A step in one form, with what plans and compiles it."""


@dataclasses.dataclass(frozen=True)
class _Variant:
    """A step in one form, and how good its plan is predicted to be."""

    traced: Traced
    member: Member
    rank: tuple[bool, float]  # whether it does not fit, and then its bytes, else its seconds

    @property
    def fits(self) -> bool:
        return not self.rank[0]
