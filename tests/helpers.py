"""Tiny Programs without JAX: builders of well-known shapes, and random ones for hypothesis."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from hypothesis import strategies as st

from vmem_jax.core.cards import CARDS
from vmem_jax.core.costs import Costs
from vmem_jax.core.plan import Plan
from vmem_jax.core.program import Buffer, Kind, Phase, Program, Step
from vmem_jax.core.schedule import Do, Event, actions

FORWARD, BACKWARD, UPDATE = Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE

FAST = dataclasses.replace(CARDS["cpu"].machine, link_out=1e12, link_in=1e12, link_both=2e12)
"""A machine whose link hides everything, so that plans move rather than recompute."""


class Builder:
    """Writes a Program down buffer by buffer and step by step."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.steps: list[Step] = []
        self.inputs: list[int] = []

    def buffer(self, nbytes: int, kind: Kind = Kind.ACTIVATION) -> int:
        self.buffers.append(Buffer(nbytes, kind, f"b{len(self.buffers)}"))
        return len(self.buffers) - 1

    def input(self, nbytes: int, kind: Kind = Kind.PARAMETER) -> int:
        b = self.buffer(nbytes, kind)
        self.inputs.append(b)
        return b

    def step(
        self,
        reads: Sequence[int],
        nbytes: int | Sequence[int],
        phase: Phase = FORWARD,
        *,
        op: str = "op",
        fusible: bool = False,
        workspace: int = 0,
        pure: bool = True,
        in_place: bool = False,
        flops: int = 1,
    ) -> int | tuple[int, ...]:
        """Adds a step that writes buffers of `nbytes`; returns what it writes."""
        sizes = (nbytes,) if isinstance(nbytes, int) else tuple(nbytes)
        kind = Kind.ACTIVATION if phase is FORWARD else Kind.GRADIENT
        writes = tuple(self.buffer(n, kind) for n in sizes)
        pairs = ()
        if in_place:
            same = [r for r in reads if self.buffers[r].nbytes == sizes[0]]
            pairs = tuple((r, writes[0]) for r in same)
        self.steps.append(
            Step(
                reads=tuple(dict.fromkeys(reads)),
                writes=writes,
                equations=(len(self.steps),),
                op=op,
                phase=phase,
                fusible=fusible,
                flops=flops,
                dtype="float32",
                aligned=True,
                nbytes=sum(sizes) + sum(self.buffers[b].nbytes for b in set(reads)),
                workspace=workspace,
                pure=pure,
                in_place=pairs,
                layer=f"layer{len(self.steps)}",
                source=f"model.py:{len(self.steps) + 1}",
            )
        )
        return writes[0] if isinstance(nbytes, int) else writes

    def program(self, outputs: Sequence[int], aliases: Sequence[tuple[int, int]] = ()) -> Program:
        return Program(
            tuple(self.buffers),
            tuple(self.steps),
            tuple(self.inputs),
            tuple(dict.fromkeys(outputs)),
            tuple(aliases),
        )


def unit_costs(program: Program) -> Costs:
    """Every step takes one second: seconds count steps."""
    return Costs("unit", (1.0,) * len(program.steps))


def plan_of(program: Program, order: Sequence[int], **changes: object) -> Plan:
    """A fenced plan with that order and made-up predictions."""
    plan = Plan(program.fingerprint, "drawn", tuple(order), True, None, 0, 0.0)
    return dataclasses.replace(plan, **changes)  # type: ignore[arg-type]


def chain(n: int, size: int = 1, parameters: int = 0) -> Program:
    """n equal layers, a loss, and the way back.

    Steps 0…n-1 are the layers, n the loss, n+1…2n the backward steps from the last layer to the
    first: each reads the cotangent and the input of its layer, and writes the next cotangent and,
    with `parameters`, the new parameters, whose memory is the old ones'.
    """
    b = Builder()
    weights = [b.input(parameters) for _ in range(n)] if parameters else []
    x = b.input(size, Kind.BATCH)
    values = [x]
    for i in range(n):
        values.append(b.step([values[-1], *weights[i : i + 1]], size, FORWARD))
    cotangent = b.step([values[-1]], size, FORWARD)
    outputs, aliases = [], []
    for i in reversed(range(n)):
        reads = [cotangent, values[i], *weights[i : i + 1]]
        if parameters:
            cotangent, new = b.step(reads, (size, parameters), BACKWARD)
            outputs.append(new)
            aliases.append((weights[i], new))
        else:
            cotangent = b.step(reads, size, BACKWARD)
    return b.program([cotangent, *outputs], aliases)


def fan(width: int, size: int = 4) -> Program:
    """One value that `width` branches read; the backward pass reads every branch again."""
    b = Builder()
    x = b.input(size, Kind.BATCH)
    stem = b.step([x], size)
    branches = [b.step([stem], size) for _ in range(width)]
    tips = [b.step([v], 1) for v in branches]
    loss = b.step(tips, 1)
    grads = [b.step([loss, v, stem], size, BACKWARD) for v in reversed(branches)]
    return b.program([b.step(grads, 1, BACKWARD)])


def join(width: int, size: int = 4) -> Program:
    """`width` values made one after another, that one step then reads together, and back."""
    b = Builder()
    x = b.input(size, Kind.BATCH)
    parts = [b.step([x], size) for _ in range(width)]
    joined = b.step(parts, width * size)
    loss = b.step([joined], 1)
    cotangent = b.step([loss, joined], width * size, BACKWARD)
    grads = [b.step([cotangent, v], size, BACKWARD) for v in parts]
    return b.program([b.step(grads, 1, BACKWARD)])


def u_shape(depth: int, size: int = 8) -> Program:
    """U-Net: `depth` halvings, each read again on the way up, and the backward pass of both."""
    b = Builder()
    x = b.input(size * 2**depth, Kind.BATCH)
    skips, forward = [], []
    for i in range(depth):
        y = b.step([x], size * 2 ** (depth - i))
        forward.append((y, [x]))
        skips.append(y)
        x = b.step([y], size * 2 ** (depth - i - 1))
        forward.append((x, [y]))
    for i in reversed(range(depth)):
        reads = [x, skips[i]]
        x = b.step(reads, size * 2 ** (depth - i))
        forward.append((x, reads))
    cotangent = b.step([x], size * 2**depth)
    gradients = {x: cotangent}
    for y, reads in reversed(forward):
        incoming = gradients[y]
        for r in reads:
            nbytes = b.buffers[r].nbytes
            own = b.step([incoming, r], nbytes, BACKWARD)
            if r in gradients:
                own = b.step([gradients[r], own], nbytes, BACKWARD, fusible=True, in_place=True)
            gradients[r] = own
    return b.program([gradients[forward[0][1][0]]])


def two_losses(n: int, size: int = 4) -> Program:
    """A chain with a head in the middle: two losses whose cotangents meet there."""
    b = Builder()
    values = [b.input(size, Kind.BATCH)]
    for _ in range(n):
        values.append(b.step([values[-1]], size))
    middle = n // 2
    head = b.step([values[middle]], size)
    first, second = b.step([head], 1), b.step([values[-1]], 1)
    extra = b.step([b.step([first, head], size, BACKWARD), values[middle]], size, BACKWARD)
    cotangent = b.step([second, values[-1]], size, BACKWARD)
    for i in reversed(range(n)):
        if i + 1 == middle:
            cotangent = b.step([cotangent, extra], size, BACKWARD, in_place=True)
        cotangent = b.step([cotangent, values[i]], size, BACKWARD)
    return b.program([cotangent, first, second])


SHAPES: dict[str, Program] = {
    "chain": chain(12, 4, parameters=1),
    "fan": fan(6),
    "join": join(6),
    "u_shape": u_shape(3),
    "two_losses": two_losses(8),
}
"""One small program of every builder."""


SIZES, BOOLEANS = st.integers(1, 16), st.booleans()
upto = functools.cache(lambda most: st.integers(0, most))
"""Numbers from 0. What is made anew for each draw takes longer to make than to draw from."""


def needed_layers(program: Program) -> set[str]:
    """The layers of the steps that the outputs or an effect need."""
    steps = program.steps
    waiting = [program.producer[b] for b in program.outputs]
    waiting += [s for s, step in enumerate(steps) if not step.pure]
    found: set[int] = set()
    while waiting:
        s = waiting.pop()
        if s >= 0 and s not in found:
            found.add(s)
            waiting += [program.producer[r] for r in steps[s].reads]
    return {steps[s].layer for s in found}


@st.composite
def programs(draw: st.DrawFn, layers: int = 8, pure: bool = False) -> Program:
    """A valid random training step; without effects and donation if `pure`.

    A forward graph over random earlier values, a mirrored backward pass that reads the cotangent
    and random forward values, updates of donated parameters; some steps are impure, have a
    workspace, or write in place.
    """
    b = Builder()
    parameters = [b.input(draw(SIZES)) for _ in range(draw(upto(3)))]
    values = [b.input(draw(SIZES), Kind.BATCH)]
    rare = lambda: draw(upto(9)) == 0
    one_of = lambda pool: pool[draw(upto(len(pool) - 1))]

    def some(pool: Sequence[int], most: int) -> list[int]:
        count = draw(upto(most)) if pool else 0
        return [*dict.fromkeys(one_of(pool) for _ in range(count))]

    def options() -> dict:
        return {
            "workspace": draw(SIZES) if rare() else 0,
            "pure": pure or not rare(),
            "in_place": draw(BOOLEANS),
            "fusible": draw(BOOLEANS),
            "flops": 1 + draw(upto(999)),
        }

    n = 1 + draw(upto(layers - 1))
    for _ in range(n):
        reads = [one_of(values[-3:]), *some(values, 1), *some(parameters, 1)]
        sizes = [draw(SIZES) for _ in range(1 + draw(upto(1)))]
        values += b.step(reads, sizes, FORWARD, **options())
    loss = b.step([values[-1]], 1)
    cotangent, outputs, aliases = loss, [loss], []
    free = list(parameters)
    for _ in range(n):
        reads = [cotangent, *some(values, 2)]
        cotangent = b.step(reads, draw(SIZES), BACKWARD, **options())
        if free and draw(BOOLEANS):
            p = free.pop()
            gradient = b.step([cotangent, *some(values, 1)], b.buffers[p].nbytes, BACKWARD)
            new = b.step([gradient, p], b.buffers[p].nbytes, UPDATE, fusible=True, in_place=True)
            outputs.append(new)
            if not pure and draw(BOOLEANS):
                # a donated parameter is overwritten: nothing later may read it
                aliases.append((p, new))
                parameters.remove(p)
    if draw(BOOLEANS):
        outputs.append(cotangent)
    if draw(BOOLEANS):
        outputs.append(one_of(values))  # an activation, or an input given back
    return b.program(outputs, aliases)


@st.composite
def orders(draw: st.DrawFn, program: Program, repeats: int = 6) -> tuple[int, ...]:
    """A valid random order: a topological one, with pure steps run again in between."""
    waiting = set(range(len(program.steps)))
    made = set(program.inputs)
    order: list[int] = []
    ran: set[int] = set()
    gone: set[int] = set()
    overwrites = {by: i for i, by in program.overwritten_by.items()}

    def ready(s: int) -> bool:
        step = program.steps[s]
        if not set(step.reads) <= made or gone & set(step.reads):
            return False
        if not step.pure and any(e < s for e in waiting if not program.steps[e].pure):
            return False
        old = overwrites.get(s)
        return old is None or not any(r in waiting and r != s for r in program.readers[old])

    while waiting:
        able = sorted(s for s in waiting if ready(s))
        s = able[draw(upto(len(able) - 1))]
        waiting.discard(s)
        order.append(s)
        ran.add(s)
        made.update(program.steps[s].writes)
        if s in overwrites:
            gone.add(overwrites[s])
        if repeats and draw(upto(3)) == 0:
            again = sorted(
                r for r in ran if program.steps[r].pure and not gone & set(program.steps[r].reads)
            )
            if again:
                order.append(again[draw(upto(len(again) - 1))])
                repeats -= 1
    return tuple(order)


def with_barriers(program, random) -> list[Event]:
    """The steps of `program` as events, and three barriers, each with a few values made before it."""
    events = [*actions(program, range(len(program.steps)))]
    made = [w for step in program.steps for w in step.writes]
    for _ in range(3):
        at = random.randrange(len(events) + 1)
        ran = {w for e in events[:at] if e.do is Do.RUN for w in program.steps[e.index].writes}
        held = tuple(b for b in random.sample(made, min(len(made), 4)) if b in ran)
        events.insert(at, Event(Do.BARRIER, 0, buffers=held))
    return events
