"""The constants of planning."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class PolicyParams:
    """How much policies try, and what is too small to matter to them.

    Every field trades planning time for a better plan, or says from where on a difference counts.
    What users may choose are fields of the policies instead.

    Attributes:
      pinned_nbytes: bytes up to which a value that is made of nothing is kept.
      deepest_recompute: a value behind more dead producers than this is not recomputed.
      longest_order: an order of more than so many times the steps of the base, and 1,000, means
        that the limit cannot be met. Of those that met it for an unrolled ViT-L, GPT-2, ResNet-50 or
        ConvNeXt in a fifth of its memory none had more than 2.9 times as many.
      standard_near: a usual checkpoint policy is tried under the executor's limit if alone it peaks
        at this many times the limit at most. Of 23 tries for an unrolled GPT-2 at five budgets seven
        gave the best plan so far, and peaked at 1.00 to 1.08 times the limit.
      farthest_recompute: the most steps that are considered for the cost of recomputing a value.
      scalar_nbytes: steps that move fewer bytes are free: learning rates, bias corrections,
        counters.
      bound_rows: the numbers of rows of the linear program to try. For VGG-116 eight rows give a
        lower bound than four in the same time.
      bound_starts: the first so many numbers of rows give a start: four rows take seconds even
        without branching.
      bound_gap: relative; at which a solution of the linear program is as good as the best.
      start_gap: relative; the same of a start, which the search improves.
      rows_apart: of the step's seconds; rows are at least this share apart, since neighbours
        constrain alike.
      parking_target: of the budget; the share that a start with transfers may use.
      parking_price: of the step's seconds; the price of parking a budget's worth of bytes. Of two
        starts of equal time it selects the one that moves less.
      most_integers: of a program with more variables only the linear relaxation is solved: of
        VGG-416 in four sub-batches, of 5,910, in 0.07 s and not 1.25, with a bound of 364.3 ms and
        not 365.5.
      lowest_close: of a minimum peak; the limits that are met and missed end this near to each
        other.
      hidden_tries: schedules that are tried to find what is hidden. Blocks are halved, so that is
        some five values that are not.
      hidden_waits: of the step's seconds; what waits for less is hidden.
      loopings: the most choices of stacks to loop that are tried.
      stream_lead: of the step's seconds; so much earlier than the rate of the link requires hosted
        buffers may come, and so much later be gone.
      streaming_tries: plans of the policy beneath streaming, each for less by what the one before
        was over the budget with the streamed arguments.
      stack_passes: over memory for each byte that is copied to a stack or from one, which is read
        and written.
      fewest_seconds: seconds that all bytes count as, of the seconds of all steps, where the fewest
        bytes are wanted.
      residual_gap: relative; at which a choice of residuals is as good as the best.
      division_gap: relative; at which lengths of segments are as good as the best. A third of what
        the next length can differ by.
      division_misses: so many lengths of segments in turn, those with the fastest relaxations, give
        nothing better before the others are left out. In 20 searches for an LSTM and a decoder the
        best of all lengths was missed once, by 4 %, on a level that was of no use.
      segment_octaves: lengths of segments that are tried for each doubling. With k off by a factor
        of 2 ** (1 / 4) from the best, n / k + k is 1.5 % above its minimum.
      shortest_loop: iterations of a loop that is divided: two segments of two.
      level_share: of the fewest slices on one level of segments less; a further level is tried where
        it stores this share or less, since the code of the loops' bodies doubles with each. So 16
        iterations have two levels, 128 three and 4,096 four.
      cut_offsets: every k-th cut is taken from each of the first k where k is at most this: a layer
        of a transformer has two cuts, and its input is one of them.
      small_cut: of the median value that a product makes; what is smaller crosses a cut unseen,
        keys and masks of attention for instance, since keeping it costs next to nothing.
      size_rounds: rounds of moDNN's equation 3 before the bracket is halved instead.
      copy_seconds: copies get so many times the seconds that the link's rate requires, if there are
        so many: steps that run faster than measured would otherwise wait.
      point_rounds: waits shift the steps in time, and with them the points of transfers, which are
        computed again this often.
      waited_shares: of the memory that vDNN++ may use; what compute waits for, until the heap is no
        larger than it may be. With none of it, compute waits for each copy as early as vDNN does.
      partial_divisions: choices for some of the kernels that are held at once; with more, HiGHS's
        answer stands. 462 kernels, 22 times the same 21, had 47,000 in all of the steps together.
    """

    pinned_nbytes: int = 64
    deepest_recompute: int = 200
    longest_order: int = 5
    standard_near: float = 1.25
    farthest_recompute: int = 32
    scalar_nbytes: int = 4096
    bound_rows: tuple[int, ...] = (1, 2, 4)
    bound_starts: int = 2
    bound_gap: float = 1e-3
    start_gap: float = 5e-3
    rows_apart: float = 1 / 32
    parking_target: float = 0.96
    parking_price: float = 0.01
    most_integers: int = 5_000
    lowest_close: float = 1.02
    hidden_tries: int = 24
    hidden_waits: float = 1e-3
    loopings: int = 8
    stream_lead: float = 5e-3
    streaming_tries: int = 4
    stack_passes: int = 2
    fewest_seconds: float = 100
    residual_gap: float = 1e-3
    division_gap: float = 5e-3
    division_misses: int = 2
    segment_octaves: int = 2
    shortest_loop: int = 4
    level_share: float = 0.8
    cut_offsets: int = 3
    small_cut: float = 1 / 64
    size_rounds: int = 6
    copy_seconds: float = 1.1
    point_rounds: int = 3
    waited_shares: tuple[float, ...] = (1.0, 0.9, 0.7, 0.0)
    partial_divisions: int = 1_000_000


PARAMS = PolicyParams()
