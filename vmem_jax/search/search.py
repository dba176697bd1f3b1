"""The best-first search: the fastest plan, of any variant, that compiles to the budget.

A candidate is a variant in one of three states:

- bounded: a lower bound of the seconds of its plans is known;
- planned: a plan is known that is predicted to fit, with its seconds;
- compiled: its seconds are predicted again, by what the compiled step shows of XLA's convolutions.

A queue orders candidates by their seconds. The search takes the first one and advances it by one
state. When a plan compiles to the budget, it is the incumbent, and the search ends when no candidate
in the queue can be faster by the tolerance. When a plan compiles to too much, its variant needs more
than predicted, and the candidate returns to the queue with a lower goal. Plans that earlier searches
compiled to the budget are in the queue from the start.

Families are tried in groups; a group is tried only if no variant of the groups before it fits, or
if it may be enough faster than the incumbent, or than the plan that would be compiled first. If
nothing fits at all, the plans with the lowest predicted peaks are compiled: the compiler may need
less than predicted, and it shows the true minimum peak.

This is best-first branch and bound: Land and Doig, "An automatic method of solving discrete
programming problems", Econometrica 28 (1960).
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from absl import logging

from vmem_jax.core.need import need_nbytes
from vmem_jax.core.parked import parks
from vmem_jax.core.plan import Plan
from vmem_jax.core.planned import simulate_plan
from vmem_jax.errors import CompileError, HostMemoryError, LayersError, VmemError, show_nbytes
from vmem_jax.policy.base import Splitting
from vmem_jax.search.attempt import Attempt, Compiles, Found, Record, Tried
from vmem_jax.search.candidate import Candidate
from vmem_jax.search.estimate import Estimate, estimate, planned, refined
from vmem_jax.search.log import What
from vmem_jax.search.state import State
from vmem_jax.search.variant import Family, MadeLater, Variant


class Search(State):
    """One search, for one `run`."""

    def run(self, groups: Sequence[Sequence[Family]]) -> Found:
        """The fastest plan by prediction that compiles to at most `budget` bytes.

        Args:
          groups: families; a group is tried only if nothing of the groups before it fits, or if it
            says that it may gain enough.

        Raises:
          HostMemoryError: every plan that fits parks more in host memory than is allowed.
          VmemError: nothing could be planned or compiled; the first reason.
        """
        self.earlier = Record(self.record.all())
        if self.budget is not None:
            self._recall_others(itertools.chain.from_iterable(groups[1:]))
        self.groups = [*groups]
        while self.groups:
            if self.best is None or self._may_gain(self.best.plan.predicted_seconds):
                self._open_group()
                self._work_off()
                self._try_between()
                fastest = min((one.seconds for one in self.over), default=None)
                if self.groups and not (fastest is not None and _gains(self.groups[0], fastest)):
                    self._compile_lowest(1, self.params.near * self.limit)
            else:
                self.groups.pop(0)
        if self.best is not None:
            return self.found(self.best)
        if not self.lacks and self.reasons and isinstance(self.reasons[0], LayersError):
            raise self.reasons[0]  # the policy is not for such steps: nothing is run in its place
        # nothing else is left to try, so no compile is reserved
        self.params = dataclasses.replace(self.params, reserved_compiles=0)
        self._make_waiting(math.inf)
        lowest = min((one.expected for one in self.over), default=0)
        if self.may_stay and lowest > self.params.near * self.limit:
            self._compile_untouched(lowest / self.params.far)  # it may need far less than others
        self._compile_lowest(self.params.max_compiles)
        if self.best is None:
            self._compile_untouched(self.least)
        return self.found(self.best) if self.best is not None else self._none_fits()

    def _open_group(self) -> None:
        """Queues the next group."""
        for family in self.groups.pop(0):
            self.open(family, family.counts[0], 0.0)

    def _may_gain(self, seconds: float) -> bool:
        """Whether the next group is tried though a plan of so many seconds fits. If it will be, its
        plans are made before that one is compiled, and the fastest of all is compiled."""
        is_open = bool(self.groups) and self.spare > 0 and self.compiles is Compiles.ALL
        return is_open and _gains(self.groups[0], seconds)

    def _none_fits(self) -> Found:
        """The lowest peak that is known, or why there is none."""
        for reason in self.reasons:
            if isinstance(reason, HostMemoryError):  # with more of that there would be a plan
                raise reason
        if self.lacks and all(self.lacks):
            raise LayersError(self.lacks[0])
        if self.missed:
            return self.found(min(self.missed, key=lambda attempt: attempt.need))
        assert self.reasons, "every candidate was compiled, or there is a reason"
        raise self.reasons[0]

    def _work_off(self) -> None:
        while self.queue:
            self._advance(heapq.heappop(self.queue)[-1])

    # -- the stages

    def _advance(self, candidate: Candidate) -> None:
        """Advances a candidate by one state, unless it cannot beat the incumbent."""
        if self.best is not None:
            gain = max(self.params.time_tolerance, candidate.family.must_gain)
            enough = (1 - gain) * self.best.plan.predicted_seconds
            if candidate.seconds >= enough or candidate.family.splitting is Splitting.FEWEST:
                if candidate.family.splitting is not Splitting.FEWEST:
                    self.rivals.append(candidate)
                if candidate.variant is not None:
                    why = "what fits is as fast"
                    self.log.add(What.PRUNED, candidate.variant.name, candidate.seconds, why=why)
                return
        try:
            if candidate.variant is None:
                self._bound(candidate)
            elif candidate.estimate is None:
                self._plan(candidate, candidate.variant)
            else:
                self._compile(candidate, candidate.variant, candidate.estimate)
        except (LayersError, HostMemoryError, CompileError) as error:
            self._drop(candidate, error)

    def _drop(self, candidate: Candidate, error: VmemError) -> None:
        name = candidate.variant.name if candidate.variant else "variant"
        self.log.add(What.DROPPED, name, why=str(error).split("\n")[0])
        self.reasons.append(error)
        self.open_next(candidate, Splitting.FEWEST)

    def _bound(self, candidate: Candidate) -> None:
        """Makes the variant, and bounds the seconds of its plans."""
        family, count = candidate.family, candidate.count
        if candidate.waits and self._cannot_fit(candidate):
            self.waiting.append(candidate)
            for wanted in Splitting:
                self.open_next(candidate, wanted, candidate.seconds)
            return
        variant = family.make(count)
        bounding = family.bounded_by(count) if family.bounded_by else variant
        free = bounding.lower_bound()  # whatever memory it takes
        self.open_next(candidate, Splitting.FASTEST, free)
        candidate = dataclasses.replace(candidate, variant=variant, seconds=free)
        self._recall(candidate, variant, lambda plan: plan.predicted_seconds)
        self.push(candidate, seconds=bounding.lower_bound(self.budget))

    def _cannot_fit(self, candidate: Candidate) -> bool:
        """Whether its plans are known to need more than the budget before its variant is made, and
        none of so many sub-batches compiled to less before."""
        earlier = (one for one in self.earlier.all() if one.fits(self.budget))
        is_known = any(one.plan.sub_batches == candidate.count for one in earlier)
        return candidate.least > self.limit and not is_known

    def _plan(self, candidate: Candidate, variant: Variant) -> None:
        """Finds a plan that is predicted to fit, or else the one with the smallest need."""
        before = candidate.misses[-1].estimate if candidate.misses else None
        found = estimate(variant, candidate.goal, self.params, self.log, before)
        self.lacks.append(found.lacks)
        candidate = dataclasses.replace(candidate, estimate=found, seconds=found.seconds)
        if found.fits(candidate.goal) or (candidate.misses and found.fits(self.budget)):
            # nothing reaches the lowered goal, but the heap may lose less with this plan
            self.log.add(What.PLANNED, variant.name, found.seconds, found.need)
            self.push(candidate)
        else:
            self.log.add(What.OVER, variant.name, found.seconds, found.need)
            self._give_up(candidate)

    def _give_up(self, candidate: Candidate) -> None:
        """Sets it aside: its plan is compiled only if nothing is predicted to fit."""
        self.over.append(candidate)
        self.open_next(candidate, Splitting.FEWEST)

    def _compile(self, candidate: Candidate, variant: Variant, one: Estimate) -> None:
        """Compiles its plan. If that needs too much, the candidate returns with a lower goal."""
        spare, misses = self.spare, candidate.misses
        if candidate.is_proved:
            if spare > 0:  # if it does not fit again, its variant has a turn of its own
                self._attempt(candidate, variant, one)
            return
        spare -= self.params.reserved_compiles if self.best is None else 0
        if not candidate.is_refined and spare > 0:
            better = refined(variant, candidate.goal, one, self.params, self.log)
            self.push(candidate, estimate=better, seconds=better.seconds, is_refined=True)
            return
        known, excess = self.missed_with(variant, one), self.excess_of_others(candidate)
        is_used_up = spare <= 0 or len(misses) >= self.params.compiles_per_variant
        if is_used_up or known in misses:
            self._give_up(candidate)
        elif known is None and one.need + excess > self.limit:
            self.push(candidate, estimate=None, goal=int(self.limit) - excess)
        elif self.best is None and self._may_gain(one.seconds):
            self._open_group()
            self.push(candidate)
        else:
            attempt = known or self._attempt(candidate, variant, one)
            if attempt is not None and not self.fits(attempt):
                self._again(candidate, variant, attempt)

    def _again(self, candidate: Candidate, variant: Variant, attempt: Attempt) -> None:
        """Returns a candidate whose plan compiled to too much to the queue: with a lower goal and the
        corrected costs, and after its first miss also without transfers."""
        assert self.budget is not None and candidate.goal is not None, "else everything fits"
        misses = candidate.misses
        changed = parks(variant.program, attempt.plan) or attempt.plan.divided
        if changed and not misses and variant.program.sub_batches == 1:
            still = variant.without_transfers
            self.push(candidate, variant=still, estimate=None, goal=self.budget)
        # subtract the excess over the corrected prediction, and a little more each time, since
        # freeing other values moves the peak
        step = int(len(misses) * self.params.memory_step * self.budget)
        goal = self.budget - attempt.excess - step
        if attempt.need <= attempt.predicted_need:
            # the peak is not where it is predicted, so only what is missing says what to take off
            goal = min(goal, candidate.goal - (attempt.need - self.budget))
        variant = dataclasses.replace(variant, costs=attempt.costs)
        misses, again = (*misses, attempt), {"estimate": None, "goal": goal, "is_refined": False}
        self.push(candidate, variant=variant, misses=misses, **again)

    def _attempt(self, candidate: Candidate, variant: Variant, one: Estimate) -> Attempt | None:
        """Compiles its plan and logs that; None if it does not compile or run here. It may have been
        planned for less than the user's budget."""
        compiled, need, costs = None, one.need, variant.costs
        is_untried = self.compiles is Compiles.UNTRIED and not candidate.is_proved
        if self.compiles is Compiles.ALL or is_untried:
            start = time.perf_counter()
            try:
                compiled = variant.compile_plan(one.plan)
            except (HostMemoryError, CompileError) as error:
                self._drop(candidate, error)
                return None
            need, costs = need_nbytes(compiled), variant.learn(variant.costs, compiled)
            logging.info("compiled in %.1f s: %s", time.perf_counter() - start, one.plan)
        seconds = one.seconds
        if costs != variant.costs:
            seconds = simulate_plan(variant.program, one.plan, costs).seconds
        plan = dataclasses.replace(one.plan, budget=self.budget, predicted_seconds=seconds)
        self.record.add(Tried(dataclasses.replace(plan, budget=None), need))
        attempt = Attempt(variant, plan, compiled, need, one.need, costs, one.plan.budget)
        self.attempts[attempt] = candidate
        if not self.fits(attempt):
            there = show_nbytes(self.budget or 0)
            why = f"{show_nbytes(one.need)} were predicted, {there} are there"
            self.log.add(What.MISSED, variant.name, seconds, need, why)
            return attempt
        self.log.add(What.COMPILED, variant.name, seconds, need)
        if self.best is None or seconds < self.best.plan.predicted_seconds:
            self.best = attempt
        if seconds > (1 + self.params.time_tolerance) * one.seconds:
            # others may be faster than XLA's convolutions turned out to be
            variant = dataclasses.replace(variant, costs=costs)
            bound, again = variant.lower_bound(self.budget), {"estimate": None, "is_refined": False}
            self.push(candidate, variant=variant, seconds=bound, **again)
        return attempt

    def _try_between(self) -> None:
        """Tries numbers of sub-batches between that of the incumbent and the next smaller one that
        was tried, by bisection, as long as its bound leaves enough to gain."""
        while self.best is not None and self.spare > 0:
            won = self.attempts[self.best]
            family, count = won.family, won.count
            fewer = max((n for each, n in self.opened if each is family and n < count), default=0)
            wanted = fewer and family.splitting is Splitting.FASTEST
            between = family.between(fewer, count) if wanted else 0
            if not between:
                return
            bound = (family.bounded_by or family.make)(fewer).lower_bound(self.budget)
            enough = (1 - self.params.time_tolerance) * self.best.plan.predicted_seconds
            if bound >= (1 - family.must_gain) * enough:
                return
            self.open(family, between, bound)
            self._work_off()

    # -- what is known

    def _recall_others(self, later: Iterable[Family]) -> None:
        """Queues what is known to fit of `later` groups, and the untouched step.

        The former take as long as a step that waits for every copy, and must gain the tolerance: a
        plan of other families that takes longer is worse, whatever hides copies.
        """
        tolerance = self.params.time_tolerance
        policies = {tried.plan.policy for tried in self.earlier.all() if tried.fits(self.budget)}
        for family in later if policies else ():
            with contextlib.suppress(VmemError):
                for count in family.counts:
                    variant = family.make(count)
                    if variant.policy.name not in policies:
                        break
                    late = dataclasses.replace(family, must_gain=tolerance)
                    self._recall(Candidate(late, count, variant), variant, variant.unhidden_seconds)
        if self.untouched is not None:
            seconds = self.untouched.unhidden_seconds if self.may_stay else lambda plan: math.inf
            self._recall(self._unchanged(self.untouched), self.untouched, seconds)

    def _recall(
        self, candidate: Candidate, variant: Variant, seconds: Callable[[Plan], float]
    ) -> None:
        """Queues the plans of a variant that are known to fit at their `seconds`, unless these are
        infinite, and notes what the others need."""
        for tried in self.earlier.candidates(variant):
            if not tried.fits(self.budget):
                need, predicted = tried.need, max(tried.need, tried.plan.predicted_peak)
                self.known.append(
                    Attempt(variant, tried.plan, None, need, predicted, variant.costs)
                )
            elif seconds(tried.plan) < math.inf:
                self.push(candidate, estimate=tried, seconds=seconds(tried.plan))

    # -- if nothing is predicted to fit

    def _compile_lowest(self, most: int, limit: float = math.inf) -> None:
        """Compiles the plans with the lowest expected needs until one fits or none can be lower.

        Args:
          most: how many plans to compile.
          limit: bytes; plans that are expected to need more are left.
        """
        compiled: list[Attempt] = []
        self._make_waiting(limit)
        while self.over and self.best is None and self.spare > 0 and len(compiled) < most:
            candidate = self._lowest_over()
            variant, one = candidate.variant, candidate.estimate
            assert variant is not None and one is not None
            if candidate.expected > limit:
                return
            self.over.remove(candidate)
            if self.missed_with(variant, one) is not None or self._gains_nothing(
                candidate, compiled
            ):
                continue
            attempt = self._attempt(candidate, variant, one)
            if attempt is None or self.fits(attempt):
                continue
            compiled.append(attempt)
            is_corrected = attempt.costs != variant.costs  # by the compiled step
            if is_corrected or attempt.need <= self.params.near * self.limit:
                self._again(candidate, variant, attempt)
                self._work_off()
            elif attempt.need > self.params.far * one.need:
                # plans that recompute less are predicted to need more, and compile to less
                for factor in self.params.less_extreme:
                    one = planned(variant, int(factor * attempt.plan.predicted_peak), self.log)
                    if one.need < attempt.need:
                        changes: Any = {"estimate": one, "seconds": one.seconds}
                        self.over.append(dataclasses.replace(candidate, **changes))

    def _gains_nothing(self, candidate: Candidate, compiled: Sequence[Attempt]) -> bool:
        """Whether its plan is no lower by what is known: the last two of the `compiled` ones came to
        the same, and another system may move what they leave, but not its own; or some plan compiled
        to far less than it is expected to."""
        assert candidate.variant is not None
        policy = candidate.variant.policy.name
        if len(compiled) > 1 and compiled[-1].need >= self.params.same * compiled[-2].need:
            if any(policy == one.variant.policy.name for one in compiled):
                return True
        least = min(self.missed, key=lambda one: one.need, default=None)
        return least is not None and (
            candidate.expected > self.params.far * least.measure_for(policy)
        )

    def _make_waiting(self, limit: float) -> None:
        """Makes and plans the variants that wait, if their plans may be the lowest and may need no
        more than `limit` bytes."""
        while self.waiting:
            lowest = min((one.expected for one in self.over), default=math.inf)
            first = min(self.waiting, key=lambda one: one.least)
            if first.least > min(lowest / self.params.same, limit):
                return
            self.waiting.remove(first)
            self.push(first, waits=False)
            self._work_off()

    def _lowest_over(self) -> Candidate:
        """The candidate with the lowest expected need; of several that are expected to fit and need
        about as much the fastest, since whether one fits does not depend on so little. Policies whose
        predictions are far off come behind others that are expected to fit."""
        near = [one for one in self.over if one.expected <= self.limit and not self.is_far_off(one)]
        some = near or self.over
        lowest = min(some, key=lambda one: one.expected)
        limit = min(lowest.expected / self.params.same, self.limit)
        as_low = [one for one in some if one.expected <= limit]
        return min(as_low, default=lowest, key=lambda one: one.seconds)

    # -- the untouched step

    def _unchanged(self, untouched: Variant) -> Candidate:
        """The untouched step as a candidate; others must be faster by the tolerance."""
        gain = -self.params.time_tolerance
        family = Family((1,), lambda count: untouched, Splitting.WHOLE, must_gain=gain)
        return Candidate(family, 1, untouched)

    def _compile_untouched(self, least: float) -> None:
        """Compiles the untouched step, unless its arguments alone need `least` bytes, as others do.

        Its prediction does not tell: XLA fuses what is predicted as arrays, products too.
        """
        plain = self.plain
        if plain is None or plain.program.arguments_nbytes >= least:
            return
        self._attempt(self._unchanged(plain), plain, planned(plain, None, self.log))


def _gains(group: Sequence[Family], seconds: float) -> bool:
    """Whether a later group may gain enough over plans of so many seconds."""
    return isinstance(group, MadeLater) and group.may_gain(seconds)
