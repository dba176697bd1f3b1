"""Every number that the search depends on."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class SearchParams:
    """How much the search does, and how far it trusts what is predicted.

    Attributes:
      max_compiles: plans that are compiled in all, whatever their variant. Compiling plain jit, where
        the budget is a share of what that needs, is not one of them. XLA takes 5 to 60 s for a large
        step, so eight are minutes; one or two are typical.
      reserved_compiles: of `max_compiles`, those left for the minimum peak while nothing fits.
      compiles_per_variant: of `max_compiles`, those of one variant before the next has its turn.
        The fifth plan that is made from the excess of the one before gains nothing that the fourth
        did not (docs/benchmarks.md).
      plans_per_estimate: plans of one variant that are made before one of them is compiled. The heap
        takes a share of each plan's own (`core.heap`), so what is planned for is bisected.
      time_tolerance: a variant is compiled beside one that fits only if it is predicted to take less
        by this share, and another system's plan replaces `auto`'s only then. Predicted seconds are
        off by 3.4 % in the median (docs/papers.md).
      near: where no plan of a group of families is predicted to fit, the lowest is compiled before
        the next group is tried if it is predicted to need at most this many times the budget.
        Predicted peaks are off by 2.8 % in the median (docs/papers.md), but SuperNeurons' plan for
        OverFeat(128) in strict float32 compiled to 17 % less than was predicted.
      plan_tolerance: a plan that fits is good enough where it takes at most this share longer than
        one that does not; for programs of more than `long_steps` steps in proportion to their length,
        up to ten times as much, since each plan takes as much longer to make.
      long_steps: see `plan_tolerance`.
      memory_step: share of the budget that is taken off once more for each further plan of a variant
        that compiled to too much: freeing other values moves the peak.
      loop_margin: share of the budget by which a plan for a step whose loops stack other values may
        be predicted to need more and is compiled all the same: a decoder of 1.1 billion weights was
        predicted to need 4 % more than it compiled to.
      untouched: the untouched program, whose order is XLA's own and not known, is compiled where
        nothing else fits and it is predicted to need at most this many times the budget;
      untouched_lower: or this many times the lowest that was reached, so that no error names more
        than plain jit needs.
      far: where the plan with the lowest predicted peak compiles to this many times the prediction,
        it does not tell how low others get: it recomputes nearly everything, and each fence of it
        costs. Then plans for `less_extreme` times its peak are compiled as well.
      less_extreme: see `far`.
      same: where one more lowest plan comes to this share of the one before, no more are tried.
      slow, bearable: a plan that is predicted to take `slow` times plain's seconds is worth a
        warning, which names the budget at which it would be `bearable` times; that is looked for in
        `looks` plans.
    """

    max_compiles: int = 8
    reserved_compiles: int = 3
    compiles_per_variant: int = 4
    plans_per_estimate: int = 5
    time_tolerance: float = 0.05
    near: float = 1.25
    plan_tolerance: float = 0.01
    long_steps: int = 1_000
    memory_step: float = 0.01
    loop_margin: float = 0.03
    untouched: float = 2.0
    untouched_lower: float = 2.0
    far: float = 1.1
    less_extreme: tuple[float, ...] = (1.25, 1.6)
    same: float = 0.99
    slow: float = 1.5
    bearable: float = 1.1
    looks: int = 4

    def plan_tolerance_of(self, steps: int) -> float:
        """`plan_tolerance` for a program of so many steps."""
        return self.plan_tolerance * min(max(1.0, steps / self.long_steps), 10.0)
