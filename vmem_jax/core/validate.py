"""validate: checks by definition whether a plan is a correct schedule.

It does not use `simulate`. It replays the order with sets of versions, slowly, so that each catches
the mistakes of the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from vmem_jax.core.convolution import Epilogue
from vmem_jax.core.looped import stacks
from vmem_jax.core.plan import Plan, Transfer
from vmem_jax.core.planned import planned_program
from vmem_jax.core.program import Program
from vmem_jax.errors import PlanError


def check_program(program: Program) -> list[str]:
    """The invariants of `Program` that do not hold, in words; empty for a correct program."""
    broken = []
    exists = set(program.inputs)
    count = len(program.buffers)
    for s, step in enumerate(program.steps):
        for b in (*step.reads, *step.writes):
            if not 0 <= b < count:
                broken.append(f"step {s} uses buffer {b} of {count}")
        for b in step.reads:
            if b not in exists:
                broken.append(f"step {s} reads buffer {b} before it is written")
        for b in step.writes:
            if b in exists:
                broken.append(f"step {s} writes buffer {b} a second time")
            exists.add(b)
        for r, w in step.in_place:
            if r not in step.reads or w not in step.writes:
                broken.append(f"step {s} pairs ({r}, {w}) in place, not of its own")
    broken += [f"output {b} is never written" for b in program.outputs if b not in exists]
    for pairs, role in ((0, "input"), (1, "output")):
        ids = [alias[pairs] for alias in program.aliases]
        if len(set(ids)) != len(ids):
            broken.append(f"an {role} is aliased twice")
    for i, o in program.aliases:
        if i not in program.inputs or o not in program.outputs:
            broken.append(f"alias ({i}, {o}) is not from an input to an output")
        elif program.buffers[i].nbytes != program.buffers[o].nbytes:
            broken.append(f"alias ({i}, {o}) joins buffers of different sizes")
        if i in program.hosted or o in program.hosted:
            broken.append(f"alias ({i}, {o}) is of a hosted buffer")
    ends = (*program.inputs, *program.outputs)
    broken += [f"hosted buffer {b} is no input or output" for b in program.hosted if b not in ends]
    return broken


def violations(program: Program, plan: Plan) -> list[str]:
    """What is wrong with `plan` as a schedule of `program`, in words; empty for a valid plan.

    Rules:

    - every step is in the order, and only pure steps are repeated;
    - a read finds a version that was made before it;
    - steps with effects keep their traced order;
    - a donated input is not read after the step that overwrites it;
    - a transferred buffer is movable, made before it leaves, neither read nor made again while it is
      away, and read after its return;
    - a hosted input that is read is fetched once, before its first read, and a hosted output leaves
      once, after it is made;
    - a looped buffer is a stack, and its loops run once;
    - a configuration belongs to a convolution, covers all its samples, and pads it as possible;
    - exactly the steps on samples are between the boundaries of sub-batches, and transfers of their
      buffers stay there.
    """
    for i, b in enumerate(plan.looped):
        name = f"looped buffer {b}"
        if not 0 <= b < len(program.buffers):
            return [f"{name} of {len(program.buffers)}"]
        if b not in stacks(program):
            return [f"{name} ({program.buffers[b].label}) is no stack that can move by slices"]
        if b in plan.looped[:i] or not plan.fenced:
            return [f"{name} is looped twice" if plan.fenced else f"{name}: no fences"]
    for i, (s, configuration) in enumerate(plan.convolutions):
        if not 0 <= s < len(program.steps):
            return [f"a configuration is of step {s} of {len(program.steps)}"]
        name = f"step {s} ({program.steps[s].where})"
        convolution = program.steps[s].convolution
        if convolution is None:
            return [f"{name} has a configuration, but is no convolution that can be divided"]
        if configuration.batch != convolution.batch or any(
            m.batch <= 0 for m in configuration.micros
        ):
            return [
                f"{name} has micro-batches of {configuration.batch} samples, and a batch of "
                f"{convolution.batch}"
            ]
        for m in configuration.micros:
            if m.channels and m.channels not in convolution.paddings:
                return [
                    f"{name} has a micro-batch padded to {m.channels} channels, and its "
                    f"{convolution.features_in} can be padded to {convolution.paddings or 'none'}"
                ]
        if configuration.epilogue not in (Epilogue.NONE, convolution.epilogue):
            return [f"{name} has no {configuration.epilogue} behind it, as its configuration has"]
        if configuration.bare_samples and not configuration.epilogue:
            return [f"{name} has bare micro-batches, and its configuration no epilogue"]
        if s in dict(plan.convolutions[:i]):
            return [f"{name} has two configurations"]
        if not plan.fenced and not configuration.is_xlas:
            return [f"{name} has micro-batches in a plan without fences"]
    if plan.sub_batches != program.sub_batches:
        return [f"it is for {plan.sub_batches} sub-batches, the step runs {program.sub_batches}"]
    program = planned_program(program, plan)
    broken = []
    made = set(program.inputs)
    ran: set[int] = set()
    effects: list[int] = []
    overwritten: set[int] = set()
    for position, s in enumerate(plan.order):
        if not 0 <= s < len(program.steps):
            return [f"position {position} names step {s} of {len(program.steps)}"]
        step = program.steps[s]
        name = f"step {s} ({step.where}) at position {position}"
        for b in step.reads:
            if b not in made:
                broken.append(f"{name} reads buffer {b} ({program.buffers[b].label}) unmade")
            if b in overwritten:
                broken.append(f"{name} reads donated input {b} after it was overwritten")
        if s in ran and not step.pure:
            broken.append(f"{name} is repeated but is not pure")
        if not step.pure:
            effects.append(s)
        made.update(step.writes)
        ran.add(s)
        overwritten.update(i for i, by in program.overwritten_by.items() if by == s)
    if effects != sorted(effects):
        broken.append(f"effects are out of order: {effects}")
    missing = set(range(len(program.steps))) - ran
    if missing:
        first = min(missing)
        broken.append(f"step {first} ({program.steps[first].where}) never runs")
    return broken + _broken_transfers(program, plan) + _broken_sub_batches(program, plan)


def check_made_for(program: Program, plan: Plan) -> None:
    """Raises PlanError, naming the first difference, unless `plan` is a valid one of `program`."""
    if plan.program != program.fingerprint:
        steps = len(set(plan.order))
        if steps != len(program.steps):
            difference = f"it has {steps} distinct steps, this one has {len(program.steps)}"
        else:
            difference = "shapes, dtypes, donation or the computation itself differ"
        raise PlanError(
            f"this plan was made for another step ({plan.program}, this one is "
            f"{program.fingerprint}): {difference}. Plan again with `.plan(*args)`."
        )
    broken = violations(program, plan)
    if broken:
        raise PlanError(f"this plan is not valid for its step: {broken[0]}")


def _broken_sub_batches(program: Program, plan: Plan) -> list[str]:
    """What is wrong with the positions of the steps on samples, and of those after them."""
    boundaries = [s for s, step in enumerate(program.steps) if step.is_boundary]
    if not boundaries or not set(boundaries) <= set(plan.order):
        return []  # what never runs is found below
    begin, end = map(plan.order.index, boundaries)
    broken = []
    for i, t in enumerate(plan.transfers):
        within = {begin < point <= end for point in (t.start, t.gone, t.fetch, t.back)}
        if len(within) > 1 or (True in within and t.buffer in program.hosted):
            broken.append(
                f"transfer {i} of buffer {t.buffer} moves in and out of the loop over sub-batches"
            )
    for position, s in enumerate(plan.order):
        if s in boundaries or not 0 <= s < len(program.steps):
            continue
        name = f"step {s} ({program.steps[s].where}) at position {position}"
        if (program.steps[s].times > 1) != (begin < position < end):
            broken.append(f"{name} is on the wrong side of the loop over sub-batches")
        elif s > boundaries[1] and position < end:
            broken.append(f"{name} comes before the sub-batches are done")
    return broken


def _broken_transfers(program: Program, plan: Plan) -> list[str]:
    """What is wrong with the transfers alone."""
    broken = _broken_streams(program, plan)
    away: dict[int, list[tuple[int, int]]] = {}
    for i, t in enumerate(plan.transfers):
        name = f"transfer {i} of buffer {t.buffer}"
        if not 0 <= t.buffer < len(program.buffers):
            broken.append(f"{name} of {len(program.buffers)}")
            continue
        if t.buffer in program.hosted:
            continue
        name += f" ({program.buffers[t.buffer].label})"
        if program.is_resident[t.buffer]:
            broken.append(f"{name} moves an argument or an output")
        if not program.buffers[t.buffer].movable:
            broken.append(f"{name} moves what has no known equal shards")
        if not 0 < t.start <= t.gone <= t.fetch <= t.back < len(plan.order):
            broken.append(f"{name} has its points out of order: {t}")
            continue
        if not plan.fenced:
            broken.append(f"{name} is in a plan without fences")
        if t.buffer not in {b for s in plan.order[: t.start] for b in program.steps[s].writes}:
            broken.append(f"{name} begins before the buffer is made")
        for position in range(t.start, t.back):
            step = program.steps[plan.order[position]]
            if t.buffer in step.writes:
                broken.append(f"{name} is made again at position {position}, while it moves")
            if t.buffer in step.reads and position >= t.gone:
                broken.append(f"{name} is read at position {position}, while it is away")
        after = (program.steps[s] for s in plan.order[t.back :])
        following = next((s for s in after if t.buffer in (*s.reads, *s.writes)), None)
        if following is None or t.buffer in following.writes:
            broken.append(f"{name} comes back, and nothing reads it before it is made again")
        for start, back in away.get(t.buffer, []):
            if t.start < back and start < t.back:
                broken.append(f"{name} overlaps another transfer of it")
        away.setdefault(t.buffer, []).append((t.start, t.back))
    return broken


def _broken_streams(program: Program, plan: Plan) -> list[str]:
    """What is wrong with the transfers of hosted inputs and outputs."""
    broken = []
    end = len(plan.order)
    for b in program.hosted:
        own = [t for t in plan.transfers if t.buffer == b]
        reads = [p for p, s in enumerate(plan.order) if b in program.steps[s].reads]
        makes = [p for p, s in enumerate(plan.order) if b in program.steps[s].writes]
        name = f"hosted buffer {b} ({program.buffers[b].label})"
        comes = not makes and bool(reads)
        if len(own) != int(comes or bool(makes)):
            broken.append(f"{name} has {len(own)} transfers")
            continue
        if own and not plan.fenced:
            broken.append(f"{name} is streamed in a plan without fences")
        for t in own:
            if comes and not 0 == t.start == t.gone <= t.fetch <= t.back <= reads[0]:
                broken.append(f"{name} does not come before it is first read: {t}")
            if makes and not makes[0] < t.start <= t.gone <= t.fetch == t.back == end:
                broken.append(f"{name} does not leave after it is made: {t}")
    return broken


def layout_violations(
    program: Program, plan: Plan, extents: Sequence[tuple[int, int]]
) -> list[str]:
    """What is wrong with slots in host memory for what `plan` parks, in words.

    Two tensors may share bytes only if the program that is emitted makes one be back before the
    other leaves, whatever order the runtime chooses: a call that begins to copy out takes a token of
    all that is back before its position. The loop that reads a looped stack gives no such token, so
    nothing takes over the slot of a stack.

    Args:
      extents: bytes (from, to) of each transfer that is not of a hosted buffer, in the order of
        `plan.transfers`, and then of each looped stack.
    """
    transfers = [t for t in plan.transfers if t.buffer not in program.hosted]
    taken = [(t.start, t.back) for t in transfers]
    taken += [(plan.order.index(program.producer[b]), len(plan.order)) for b in plan.looped]
    names = [f"transfer of buffer {t.buffer}" for t in transfers]
    names += [f"looped buffer {b}" for b in plan.looped]
    if len(taken) != len(extents):
        return [f"{len(extents)} slots for {len(taken)} tensors"]
    broken = []
    slots = sorted(zip(extents, taken, names, strict=True))
    for i, ((_, high), (start, back), a) in enumerate(slots):
        for (low, _), (leaves, returns), b in slots[i + 1 :]:
            if low >= high:
                break
            if back >= leaves and returns >= start:
                broken.append(
                    f"{a} and {b} share bytes, and neither is back before the other leaves"
                )
    return broken


def peak_by_definition(
    program: Program, order: tuple[int, ...], transfers: tuple[Transfer, ...] = ()
) -> int:
    """The peak in bytes, straight from the definition."""
    live = live_by_definition(program, order, transfers)
    return max(live, default=program.resident_nbytes)


def live_by_definition(
    program: Program, order: tuple[int, ...], transfers: tuple[Transfer, ...] = ()
) -> list[int]:
    """Bytes live at each position, straight from the definition: O(n²), for tests.

    A version of a buffer is live at a position if it was made at or before it and is read at or
    after it, with no other version made in between, and it is not away at that position.
    """
    away = lambda b, p: any(t.buffer == b and t.gone <= p < t.fetch for t in transfers)
    found: list[int] = []
    uses: dict[int, list[tuple[int, bool]]] = {}
    for position, s in enumerate(order):
        for b in program.steps[s].reads:
            uses.setdefault(b, []).append((position, False))
        for b in program.steps[s].writes:
            uses.setdefault(b, []).append((position, True))

    def span(b: int, position: int) -> tuple[int, int] | None:
        """First and last position of the version of `b` that is live at `position`."""
        written = [p for p, is_write in uses[b] if is_write and p <= position]
        if not written:
            return None
        remade = min((p for p, is_write in uses[b] if is_write and p > written[-1]), default=None)
        reads = [
            p
            for p, is_write in uses[b]
            if not is_write and p > written[-1] and (remade is None or p <= remade)
        ]
        last = max(reads, default=written[-1])
        return (written[-1], last) if last >= position else None

    for position, s in enumerate(order):
        step = program.steps[s]
        total = program.resident_nbytes + step.workspace
        spans = {}
        for b in uses:
            if not program.is_resident[b]:
                live = span(b, position)
                if live is not None and not away(b, position):
                    spans[b] = live
                    total += program.buffers[b].nbytes
            elif b in program.hosted:
                used_at = [p for p, _ in uses[b]]
                first, last = used_at[0], used_at[-1]
                for t in transfers:
                    if t.buffer == b and b in program.inputs:
                        first = t.fetch
                    elif t.buffer == b:
                        last = max(last, t.gone - 1)
                if first <= position <= last:
                    total += program.buffers[b].nbytes
        used: set[int] = set()
        for r, w in step.in_place:
            dies = r in spans and spans[r][1] == position
            if dies and not program.is_resident[w] and not {r, w} & used:
                used |= {r, w}
                total -= program.buffers[w].nbytes
        found.append(total)
    return found
