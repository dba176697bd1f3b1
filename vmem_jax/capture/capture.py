"""capture: a flat jaxpr of a whole training step -> Program, and the way back to its equations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from vmem_jax import jax_compat as compat
from vmem_jax.capture.batch import Batch
from vmem_jax.capture.convolutions import match, match_epilogue
from vmem_jax.capture.cpu import cpu_workspace
from vmem_jax.capture.donations import aliases, hosted_values
from vmem_jax.capture.exact import Applied, apply_exact_rules
from vmem_jax.capture.flatten import drop_dead, flatten
from vmem_jax.capture.fuse import Kernel, fuse
from vmem_jax.capture.locations import layer_of
from vmem_jax.capture.loop_pairs import Pair
from vmem_jax.capture.loop_segments import Segments, segmented
from vmem_jax.capture.loops import stacks
from vmem_jax.capture.primitives import (
    Class,
    aligned,
    class_of,
    computed_in,
    flops,
    is_array,
    nbytes,
    workspace,
)
from vmem_jax.capture.shards import Shards, follow_shards
from vmem_jax.capture.sub_batches import SubBatches, divided
from vmem_jax.capture.ties import COMPARISONS
from vmem_jax.capture.traffic import touched_nbytes
from vmem_jax.capture.updates import Stacked, updated_in_loops
from vmem_jax.core.body import body_nbytes
from vmem_jax.core.paired import PairedLoop
from vmem_jax.core.program import BEGIN, END, Buffer, Kind, Phase, Program, Step
from vmem_jax.jax_compat import ClosedJaxpr, Var

_ON_CPU = frozenset(("conv_general_dilated",))
_ON_GPU = _ON_CPU | {
    "carried_product",
    "dot_general",
    "dot_product_attention_bwd_wrapper",
    "dot_product_attention_fwd_wrapper",
}
"""What a library computes. Its result is an element of a tuple, with a workspace, on a GPU, and XLA
reuses the memory of no such element for what reads it."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What is known of the inputs of a step.

    Attributes:
      names: the user's name of each, "state.params['conv1']['kernel']".
      donated: for each whether the caller gives it up.
      shardings: the `jax.sharding.Sharding` of each; none for those on one device.
      hosted: for each in host memory its index, and that of the output that goes there again.
      platform: "cpu" where XLA's CPU compiler compiles the step.
    """

    names: tuple[str, ...] = ()
    donated: tuple[bool, ...] = ()
    shardings: tuple[Any, ...] = ()
    hosted: tuple[tuple[int, int | None], ...] = ()
    platform: str = ""


@dataclasses.dataclass(frozen=True)
class Captured:
    """A step and its Program.

    Attributes:
      flat: the jaxpr without calls that `Step.equations` index.
      program: the same with JAX taken out.
      variables: the variable of `flat` of every buffer.
      shards: how its values are split over its devices.
      applied: the exact-residual rules that were applied to get `flat`.
      inputs: what is known of its inputs.
      separate: `flat` with all updates behind the loops that make their gradients; what is divided
        into sub-batches.
      sub_batches: how its batch runs in parts; None where it runs as a whole. Then `flat` is of one
        of them.
      stacked: gradients of loops that exist all at once.
    """

    flat: ClosedJaxpr
    program: Program
    variables: tuple[Var, ...]
    shards: Shards
    applied: tuple[Applied, ...]
    inputs: Inputs
    separate: ClosedJaxpr
    sub_batches: SubBatches | None = None
    stacked: tuple[Stacked, ...] = ()

    def rewritten(
        self,
        separate: ClosedJaxpr,
        kept: tuple[tuple[int, ...], ...] | None = None,
        segments: tuple[tuple[int, ...], ...] | None = None,
        divided_loops: Sequence[Segments] = (),
        bodies: Callable[[ClosedJaxpr], ClosedJaxpr] = lambda flat: flat,
    ) -> Captured:
        """The same step, which must run as a whole, by other equations.

        Args:
          separate: they, as `Captured.separate` has them.
          kept, segments: as `Program` has them.
          divided_loops: the loops that run in segments.
          bodies: gives the loops of `flat` other bodies that compute the same.
        """
        given = self.inputs
        separate = drop_dead(separate)
        flat, stacked = updated_in_loops(separate, given.donated, given.hosted, given.shardings)
        flat, separate = (segmented(each, divided_loops) for each in (flat, separate))
        captured = _captured(bodies(flat), separate, self.applied, given, None)
        return dataclasses.replace(captured, stacked=stacked)._keeping(kept, segments, self.program)

    def _keeping(
        self,
        kept: tuple[tuple[int, ...], ...] | None,
        segments: tuple[tuple[int, ...], ...] | None,
        like: Program,
    ) -> Captured:
        """The same with these stacks, and with the logits and convolutions of `like`."""
        program = dataclasses.replace(
            self.program,
            kept=kept,
            segments=segments,
            logit_chunks=like.logit_chunks,
            carried=like.carried,
        )
        return dataclasses.replace(self, program=program)

    def in_sub_batches(
        self,
        batch: Batch,
        count: int,
        size: int | None = None,
        bodies: Callable[[ClosedJaxpr], ClosedJaxpr] = lambda flat: flat,
    ) -> Captured:
        """The same step, which must run as a whole, in at most `count` sub-batches; `bodies` as
        `rewritten` has it, `size` as `divided`."""
        if count == 1:
            return self
        flat, sub_batches = divided(self.separate, batch, count, size)
        parts = _captured(bodies(flat), flat, self.applied, self.inputs, sub_batches)
        ours = self.program
        return parts._keeping(ours.kept, ours.segments, ours)

    def with_compressed(
        self, flat: ClosedJaxpr, compressed: tuple[tuple[int, int], ...]
    ) -> Captured:
        """The same step with the equations of `flat`, in which `compressed` is."""
        flat = drop_dead(flat)
        other = _captured(flat, self.separate, self.applied, self.inputs, self.sub_batches)
        program = dataclasses.replace(other.program, compressed=compressed)
        return dataclasses.replace(other, program=program, stacked=self.stacked)

    def of(self, flat: ClosedJaxpr) -> Captured:
        """The same for `flat`, which has the same equations on other shapes."""
        ours, theirs = compat.open_jaxpr(self.flat), compat.open_jaxpr(flat)
        twin = dict(zip(ours.invars, theirs.invars, strict=True))
        twin.update(zip(ours.constvars, theirs.constvars, strict=True))
        for a, b in zip(ours.eqns, theirs.eqns, strict=True):
            twin.update(zip(a.outvars, b.outvars, strict=True))
        variables = tuple(twin[v] for v in self.variables)
        return dataclasses.replace(self, flat=flat, variables=variables)

    def moved_by_the_compiler(self) -> Captured:
        """The same where the compiler itself moves buffers: it splits them as it likes, so that
        every array is movable, and it takes no part in a loop, so that nothing is a stack."""
        if self.sub_batches is not None:
            return self
        buffers = tuple(
            dataclasses.replace(buffer, movable=is_array(v.aval), slices=1)
            for buffer, v in zip(self.program.buffers, self.variables, strict=True)
        )
        program = dataclasses.replace(self.program, buffers=buffers)
        return dataclasses.replace(self, program=program)


def capture(
    closed: ClosedJaxpr,
    input_names: Sequence[str] = (),
    donated: Sequence[bool] = (),
    shardings: Sequence[Any] = (),
    hosted: Sequence[tuple[int, int | None]] = (),
    platform: str = "",
) -> Captured:
    """Captures the step `closed`, as one of its devices runs it.

    Args:
      closed: the jaxpr of the step after differentiation, calls and all.
      input_names: the user's name of each input, "state.params['conv1']['kernel']".
      donated: for each input whether the caller gives it up.
      shardings: the `jax.sharding.Sharding` of each input; none for those on one device.
      hosted: for each input in host memory its index, and that of the output that goes there again.
      platform: that it is compiled for; on "cpu" XLA copies what some convolutions take.
    """
    flat, applied = apply_exact_rules(flatten(closed))
    inputs = Inputs(tuple(input_names), tuple(donated), tuple(shardings), tuple(hosted), platform)
    separate = drop_dead(flat)
    flat, stacked = updated_in_loops(separate, inputs.donated, inputs.hosted, inputs.shardings)
    captured = _captured(flat, separate, applied, inputs, None)
    return dataclasses.replace(captured, stacked=stacked)


def capture_pair(pair: Pair, outside: Shards | None = None) -> tuple[PairedLoop, tuple[Var, ...]]:
    """One iteration of the two loops of `pair`, and the variable of `pair.body` of every buffer.

    Args:
      outside: how the values of the step are split over its devices.
    """
    given = pair.given
    groups = (given.consts, given.slices, given.forward, given.backward)
    values = {v: a for group in groups for v, a in group.items()}
    shards = None if outside is None else outside.within(pair.body, values, given.slices)
    captured = _captured(pair.body, pair.body, (), Inputs(), None, _boundary(pair), shards)
    index = {v: b for b, v in enumerate(captured.variables)}
    buffers = lambda atoms: frozenset(index[a] for a in atoms if isinstance(a, Var))
    results = lambda made: buffers(a for a, _ in (*made.carried, *made.stacked))
    carried = zip(given.forward, (a for a, _ in pair.forward_made.carried), strict=True)
    loop = PairedLoop(
        program=captured.program,
        length=pair.length,
        given=buffers({*given.consts, *given.slices} - given.late),
        carried=buffers(given.forward),
        late=buffers(given.late),
        made=results(pair.forward_made),
        returned=results(pair.backward_made),
        carries=tuple((index[v], index[a] if isinstance(a, Var) else -1) for v, a in carried),
    )
    return loop, captured.variables


def _boundary(pair: Pair) -> int | None:
    """The first equation of the body of `pair` that depends on what only its second loop has."""
    for i, eqn in enumerate(compat.open_jaxpr(pair.body).eqns):
        if any(v in pair.late for v in eqn.outvars):
            return i
    return None


def _captured(
    flat: ClosedJaxpr,
    separate: ClosedJaxpr,
    applied: tuple[Applied, ...],
    given: Inputs,
    sub_batches: SubBatches | None,
    boundary: int | None = None,
    shards: Shards | None = None,
) -> Captured:
    """The Program of `flat`, in which all exact-residual rules are applied and updates are moved.

    Args:
      boundary: as `fuse` has it.
      shards: how its values are split, where its arguments' shardings do not say it.
    """
    opened = compat.open_jaxpr(flat)
    eqns = opened.eqns
    kernels = fuse(flat, boundary)
    shards = follow_shards(flat, given.shardings) if shards is None else shards
    slices = stacks(flat)

    inputs = [*opened.invars, *opened.constvars]
    names = [*given.names] or [f"argument {i}" for i in range(len(opened.invars))]
    names += [f"constant {i}" for i in range(len(opened.constvars))]
    variables: list[Var] = [*inputs, *(v for k in kernels for v in k.writes)]
    index = {v: b for b, v in enumerate(variables)}
    phases = _phases(kernels, eqns, index)

    # outputs in order, each buffer once; a literal output is no buffer
    outputs = tuple(dict.fromkeys(index[a] for a in opened.outvars if isinstance(a, Var)))
    kinds = _kinds(kernels, phases, index, len(opened.invars), len(inputs), set(outputs))
    writer = {v: k for k in kernels for v in k.writes}
    buffers = []
    for b, v in enumerate(variables):
        if b < len(inputs):
            label = f"{names[b]} {v.aval.str_short()}"
        else:
            root = eqns[writer[v].root]
            boundary = root.primitive.name in (BEGIN, END)
            where = "" if boundary else layer_of(root)  # a total is no layer's
            label = f"{where or root.primitive.name} {v.aval.str_short()}"
        movable = is_array(v.aval) and (shards.device_count == 1 or shards.spec(v) is not None)
        depth = slices.get(v, 1) if movable and shards.are_slices_whole(v) else 1
        buffers.append(Buffer(nbytes(v.aval) // shards.count(v), kinds[b], label, movable, depth))

    maker = {v: eqn for eqn in eqns for v in eqn.outvars}
    # the library returns what it convolves in a tuple, whatever is fused behind: XLA writes over no
    # part of one
    libraries = _ON_CPU if given.platform == "cpu" else _ON_GPU
    from_library = {
        v
        for kernel in kernels
        if eqns[kernel.root].primitive.name in libraries
        for v in kernel.writes
    }
    # of a library's clamp and a mask of it XLA would compare what the clamp is given: the library
    # returns that, and the clamp's result and the mask are written behind it; a barrier keeps it
    masks = [eqn for eqn in eqns if eqn.primitive.name in COMPARISONS]
    compared = {v for eqn in masks for v in eqn.invars if isinstance(v, Var)}
    steps = [
        _step(kernel, phase, eqns, index, shards, maker, from_library, compared)
        for kernel, phase in zip(kernels, phases, strict=True)
    ]
    if given.platform == "cpu":
        size = lambda atom: (
            nbytes(atom.aval) // (shards.count(atom) if isinstance(atom, Var) else 1)
        )
        looped = sub_batches is not None
        beside = [cpu_workspace(eqns[kernel.root], size, looped=looped) for kernel in kernels]
        padded = [0 if s.convolution is None else s.convolution.padded_nbytes for s in steps]
        steps = [  # XLA:CPU pads nothing in memory
            dataclasses.replace(step, workspace=step.workspace + more - less)
            for step, more, less in zip(steps, beside, padded, strict=True)
        ]
    if sub_batches is not None:
        steps = _repeated(steps, sub_batches.count)
        buffers = _within(buffers, steps)
    for b in _carried_into_results(steps, len(inputs), set(outputs)):
        buffers[b] = dataclasses.replace(buffers[b], nbytes=0, movable=False)
    in_host_memory = hosted_values(flat, given.hosted)
    program = Program(
        buffers=tuple(buffers),
        steps=tuple(steps),
        inputs=tuple(range(len(inputs))),
        outputs=outputs,
        aliases=tuple(
            (index[i], index[o]) for i, o in aliases(flat, given.donated, in_host_memory)
        ),
        hosted=tuple(sorted(index[v] for v in in_host_memory)),
        sub_batch_size=None if sub_batches is None or sub_batches.is_even else sub_batches.size,
    )
    every = tuple(variables)
    found = Captured(flat, program, every, shards, applied, given, separate, sub_batches)
    if sub_batches is None or sub_batches.last is None:
        return found
    smaller = tuple(nbytes(v.aval) for v in found.of(sub_batches.last).variables)
    return dataclasses.replace(found, program=dataclasses.replace(program, last_nbytes=smaller))


def _carried_into_results(steps: Sequence[Step], inputs: int, outputs: set[int]) -> set[int]:
    """The buffers that only exist to be carried by loops until they are results of the step: they are
    where these will be, and take nothing beside them."""
    readers: dict[int, int] = {}
    for step in steps:
        for b in step.reads:
            readers[b] = readers.get(b, 0) + 1
    found: set[int] = set()
    for step in reversed(steps):
        if step.op == "scan":
            same = [r for r, w in step.in_place if w in outputs or w in found]
            found.update(r for r in same if inputs <= r and readers[r] == 1 and r not in outputs)
    return found


def _repeated(steps: Sequence[Step], count: int) -> list[Step]:
    """`steps` with those between the boundaries repeated `count` times."""
    ops = [step.op for step in steps]
    begin, end = ops.index(BEGIN), ops.index(END)
    return [
        dataclasses.replace(step, times=count) if begin < s < end else step
        for s, step in enumerate(steps)
    ]


def _within(buffers: Sequence[Buffer], steps: Sequence[Step]) -> list[Buffer]:
    """`buffers`, of which only those can move that are of one sub-batch alone."""
    inside = {b for step in steps if step.times > 1 for b in step.writes}
    outside = {b for step in steps if step.times == 1 for b in (*step.reads, *step.writes)}
    return [
        dataclasses.replace(buffer, movable=buffer.movable and b in inside - outside, slices=1)
        for b, buffer in enumerate(buffers)
    ]


def _phases(
    kernels: Sequence[Kernel], eqns: Sequence[compat.JaxprEqn], index: dict[Var, int]
) -> list[Phase]:
    """Backward: AD says so. Update: neither differentiated nor before any backward kernel."""
    after_backward: set[Var] = set()
    phases = []
    for kernel in kernels:
        stack = compat.name_stack(eqns[kernel.root])
        late = any(v in after_backward for v in kernel.reads)
        if "transpose(" in stack:
            phase = Phase.BACKWARD
        elif late and "jvp(" not in stack:
            phase = Phase.UPDATE
        else:
            phase = Phase.FORWARD
        if late or phase is Phase.BACKWARD:
            after_backward.update(kernel.writes)
        phases.append(phase)
    return phases


def _kinds(
    kernels: Sequence[Kernel],
    phases: Sequence[Phase],
    index: dict[Var, int],
    arguments: int,
    inputs: int,
    outputs: set[int],
) -> dict[int, Kind]:
    """What every buffer holds, derived from who reads it."""
    read_in: dict[int, set[Phase]] = {}
    kinds: dict[int, Kind] = {}
    for kernel, phase in zip(kernels, phases, strict=True):
        for v in kernel.reads:
            read_in.setdefault(index[v], set()).add(phase)
        for v in kernel.writes:
            made = Kind.ACTIVATION if phase is Phase.FORWARD else Kind.GRADIENT
            kinds[index[v]] = Kind.OUTPUT if index[v] in outputs else made
    for b in range(inputs):
        where = read_in.get(b, set())
        if b >= arguments:
            kinds[b] = Kind.CONSTANT
        elif Phase.UPDATE not in where:
            kinds[b] = Kind.BATCH
        else:
            kinds[b] = Kind.PARAMETER if Phase.FORWARD in where else Kind.OPTIMISER
    return kinds


def _step(
    kernel: Kernel,
    phase: Phase,
    eqns: Sequence[compat.JaxprEqn],
    index: dict[Var, int],
    shards: Shards,
    maker: dict[Var, compat.JaxprEqn],
    from_library: set[Var],
    compared: set[Var],
) -> Step:
    root = eqns[kernel.root]
    matched = match(root, maker) if shards.device_count == 1 else None
    convolution = None if matched is None else matched.convolution
    if matched is not None:
        behind = match_epilogue(matched, kernel.equations, kernel.root, eqns, maker)
        if behind is not None:
            convolution = matched.convolution.with_epilogue(behind.epilogue)
    size = lambda v: nbytes(v.aval) // shards.count(v)
    padded = 0 if convolution is None else convolution.padded_nbytes
    own = [eqns[i] for i in kernel.equations if class_of(eqns[i]) is not Class.VIEW]
    fusible = class_of(root) is not Class.HEAVY
    reads = tuple(index[v] for v in kernel.reads)
    writes = tuple(index[v] for v in kernel.writes)
    values = (*kernel.reads, *kernel.writes)
    sizes = {index[v]: size(v) for v in values}
    gathered = sum(nbytes(v.aval) for v in shards.gathered(root))
    body = _body(root, shards)
    own_nbytes = workspace(root) if body is None else body_nbytes(body)
    in_place: list[tuple[int, int]] = []
    apart = 0  # bytes of what is made before it is added to a total
    inside = sum(map(size, _inside(kernel, eqns)))
    has_epilogue = _has_epilogue(kernel, eqns)
    boundary = root.primitive.name in (BEGIN, END)
    if boundary:  # its results are its operands
        outs = root.outvars[1:] if root.primitive.name == BEGIN else root.outvars
        pairs = zip(root.invars, outs, strict=False)
        in_place = [(index[r], index[w]) for r, w in pairs if isinstance(r, Var) and r in index]
    elif class_of(root) in (Class.FUSIBLE, Class.VIEW):
        given = [index[v] for v in kernel.reads if v not in from_library]
        in_place = [(r, w) for w in writes for r in given if sizes[r] == sizes[w]]
    elif root.primitive.name == "scan":  # what it carries
        consts, carry = compat.scan_counts(root)
        pairs = zip(root.invars[consts : consts + carry], root.outvars, strict=False)
        in_place = [
            (index[r], index[w])
            for r, w in pairs
            if isinstance(r, Var) and r in index and w in index
        ]
    elif root.primitive.name in ("dynamic_update_slice", "scatter", "scatter-add", "scatter_add"):
        in_place = [(r, w) for w in writes[:1] for r in reads[:1] if sizes[r] == sizes[w]]
    else:  # a sum over samples that is added to a total where it is made
        total = lambda v: v in maker and maker[v].primitive.name == BEGIN
        given = [index[v] for v in kernel.reads if total(v)]
        in_place = [(r, w) for w in writes for r in given if sizes[r] == sizes[w]]
        # XLA adds it in a kernel of its own, which is timed with this one
        apart = sum(sizes[w] for _, w in in_place) if class_of(root) is Class.HEAVY else 0
    return Step(
        reads=reads,
        writes=writes,
        equations=kernel.equations,
        op=root.primitive.name,
        phase=phase,
        fusible=fusible,
        flops=sum(flops(eqn) // shards.work(eqn) for eqn in own),
        dtype="" if fusible else computed_in(root),
        aligned=aligned(root),
        nbytes=0 if boundary else touched_nbytes(kernel, eqns, size),
        workspace=inside if fusible else own_nbytes + gathered + apart + padded + inside,
        pure=not boundary and not any(eqns[i].effects for i in kernel.equations),
        in_place=tuple(in_place),
        layer=layer_of(root) or _layer_of_loop(body),
        source=compat.user_line(root),
        convolution=convolution,
        epilogue_nbytes=2 * sum(sizes[w] for w in writes) if has_epilogue else 0,
        compared=tuple(index[v] for v in kernel.writes if has_epilogue and v in compared),
        tied=tuple(index[v] for v in kernel.tied),
        body=() if body is None else body.steps,
        length=root.params["length"] if root.primitive.name == "scan" else 1,
        batched=root.primitive.name == "dot_general" and any(root.params["dimension_numbers"][1]),
    )


def capture_body(eqn: compat.JaxprEqn, outside: Shards | None = None) -> Captured:
    """An iteration of the scan `eqn`.

    Args:
      outside: how the values of the step are split over its devices.
    """
    body = flatten(eqn.params["jaxpr"])
    inputs = compat.open_jaxpr(body).invars
    values = dict(zip(inputs, eqn.invars, strict=True))
    slices = inputs[sum(compat.scan_counts(eqn)) :]
    shards = None if outside is None else outside.within(body, values, slices)
    return _captured(body, body, (), Inputs(), None, None, shards)


def _body(eqn: compat.JaxprEqn, shards: Shards) -> Program | None:
    """An iteration of `eqn`, if that is a scan."""
    return capture_body(eqn, shards).program if eqn.primitive.name == "scan" else None


def _layer_of_loop(body: Program | None) -> str:
    """The layers of the steps of a body by the first parts of their names, "attention, mlp"."""
    steps = () if body is None else body.steps
    names = dict.fromkeys(step.layer.split("/")[0] for step in steps if step.layer)
    return ", ".join(names)


def _inside(kernel: Kernel, eqns: Sequence[compat.JaxprEqn]) -> set[Var]:
    """What heavy equations of a tie make and read that is no result or operand of it."""
    if not kernel.tied:
        return set()
    heavy = [eqns[i] for i in kernel.equations if class_of(eqns[i]) is Class.HEAVY]
    values = {a for eqn in heavy for a in (*eqn.invars, *eqn.outvars) if isinstance(a, Var)}
    return values.difference(kernel.reads, kernel.writes)


def _has_epilogue(kernel: Kernel, eqns: Sequence[compat.JaxprEqn]) -> bool:
    root = eqns[kernel.root]
    if class_of(root) is not Class.HEAVY or kernel.writes == tuple(root.outvars) or kernel.tied:
        return False
    behind = [eqns[i] for i in kernel.equations if i > kernel.root]
    return any(class_of(eqn) is not Class.VIEW for eqn in behind)
