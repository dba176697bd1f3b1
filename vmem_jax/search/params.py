"""The constants of the search."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class SearchParams:
    """How much the search does, and how far it trusts predictions.

    Attributes:
      max_compiles: plans that are compiled in all, whatever their variant. One is left for plain jit,
        so that no error names more than that needs; where the budget is a share of its need, plain
        jit is compiled before, and is not one of them. XLA takes 5 to 60 s for a large
        step, so eight are minutes; one or two are typical.
      reserved_compiles: of `max_compiles`, those left for the minimum peak while nothing fits.
      compiles_per_variant: of `max_compiles`, those of one variant before the next has its turn.
        A fifth plan gained nothing over the fourth.
      plans_per_estimate: plans of one variant that are made before one of them is compiled. The
        heap's excess differs between plans (`core.heap`), so the goal is bisected.
      below: where no plan of a variant is predicted to fit, but one would fit in `near` times the
        goal, this share of its live bytes is the goal of one more. For ResNet-50(256) policy `auto`
        ends at 2,108 MiB for goals of 2,020 to 2,140 MiB, and at 1,912 for those of 1,740 to 1,900.
      time_tolerance: once a plan fits, another variant is compiled only if it is predicted to be
        faster by this share; another system's plan replaces `auto`'s by the same rule. It is what a
        choice may be off the best. With 5 % a T5 was left to plain jit, which took 10 % longer on an
        H200 than the rewritten step, of which 3.4 % were predicted.
      transfers_must_gain: share of the time by which plans with transfers must be faster than what
        fits without, where times are a roofline's: twice what such plans of a decoder took longer
        than predicted, 0.4 to 5 % (H200).
      near: if no plan of a group of families is predicted to fit, the lowest one is compiled before
        the next group is tried, provided that its predicted need is at most this many times the
        budget, and that the next group would not be tried if it did fit. Predicted peaks are off by
        2.8 % in the median (docs/papers.md), but SuperNeurons' plan for OverFeat(128) in strict
        float32 compiled to 17 % less than predicted.
      much_more: a plan that is compiled next is refined if it takes this share longer than the step
        without a limit. Where it takes less, seconds hardly differ between goals.
      spread: the goals of those plans, as shares of what the plan may need. Over 200 budgets of
        ResNet-50(256), four halve what the bisection loses to the best of all goals, 1.2 % in the
        mean; eight leave a third. In a fifth of its memory eight find 47.6 ms, four 50.5. For
        programs of more than `long_steps` steps there are fewer, as many times as they are longer.
      plan_tolerance: bisection ends with a plan that fits if it takes at most this share longer than
        one that does not fit. For programs of more than `long_steps` steps the share grows with the
        length, up to ten times, since each plan takes longer to make.
      long_steps: see `plan_tolerance`.
      memory_step: share of the budget by which the goal is lowered further after each plan that
        compiled to too much, since freeing other values moves the peak.
      far: if the plan with the lowest predicted peak compiles to this many times the prediction,
        plans for `less_extreme` times its peak are compiled too. Such a plan recomputes nearly
        everything, and its fences cost memory. Where all compiled plans of a policy came to this
        many times their predictions, other policies come first: moDNN in 19 sub-batches of FCN(128)
        came to 7,571 MiB of 2,065, and in 32 to as much.
      less_extreme: see `far`.
      same: needs of which one is more than this share of the other count as the same: if a further
        lowest plan compiles to so much of the one before, only those of policies that were not
        compiled yet are tried, and of lowest plans that are predicted to need about the same, and to
        fit, the fastest is compiled.
    """

    max_compiles: int = 8
    reserved_compiles: int = 3
    compiles_per_variant: int = 4
    plans_per_estimate: int = 5
    below: float = 0.9
    time_tolerance: float = 0.03
    transfers_must_gain: float = 0.1
    near: float = 1.25
    much_more: float = 0.15
    spread: tuple[float, ...] = (0.99, 0.98, 0.97, 0.96, 0.95, 0.94, 0.93, 0.92)
    plan_tolerance: float = 0.01
    long_steps: int = 1_000
    memory_step: float = 0.01
    far: float = 1.1
    less_extreme: tuple[float, ...] = (1.25, 1.6)
    same: float = 0.99

    def plan_tolerance_of(self, steps: int) -> float:
        """`plan_tolerance` for a program of so many steps."""
        return self.plan_tolerance * min(max(1.0, steps / self.long_steps), 10.0)

    def spread_of(self, steps: int) -> tuple[float, ...]:
        """`spread` for a program of so many steps."""
        return self.spread[:: -(-steps // self.long_steps)]


DEFAULT = SearchParams()
