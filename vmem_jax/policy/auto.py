"""auto: the fastest plan whose peak is within the budget at every step.

A greedy search on the exact simulation: while the peak is over the budget, it drops the values that
lie idle across the peak and take the fewest seconds per byte to recompute, given what is dropped
already. Dropped neighbours come back together, so they may hold no more than a share of the free
memory; several shares are tried. What is still over the budget is left to the executor's limit
(policy `recompute`). The usual checkpoint policies (`standard`) are starts as well, so no plan is
slower than the best of them whose peak is within the budget. At the end each dropped value is offered
back, the most expensive first. If few values can be dropped, every choice is tried instead.

If values can be moved, the same search runs again after moving what is hidden by compute
(`offload_choice`), and once after moving everything, for budgets that nothing else meets. A
mixed-integer program gives further plans and a lower bound (`bound`): the search ends when the bound
is reached, and skips plans that move if none can be enough faster.

All of this is repeated with more and more stacks looped (`core.looped`), those first whose copies are
hidden by their loops; `simulate` decides. If no plan is within the budget, `lowest` finds the minimum
peak. If no plan fits when compiled, or the bound leaves room, the search asks the systems of the
papers (`instead`).

Each try simulates the whole step, so its time grows with the depth. For programs of more than `most`
steps the search skips the tries after a start that is near its bound, and offers fewer values back,
since one of many gains little.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar

from vmem_jax.core.costs import Costs, Link
from vmem_jax.core.liveness import least_nbytes
from vmem_jax.core.looped import costs_with_looped, stacks, with_looped
from vmem_jax.core.plan import Plan, Transfer
from vmem_jax.core.program import Program
from vmem_jax.core.simulate import Timeline, live_at, simulate
from vmem_jax.policy.base import AbstractPolicy, Infeasible, Splitting, finish
from vmem_jax.policy.beside import beside
from vmem_jax.policy.bound import quick_bound, starts
from vmem_jax.policy.drop_order import order_with_drops
from vmem_jax.policy.executor import Execution
from vmem_jax.policy.min_peak import lowest
from vmem_jax.policy.modnn import MoDNN
from vmem_jax.policy.offload_choice import candidates, hidden, without_idle_moves
from vmem_jax.policy.option_checks import check_flag, check_number, check_numbers
from vmem_jax.policy.order import canonical_order, lower_order
from vmem_jax.policy.params import PARAMS
from vmem_jax.policy.recomputation import Drop, Recomputation
from vmem_jax.policy.recompute_chains import Stretches
from vmem_jax.policy.standard import standard_choices
from vmem_jax.policy.superneurons import SuperNeurons
from vmem_jax.policy.transfer_schedule import rank, schedule_transfers
from vmem_jax.policy.vdnn import VDNN
from vmem_jax.policy.vdnnpp import VDNNpp


@dataclasses.dataclass(frozen=True)
class Auto(AbstractPolicy):
    """Chooses among all techniques that `allow` names.

    Attributes:
      allow: techniques: "order" (exact residuals, always), "recompute", "offload" (to host memory),
        "sub_batches".
      shares: how much dropped neighbours may hold together, as shares of the free memory.
      offers: how often dropped values are offered back.
      exhaustive: if at most so many values can be dropped, every choice is tried.
      parts: how much to move, as shares of what is hidden by compute.
      least_move: values below this share of all temporaries are neither moved nor looped.
      close: a plan within this factor of the bound without transfers ends the search for such plans.
      gain: a plan that moves must be faster by this share than one that does not, if both fit:
        predictions are off by as much (docs/benchmarks.md).
      most: programs of more steps are searched in part.
      cache: whether what the budget leaves is the tensor cache of a plan that moves values.

    Raises:
      TypeError, ValueError: an option is of another type, or out of range.
    """

    name: ClassVar[str] = "auto"
    allow: tuple[str, ...] = ("order", "recompute", "offload")
    shares: tuple[float, ...] = (0.08, 0.2, 0.4, 1.0)
    offers: int = 48
    exhaustive: int = 8
    parts: tuple[float, ...] = (0.5, 1.0)
    least_move: float = 1 / 500
    close: float = 1.001
    gain: float = 0.02
    most: int = 20_000
    cache: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.allow, tuple) or not all(isinstance(a, str) for a in self.allow):
            raise TypeError(f"`allow` must be a tuple of names of techniques. Got {self.allow!r}.")
        check_numbers("shares", self.shares, 0.0)
        check_numbers("parts", self.parts, 0.0, 1.0)
        for name, least in (("offers", 0), ("exhaustive", 0), ("most", 1)):
            check_number(name, getattr(self, name), least)
        check_number("least_move", self.least_move, 0.0, 1.0)
        check_number("close", self.close, 0.0)  # below 1 nothing ends it
        check_number("gain", self.gain, 0.0)
        check_flag("cache", self.cache)

    @property
    def caches(self) -> bool:
        return self.cache

    @property
    def splitting(self) -> Splitting:
        return Splitting.FASTEST if "sub_batches" in self.allow else Splitting.WHOLE

    @property
    def instead(self) -> tuple[AbstractPolicy, ...]:
        """Systems that move nearly everything. For many equal layers they reach lower peaks than
        recomputation, and take several times as long."""
        both = {"recompute", "offload"} <= {*self.allow}
        return (SuperNeurons(), MoDNN(), VDNN(), VDNNpp()) if both else ()

    def lower_bound_seconds(self, program: Program, costs: Costs, budget: int | None) -> float:
        moves = "offload" in self.allow and costs.link is not None
        if budget is None or (moves and stacks(program)):  # looped, it needs less memory
            return super().lower_bound_seconds(program, costs, budget)
        allowed = costs if moves else dataclasses.replace(costs, link=None)
        canonical = canonical_order(program)
        orders = {canonical, lower_order(program, costs, canonical)}
        return min(quick_bound(program, allowed, order, budget) for order in orders)

    def plan(self, program: Program, costs: Costs, budget: int | None) -> Plan | Infeasible:
        best = self._timeline(program, costs, budget)
        looped: tuple[int, ...] = ()
        if budget is not None and "offload" in self.allow and costs.link is not None:
            for some in _loopings(program, costs, budget, self.least_move):
                found = self._timeline(*_looped(program, costs, some), budget)
                if self._is_worth_moving(found, best, budget):
                    best, looped = found, some
        if budget is not None and best.peak > budget:
            for timeline in self._lowest(*_looped(program, costs, looped)):
                best = _better(best, timeline, budget)
        if looped:
            return finish(self.name, program, best, budget, looped=looped)
        return finish(self.name, program, beside(program, costs, best), budget)

    def spared(self, program: Program) -> str:
        if len(program.steps) <= self.most:
            return ""
        return (
            f"the search was a part of that for up to {self.most:,} steps, since there are "
            f"{len(program.steps):,}: none behind a start within {self.close - 1:.1%} of its bound, "
            f"and {self._offers(program)} dropped values offered back in place of {self.offers} "
            "(`Auto(most=…)` sets it)"
        )

    def _offers(self, program: Program) -> int:
        """How often values are offered back: `offers`, and less often beyond `most` steps."""
        return self.offers * self.most // max(len(program.steps), self.most)

    def _timeline(self, program: Program, costs: Costs, budget: int | None) -> Timeline:
        """The best timeline for a choice of looped stacks."""
        canonical = canonical_order(program)
        base = lower_order(program, costs, canonical)
        best = simulate(program, base, costs)
        if budget is None or best.peak <= budget or least_nbytes(program) > budget:
            return best
        recomputation = Recomputation(program, base)
        attempt = lambda parks, share: self._attempt(recomputation, costs, budget, parks, share)
        begun = lambda costs, start: _under_limit(
            recomputation, costs, start.drops, budget, start.parks
        )
        shares: Sequence[float] = self.shares
        if "recompute" in self.allow:
            best = _better(best, _under_limit(recomputation, costs, (), budget), budget)
            for order in dict.fromkeys((base, canonical)):
                of_order = recomputation if order == base else Recomputation(program, order)
                if len(of_order.idle()) <= self.exhaustive:
                    for timeline in _every_choice(of_order, costs):
                        best = _better(best, timeline, budget)
            linkless = dataclasses.replace(costs, link=None)
            proven = False
            for start in starts(recomputation, linkless, budget):
                best = _better(best, begun(linkless, start), budget)
                fits = best.peak <= budget
                proven = proven or (fits and best.seconds <= self.close * start.lower_bound_seconds)
                if proven and self.spared(program):
                    break
            if not proven:
                for choice in standard_choices(recomputation):
                    order = order_with_drops(recomputation, choice.drops)
                    least = sum(map(costs.seconds.__getitem__, order))  # a limit makes it no faster
                    if best.peak <= budget and least >= best.seconds:
                        continue
                    if simulate(program, order, costs).peak <= PARAMS.standard_near * budget:
                        usual = _under_limit(recomputation, linkless, choice.drops, budget)
                        best = _better(best, usual, budget)
                found = {share: attempt((), share) for share in shares}
                shares = sorted(shares, key=lambda share: rank(found[share], budget))
                best = _better(best, found[shares[0]], budget)
        if "offload" in self.allow and costs.link is not None:
            still = best
            if still.peak <= budget and not self._may_gain(recomputation, costs, budget, still):
                return still
            every = candidates(recomputation, costs, self.least_move)
            unseen = hidden(recomputation, costs, every)
            counts = {round(len(unseen) * part) for part in self.parts} - {0}
            for parks in [unseen[:count] for count in sorted(counts)]:
                for share in shares[:2]:
                    best = _better(best, attempt(parks, share), budget)
            if "recompute" in self.allow:
                for start in starts(recomputation, costs, budget):
                    best = _better(best, begun(costs, start), budget)
            best = _better(best, _moved(recomputation, costs, budget, every), budget)
            if best.peak > budget and "recompute" not in self.allow:  # then also what makes it wait
                every = candidates(recomputation, costs, self.least_move, waiting=True)
                best = _better(best, _moved(recomputation, costs, budget, every), budget)
            if best.transfers and not self._is_worth_moving(best, still, budget):
                best = still
        return best

    def _lowest(self, program: Program, costs: Costs) -> Iterator[Timeline]:
        """The lowest peaks, by recomputation alone and with everything moved that may be."""
        recomputation = Recomputation(
            program, lower_order(program, costs, canonical_order(program))
        )
        keeps, recomputes = simulate(program, recomputation.base, costs), "recompute" in self.allow
        if recomputes:
            yield lowest(program, keeps, lambda n: _under_limit(recomputation, costs, (), n))
        if "offload" in self.allow and costs.link is not None:
            every = candidates(recomputation, costs, self.least_move, waiting=not recomputes)
            limited = lambda n: _under_limit(recomputation, costs, (), n, every)
            moved = lambda n: _moved(recomputation, costs, n, every)
            yield lowest(program, keeps, limited if recomputes else moved)

    def _may_gain(
        self, recomputation: Recomputation, costs: Costs, budget: int, still: Timeline
    ) -> bool:
        """Whether a plan that moves may be faster than `still` by `gain`."""
        bound = quick_bound(recomputation.program, costs, recomputation.base, budget)
        return bound < (1 - self.gain) * still.seconds

    def _is_worth_moving(self, moving: Timeline, still: Timeline, budget: int) -> bool:
        """Whether `moving` is better than `still` by more than predictions are off."""
        if still.peak > budget:
            return rank(moving, budget) < rank(still, budget)
        return moving.peak <= budget and moving.seconds < (1 - self.gain) * still.seconds

    def _attempt(
        self,
        recomputation: Recomputation,
        costs: Costs,
        budget: int,
        parks: Sequence[Drop],
        share: float,
    ) -> Timeline:
        """The greedy search after moving `parks`, with their transfers scheduled."""
        search = _Search(recomputation, costs, budget, share, parks)
        limited: tuple[Timeline, ...] = ()
        if "recompute" in self.allow:
            search.run()
            if search.timeline.peak <= budget:
                offers = self._offers(recomputation.program)
                search.offer_back(offers // 4 if parks else offers)
            else:
                limited = (_under_limit(recomputation, costs, search.drops, budget, parks),)
        found = search.timeline
        if parks:
            found = _moved(recomputation, costs, budget, parks, search.drops)
        return min((found, *limited), key=lambda timeline: rank(timeline, budget))


def _moved(
    recomputation: Recomputation,
    costs: Costs,
    budget: int,
    parks: Sequence[Drop],
    drops: Collection[Drop] = (),
) -> Timeline:
    """`parks` moved and `drops` recomputed, without the moves that `budget` does not require."""
    program = recomputation.program
    run = Execution(
        program, costs, recomputation.base, drops, recomputation=recomputation, parks=parks
    )
    timeline = schedule_transfers(program, run.order, run.away, costs, budget)
    return without_idle_moves(program, timeline, costs, budget)


def _loopings(
    program: Program, costs: Costs, budget: int, share: float
) -> Iterator[tuple[int, ...]]:
    """The choices of stacks to loop: more and more of them, those hidden by their loops first; the
    first few that are within `budget` and all of them also without what need not move."""
    nbytes = [
        0 if held else b.nbytes
        for held, b in zip(program.is_resident, program.buffers, strict=True)
    ]
    large = [b for b in stacks(program) if nbytes[b] >= share * sum(nbytes)]
    every = sorted(large, key=lambda b: (-nbytes[b], b))
    hidden: tuple[int, ...] = ()
    for b in every:
        if costs_with_looped(program, (*hidden, b), costs).seconds == costs.seconds:
            hidden = (*hidden, b)
    ranked = (*hidden, *(b for b in every if b not in hidden))
    counts = {
        math.ceil(len(ranked) * n / PARAMS.loopings) for n in range(1, PARAMS.loopings + 1)
    } - {0}
    choices = [ranked[:count] for count in sorted(counts)]
    yield from choices
    enough = (some for some in choices if _moving(program, costs, some).peak <= budget)
    first = next(enough, None)
    for some in () if first is None else dict.fromkeys((first, ranked)):
        if (fewer := _needed(program, costs, budget, some)) not in choices:
            yield fewer


def _needed(program: Program, costs: Costs, budget: int, some: tuple[int, ...]) -> tuple[int, ...]:
    """The stacks `some`, within `budget`, without those that take time and that it is met without:
    the largest first."""
    taken = _moving(program, costs, some).seconds
    for b in sorted(some, key=lambda b: -program.buffers[b].nbytes):
        fewer = tuple(other for other in some if other != b)
        found = _moving(program, costs, fewer)
        if found.peak <= budget and found.seconds < taken:
            some, taken = fewer, found.seconds
    return some


def _moving(program: Program, costs: Costs, some: Collection[int]) -> Timeline:
    """`program` where nothing moves but the stacks `some`."""
    less, slower = _looped(program, costs, some)
    return simulate(less, lower_order(less, slower), slower)


def _looped(program: Program, costs: Costs, some: Collection[int]) -> tuple[Program, Costs]:
    return with_looped(program, some), costs_with_looped(program, some, costs)


def _every_choice(recomputation: Recomputation, costs: Costs) -> Iterator[Timeline]:
    program, idle = recomputation.program, recomputation.idle()
    for kept in itertools.product((True, False), repeat=len(idle)):
        drops = {drop for drop, keeps in zip(idle, kept, strict=True) if not keeps}
        yield simulate(program, order_with_drops(recomputation, drops), costs)


def _under_limit(
    recomputation: Recomputation,
    costs: Costs,
    drops: Collection[Drop],
    limit: int,
    parks: Collection[Drop] = (),
) -> Timeline:
    """The base under the executor's limit, with the transfers of what is parked scheduled."""
    program = recomputation.program
    run = Execution(program, costs, recomputation.base, drops, limit, recomputation, parks)
    timeline = schedule_transfers(program, run.order, run.away, costs, limit)
    return without_idle_moves(program, timeline, costs, limit)


def _better(a: Timeline, b: Timeline, budget: int) -> Timeline:
    """The faster of two timelines that fit, else the one with the lower peak."""
    return min(a, b, key=lambda t: rank(t, budget))


class _Search:
    """The greedy search for one share."""

    def __init__(
        self,
        recomputation: Recomputation,
        costs: Costs,
        budget: int,
        share: float,
        parks: Sequence[Drop] = (),
    ) -> None:
        self.program, self.base, self.budget = recomputation.program, recomputation.base, budget
        # here a link takes no time: what is parked was chosen to hide, and is scheduled afterwards
        self.costs = dataclasses.replace(costs, link=Link(1e18, 1e18, 2e18))
        self.parks = frozenset(parks)
        self.stretch = share * max(budget - self.program.resident_nbytes, 0)
        self.drops: set[Drop] = set()
        self.recomputation, self.uses = recomputation, recomputation.uses
        crosses = [bool(uses) and self._crosses(uses) for uses in self.uses]
        self.stretches = Stretches(self.program, crosses)
        self.timeline = simulate(self.program, self.base, costs)
        if self.parks:
            self._execute()

    def run(self) -> Timeline:
        """Drops values until the peak is within the budget, or none lies idle across it."""
        while self.timeline.peak > self.budget:
            excess = self.timeline.peak - self.budget
            chosen = self._choose(excess)
            if not chosen:
                break
            self.drops |= chosen
            self._execute()
        return self.timeline

    def offer_back(self, times: int) -> Timeline:
        """Keeps dropped values that fit after all, the most expensive first."""
        for drop in sorted(self.drops, key=lambda d: (-self._seconds(d), d))[:times]:
            before = self.timeline
            self.drops.discard(drop)
            self._execute()
            if self.timeline.peak > self.budget or self.timeline.seconds >= before.seconds:
                self.drops.add(drop)
                self.timeline = before
        return self.timeline

    def _execute(self) -> None:
        if not self.parks:
            order = order_with_drops(self.recomputation, self.drops)
            self.timeline = simulate(self.program, order, self.costs)
            return
        run = Execution(
            self.program,
            self.costs,
            self.base,
            self.drops,
            recomputation=self.recomputation,
            parks=self.parks,
        )
        moves = [Transfer(a.buffer, a.since, a.since, a.until, a.until) for a in run.away]
        self.timeline = simulate(self.program, run.order, self.costs, moves)

    def _choose(self, excess: int) -> set[Drop]:
        """The cheapest drops across the peak that free about half of `excess`, at least one."""
        candidates = []
        for b, n in self._idle_at_peak():
            nbytes = self.program.buffers[b].nbytes
            candidates.append((self._seconds((b, n)) / nbytes, b, n))
        candidates.sort()
        chosen: set[Drop] = set()
        freed = 0
        target = max(excess // 2, min(excess, self.budget // 50))
        for _, b, n in candidates:
            if freed >= target:
                break
            if self.stretches.exceeds(b, self.stretch):
                continue
            chosen.add((b, n))
            self.stretches.drop(b)
            freed += self.program.buffers[b].nbytes
        return chosen

    def _idle_at_peak(self) -> list[Drop]:
        """The base intervals across the peak whose buffer is live there and may be recomputed."""
        order, at = self.timeline.order, self.timeline.peak_at
        if at < 0:
            return []
        done = 0  # steps of the base order that ran before the peak
        for s in order[: at + 1]:
            if done < len(self.base) and s == self.base[done]:
                done += 1
        step = self.program.steps[order[at]]
        busy = {*step.reads, *step.writes}
        found = []
        for b in live_at(self.program, order, at, self.timeline.transfers):
            uses = self.uses[b]
            n = sum(1 for u in uses if u < done) - 1
            idle = 0 <= n < len(uses) - 1 and b not in busy
            free = (b, n) not in self.drops and (b, n) not in self.parks
            if idle and free and self.program.buffers[b].nbytes > 0:
                if self.recomputation.may_drop(b, uses[n + 1]):
                    found.append((b, n))
        return found

    def _seconds(self, drop: Drop) -> float:
        """The seconds of a drop: its producer, and the producers of inputs that are dead by then."""
        program = self.program
        b, n = drop
        need = self.uses[b][n + 1]
        total, stack = 0.0, [b]
        seen: set[int] = set()
        while stack and len(seen) < 32:
            s = program.producer[stack.pop()]
            if s in seen or s < 0:
                continue
            seen.add(s)
            total += self.costs.seconds[s]
            for r in program.steps[s].reads:
                # what is read later in the base order is there by then, or is made for that anyway
                if not program.is_resident[r] and self.uses[r][-1] < need:
                    stack.append(r)
        return total

    def _crosses(self, uses: Sequence[int]) -> bool:
        """Whether a buffer with these uses is a residual: read in another phase than its own."""
        first, last = (self.program.steps[self.base[p]].phase for p in (uses[0], uses[-1]))
        return first is not last
