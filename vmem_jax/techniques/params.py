"""The constants of techniques."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class TechniqueParams:
    """How many forms of a step techniques make, and what is too small for them.

    Attributes:
      capacity_margin: room for further values in what is compressed, as a share of the expected
        ones. More values overflow.
      compressed_share: a value that keeps more than this share of its bytes when compressed stays
        as it is.
      compressed_part: of all temporaries; smaller values are not worth two kernels.
      fast_enough: of the seconds of all steps; a plan within this factor has nothing to gain from
        compression.
      compressed_choices: the most choices of compressed values that are compiled, one after
        another, until one fits.
      logit_chunks: numbers of chunks that are planned for: a quarter of the logits is little beside
        the rest of a step already, and with a sixteenth next to nothing is left to gain.
      least_mask: of all temporaries; smaller masks stay in bytes, since each that is packed is a
        kernel of its own. An eighth of what is worth a fence, as bits are an eighth of a mask.
      masks_part: of the budget; where bits save less in all, masks stay in bytes.
      likely_to_fit: of the budget; what is predicted to peak below it keeps its masks in bytes, and
        no loops with smaller stacks are planned beside it.
      sure_to_fit: of the budget; what is predicted to peak below it surely fits as it is.
      logits_part: of the budget; smaller logits are not looked for. With their gradient they take
        twice as much; in a vision transformer the last layer's hidden values are that large.
      stack_choices: of residuals, from the fewest seconds to the fewest bytes; with those for the
        budget there are at most seven to plan.
      stacks_off: of the step; by so much what a choice of stacks is expected to take is off. Of an
        LSTM with 128 MiB of stacks 1.3 ms more are expected than with 384, and 0.9 of 34.8 less are
        predicted for the step.
      budget_tries: to meet a budget: what an iteration of another choice needs beside its stacks
        differs a little.
      budget_goals: of the budget; what is predicted to need all of it may compile to more. Of ten
        choices for a decoder none compiled to more than 1 % above its prediction.
      level_gain: of what a step needs with loops in segments; a further level of segments takes
        at least so much off.
    """

    capacity_margin: float = 1 / 32
    compressed_share: float = 0.9
    compressed_part: float = 1 / 500
    fast_enough: float = 1.01
    compressed_choices: int = 3
    logit_chunks: tuple[int, ...] = (4, 16)
    least_mask: float = 1 / 16000
    masks_part: float = 1 / 64
    likely_to_fit: float = 0.95
    sure_to_fit: float = 0.5
    logits_part: float = 1 / 32
    stack_choices: int = 5
    stacks_off: float = 0.03
    budget_tries: int = 3
    budget_goals: tuple[float, ...] = (1.0, 0.98)
    level_gain: float = 0.02


PARAMS = TechniqueParams()
