"""layers: groups the steps of a Program into the layers of the papers' networks.

A traced training step has no layers, only kernels. A layer of the forward pass is one main kernel (a
convolution, a matrix product, an elementwise chain) with the statistics, random bits and cast weights
that it reads, and with the values made beside it for the backward pass alone (a mask). A kernel of
the backward pass belongs to the layer whose gradient it computes. Both follow from what steps read,
so this works for any library and for networks with forks and joins. The user's names are used only
where they belong to a single layer.

An activation that is computed inside the kernel before it (convolution, bias and ReLU are one) is not
a layer of its own.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence

from vmem_jax.core.program import Kind, Phase, Program, Step


class LayerKind(enum.StrEnum):
    """The kind of a layer. OTHER: joins, loops, lookups and everything else."""

    CONVOLUTION = "convolution"
    FULLY_CONNECTED = "fully connected"
    POOLING = "pooling"
    NORMALISATION = "normalisation"
    ACTIVATION = "activation"
    DROPOUT = "dropout"
    SOFTMAX = "softmax"
    OTHER = "other"


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """One layer; all indices are into the Program.

    Attributes:
      kind: what it does.
      name: the user's, of its main step; "" where there is none.
      forward: its steps in the forward pass, in traced order.
      backward: its steps in the backward pass, in traced order; empty where none reads anything of
        it (the gradient of a sum is the gradient itself).
      inputs: X, the feature maps that it reads of other layers, and the batch.
      outputs: Y, the feature maps that it makes for other layers, or for the caller.
      saved: the feature maps that the backward pass reads again and that no later layer reads in the
        forward pass: those of X whose last consumer this is, and what it makes for the backward pass
        alone.
    """

    kind: LayerKind
    name: str
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    saved: tuple[int, ...]


def layers(program: Program) -> tuple[Layer, ...]:
    """The layers of `program` in the order of their main steps; each forward step is in just one."""
    features = feature_maps(program)
    groups = _groups(program, features)
    home = {s: n for n, group in enumerate(groups) for s in group.steps}
    backward = _backward(program, features, groups, home)
    backward_of: list[list[int]] = [[] for _ in groups]
    for s, n in backward.items():
        backward_of[n].append(s)
    ends = set(program.outputs)
    found = []
    for n, group in enumerate(groups):
        read = _distinct(b for s in group.steps for b in program.steps[s].reads if b in features)
        made = _distinct(b for s in group.steps for b in program.steps[s].writes if b in features)
        goes_on = lambda b, n=n: b in ends or any(home.get(r, n) != n for r in program.readers[b])
        found.append(
            Layer(
                kind=_kind(program, features, group),
                name=program.steps[group.main].layer,
                forward=tuple(group.steps),
                backward=tuple(backward_of[n]),
                inputs=tuple(b for b in read if home.get(program.producer[b]) != n),
                outputs=tuple(b for b in made if goes_on(b)),
                saved=_saved(program, home, n, (*read, *made)),
            )
        )
    return tuple(found)


def feature_maps(program: Program) -> frozenset[int]:
    """The batch and what the forward pass makes of it; weights, and casts of them, are left out."""
    batch = {b for b in program.inputs if program.buffers[b].kind is Kind.BATCH}
    found = batch or set(program.inputs)
    for step in program.steps:
        if step.phase is Phase.FORWARD and not found.isdisjoint(step.reads):
            found.update(step.writes)
    return frozenset(found)


@dataclasses.dataclass
class _Group:
    """The forward steps of one layer, and which of them is the main one."""

    main: int
    steps: list[int]


def _groups(program: Program, features: frozenset[int]) -> list[_Group]:
    forward = [s for s, step in enumerate(program.steps) if step.phase is Phase.FORWARD]
    readers = {s: _forward_readers(program, s) for s in forward}
    goes_on: dict[int, bool] = {}  # whether the forward pass needs it
    for s in reversed(forward):
        step = program.steps[s]
        ends = step.is_reduction and not readers[s]
        own = step.is_heavy or ends or any(program.is_resident[w] for w in step.writes)
        goes_on[s] = own or any(goes_on[r] for r in readers[s])
    main: dict[int, int] = {}  # the main step that a step goes with
    for s in reversed(forward):
        step = program.steps[s]
        helps = _is_random(step) or step.is_reduction or features.isdisjoint(step.reads)
        onward = [r for r in readers[s] if goes_on[r]]
        if goes_on[s]:
            main[s] = main[onward[0]] if helps and onward else s
    last: int | None = None
    for s in forward:
        if main.get(s) == s:
            last = s
        elif s not in main:  # for the backward pass alone, as is what reads it
            main[s] = s if last is None else last
            last = main[s]
    found: dict[int, list[int]] = {}
    for s in forward:
        found.setdefault(main[s], []).append(s)
    return [_Group(s, found[s]) for s in sorted(found)]


def _forward_readers(program: Program, s: int) -> list[int]:
    return sorted(
        r
        for w in program.steps[s].writes
        for r in program.readers[w]
        if program.steps[r].phase is Phase.FORWARD
    )


def _is_convolution(step: Step) -> bool:
    named = step.op in ("conv_general_dilated", "micro_convolution")
    return named or step.convolution is not None


def _is_random(step: Step) -> bool:
    return step.op.startswith(("random_", "threefry", "rng_"))


def _kind(program: Program, features: frozenset[int], group: _Group) -> LayerKind:
    step = program.steps[group.main]
    ops = [program.steps[s].op for s in group.steps]
    read = [b for b in step.reads if b in features]
    if _is_convolution(step):
        return LayerKind.CONVOLUTION
    if step.op == "dot_general" and len(read) == 1:
        return LayerKind.FULLY_CONNECTED
    if step.op.startswith(("reduce_window", "select_and_gather")):
        return LayerKind.POOLING
    if not step.fusible:
        return LayerKind.OTHER
    if any(_is_random(program.steps[s]) for s in group.steps):
        return LayerKind.DROPOUT
    if "reduce_max" in ops and "reduce_sum" in ops:
        return LayerKind.SOFTMAX
    if any(program.steps[s].is_reduction for s in group.steps if s != group.main):
        return LayerKind.NORMALISATION
    return LayerKind.ACTIVATION if len(read) == 1 else LayerKind.OTHER


def _saved(
    program: Program, home: Mapping[int, int], n: int, touched: Iterable[int]
) -> tuple[int, ...]:
    """Those of `touched` that are read again later, and by no forward step of a later layer."""
    found = []
    for b in _distinct(touched):
        in_forward = [home[r] for r in program.readers[b] if r in home]
        again = len(in_forward) < len(program.readers[b])
        if again and max(in_forward, default=n) == n and not program.is_resident[b]:
            found.append(b)
    return tuple(found)


def _backward(
    program: Program,
    features: frozenset[int],
    groups: Sequence[_Group],
    home: Mapping[int, int],
) -> dict[int, int]:
    """The layer of every step of the backward pass.

    It is that of its name, where one layer alone has it; else that of what one layer alone has in
    the forward pass: its weights, statistics, masks. Else, of the layers that made or read the
    feature maps that it reads, the one in front of the layer whose gradient it continues. What reads
    gradients alone goes on with the layer that they are of.
    """
    named: dict[str, set[int]] = {}
    touched: dict[int, set[int]] = {}
    made_by: dict[int, set[int]] = {}
    for s, n in home.items():
        step = program.steps[s]
        named.setdefault(step.layer, set()).add(n)
        for b in (*step.reads, *step.writes):
            touched.setdefault(b, set()).add(n)
        for b in step.writes:
            made_by.setdefault(b, set()).add(n)
    read_by = [{b for s in group.steps for b in program.steps[s].reads} for group in groups]
    feeders = [
        {m for b in read for m in made_by.get(b, ()) if m != n} for n, read in enumerate(read_by)
    ]
    found: dict[int, int] = {}
    gradients: dict[int, tuple[int, list[int]]] = {}  # the layer that made it, and whose it may be
    for s, step in enumerate(program.steps):
        if step.phase is not Phase.BACKWARD or not groups:
            continue
        name = named.get(step.layer, set()) if step.layer else set()
        alone = [
            min(touched[b])
            for b in step.reads
            if len(touched.get(b, ())) == 1 and (b not in features or b in made_by)
        ]
        coming = sorted(gradients[b] for b in step.reads if b in gradients)
        kept = [b for b in step.reads if b in features and b in touched]
        if len(name) == 1:
            [layer] = name
        elif alone:
            layer = min(alone)
        elif kept:
            layer = _nearest([touched[b] for b in kept], coming)
        else:
            layer = coming[0][0] if coming else len(groups) - 1
        found[s] = layer
        # a loss that is no layer of its own makes the gradient of the last layer's Y
        begins = all(each == (layer, [layer]) for each in coming) and (not coming or not kept)
        of = [layer] if begins else sorted(feeders[layer])
        gradients.update(dict.fromkeys(step.writes, (layer, of)))
    return found


def _nearest(candidates: Sequence[set[int]], coming: Sequence[tuple[int, list[int]]]) -> int:
    """The layer in most of `candidates`: of those whose gradient it is that comes, else the one that
    made it, else the last."""
    votes = collections.Counter(n for each in candidates for n in each)
    if coming:
        upstream, of = coming[0]
        expected = [n for n in votes if n in of]
        if expected:
            return max(expected, key=lambda n: (votes[n], n))
        if upstream in votes:
            return upstream
    return max(votes, key=lambda n: (votes[n], n))


def _distinct(buffers: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(buffers))
