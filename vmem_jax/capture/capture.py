"""capture: a flat jaxpr of a whole training step -> Program, and the way back to its equations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from vmem_jax import jax_compat as compat
from vmem_jax.capture.all_at_once import Stacked, Whole
from vmem_jax.capture.batch import Batch
from vmem_jax.capture.body_traffic import Ends, Traffic, traffic
from vmem_jax.capture.cpu import casts_nbytes, cpu_workspace, more_in_float32
from vmem_jax.capture.dilated_convolutions import with_known_dilated
from vmem_jax.capture.donations import aliases, hosted_values
from vmem_jax.capture.equal_stacks import with_equal_stacks_merged
from vmem_jax.capture.exact import Applied, apply_exact_rules
from vmem_jax.capture.flatten import drop_dead, flatten
from vmem_jax.capture.fuse import fuse
from vmem_jax.capture.hosted_updates import with_state_in_loops
from vmem_jax.capture.inputs import UNKNOWN, Inputs
from vmem_jax.capture.kernel_gradients import with_known_kernel_gradients
from vmem_jax.capture.kernel_steps import StepMaker, libraries_of
from vmem_jax.capture.kernels import Kernel, read_by_others
from vmem_jax.capture.kinds import kinds_of, phases_of
from vmem_jax.capture.locations import layer_of
from vmem_jax.capture.loop_constants import with_constants_in_loops
from vmem_jax.capture.loop_pairs import Pair
from vmem_jax.capture.loop_segments import Segments, segmented
from vmem_jax.capture.loops import stacked_alone, stacks
from vmem_jax.capture.padding import with_padding_apart
from vmem_jax.capture.primitives import hosted_nbytes, is_array, nbytes
from vmem_jax.capture.product_workspaces import UNKNOWN_PRODUCTS, Products
from vmem_jax.capture.rounded_operands import with_operands_rounded
from vmem_jax.capture.shards import Shards, follow_shards
from vmem_jax.capture.shared_operands import products_as_one
from vmem_jax.capture.siblings import saved_by_merging
from vmem_jax.capture.small_tables import with_known_tables
from vmem_jax.capture.small_updates import with_small_updates_joined
from vmem_jax.capture.stack_layouts import with_stack_layouts
from vmem_jax.capture.stated import with_stated_splits
from vmem_jax.capture.sub_batches import Replaced, SubBatches, divided, in_parts, twins
from vmem_jax.capture.transposed_convolutions import with_known_transposed
from vmem_jax.capture.whole_rows import AsWritten, with_layouts
from vmem_jax.core.body import carried_into_results
from vmem_jax.core.convolution import Convolution
from vmem_jax.core.paired import PairedLoop
from vmem_jax.core.program import BEGIN, END, Buffer, LoopSegments, Phase, Program
from vmem_jax.jax_compat import ClosedJaxpr, Var

Bodies = Callable[[ClosedJaxpr, str], ClosedJaxpr]
"""(a flat jaxpr, the platform that it is compiled for) -> the same with other bodies of its loops."""


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
      separate: `flat` with all updates behind the loops that make their gradients.
      replaced: the equations of it that others stand for; None where there are none, or where others
        were changed since.
      sub_batches: how its batch runs in parts; None where it runs as a whole. Then `flat` is of one
        of them.
      stacked: gradients of loops that exist all at once.
      whole: stacks in host memory that come as a whole.
      misread: gradients to kernels that XLA takes for something else in the step as it was.
      written: what else it has otherwise.
    """

    flat: ClosedJaxpr
    program: Program
    variables: tuple[Var, ...]
    shards: Shards
    applied: tuple[Applied, ...]
    inputs: Inputs
    separate: ClosedJaxpr
    sub_batches: SubBatches | None = None
    replaced: Replaced | None = None
    stacked: tuple[Stacked, ...] = ()
    whole: tuple[Whole, ...] = ()
    misread: frozenset[Convolution] = frozenset()
    written: AsWritten = dataclasses.field(default_factory=AsWritten)

    @property
    def divisible(self) -> ClosedJaxpr:
        """What is divided into sub-batches: `separate`, with the equations that are replaced."""
        return self.separate if self.replaced is None else self.replaced.before

    @property
    def sliced(self) -> tuple[int, ...]:
        """The arguments in host memory that loops read by the slice."""
        invars = compat.open_jaxpr(self.flat).invars
        return tuple(i for i, _ in self.inputs.hosted if compat.is_in_host_memory(invars[i].aval))

    def rewritten(
        self,
        separate: ClosedJaxpr,
        kept: tuple[tuple[int, ...], ...] | None = None,
        segments: LoopSegments = None,
        divided_loops: Sequence[Segments] = (),
        bodies: Bodies = lambda flat, platform: flat,
    ) -> Captured:
        """The same step, which must run as a whole, by other equations.

        Args:
          separate: they, as `Captured.separate` has them.
          kept, segments: as `Program` has them.
          divided_loops: the loops that run in segments.
          bodies: gives the loops of `flat`, for a platform, other bodies that compute the same.
        """
        given = self.inputs
        separate = drop_dead(separate)
        if self.program.opened:
            assert self.sub_batches is not None, "an opened loop has iterations"
            return self.opened(separate, self.sub_batches)._keeping(kept, segments, self.program)

        def others(flat: ClosedJaxpr) -> ClosedJaxpr:
            flat = with_stack_layouts(segmented(flat, divided_loops), given.platform)
            return bodies(flat, given.platform)

        captured = _in_loops(separate, self.applied, given, others)
        captured = dataclasses.replace(captured, separate=segmented(separate, divided_loops))
        return captured._keeping(kept, segments, self.program)

    def _keeping(
        self,
        kept: tuple[tuple[int, ...], ...] | None,
        segments: LoopSegments,
        like: Program,
    ) -> Captured:
        """The same with these stacks, and with the logits and convolutions of `like`."""
        program = dataclasses.replace(
            self.program,
            kept=kept,
            segments=segments,
            logit_chunks=like.logit_chunks,
            carried=like.carried,
            summed=like.summed,
            pooled=like.pooled,
            bits=like.bits,
        )
        return dataclasses.replace(self, program=program)

    def in_sub_batches(
        self,
        batch: Batch,
        count: int,
        size: int | None = None,
        bodies: Bodies = lambda flat, platform: flat,
    ) -> Captured:
        """The same step, which must run as a whole, in at most `count` sub-batches; `bodies` as
        `rewritten` has it, `size` as `divided`."""
        if count == 1:
            return self
        # a partitioner may make a whole of what stands under a statement
        one_gpu = self.inputs.platform == "gpu" and self.shards.device_count == 1
        flat, sub_batches = divided(self.divisible, batch, count, size, one_gpu)
        ours = self.program
        if self.replaced is not None:
            flat, sub_batches, counts = self.replaced.within(flat, sub_batches)
            ours = dataclasses.replace(ours, **counts)
        given, smaller = self.inputs, sub_batches.smaller
        laid_out = lambda flat: with_stack_layouts(flat, given.platform)
        ordered = lambda flat: bodies(laid_out(flat), given.platform)
        found, why = _by_slices(flat, given, ordered)
        if smaller is not None:
            smaller, _ = _by_slices(smaller, given, laid_out, why)
            sub_batches = dataclasses.replace(sub_batches, smaller=smaller)
        parts = _captured(found, flat, self.applied, given, sub_batches)
        parts = parts._keeping(ours.kept, ours.segments, ours)
        return dataclasses.replace(parts, whole=given.whole(self.separate, why))

    def opened(self, flat: ClosedJaxpr, iterations: SubBatches) -> Captured:
        """The same step by `flat`, in which an iteration of one of its loops stands for all
        (`capture.opened_loops`)."""
        made = _captured(flat, flat, self.applied, self.inputs, iterations)
        return dataclasses.replace(made, program=dataclasses.replace(made.program, opened=True))

    def with_compressed(
        self, flat: ClosedJaxpr, compressed: tuple[tuple[int, int], ...]
    ) -> Captured:
        """The same step with the equations of `flat`, in which `compressed` is."""
        flat = drop_dead(flat)
        other = _captured(flat, self.separate, self.applied, self.inputs, self.sub_batches)
        ours = self.program
        other = other._keeping(ours.kept, ours.segments, ours)
        program = dataclasses.replace(other.program, compressed=compressed)
        return dataclasses.replace(other, program=program, stacked=self.stacked, whole=self.whole)

    def with_row_kernels(
        self, flat: ClosedJaxpr, smaller: ClosedJaxpr | None, count: int
    ) -> Captured:
        """The same step with the equations of `flat`, and of `smaller` for a smaller sub-batch, in
        which `count` kernels make something of rows."""
        parts, ours = self.sub_batches, self.program
        if parts is not None:
            parts = dataclasses.replace(parts, smaller=smaller)
        other = _captured(flat, self.separate, self.applied, self.inputs, parts)
        other = other._keeping(ours.kept, ours.segments, ours)
        program = dataclasses.replace(other.program, row_kernels=count, opened=ours.opened)
        return dataclasses.replace(
            self,
            flat=flat,
            program=program,
            variables=other.variables,
            shards=other.shards,
            sub_batches=parts,
        )

    def of(self, flat: ClosedJaxpr) -> Captured:
        """The same for `flat`, which has the same equations on other shapes."""
        twin = twins(self.flat, flat)
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
    products: Products = UNKNOWN_PRODUCTS,
) -> Captured:
    """Captures the step `closed`, as one of its devices runs it.

    Args:
      closed: the jaxpr of the step after differentiation, calls and all.
      input_names: the user's name of each input, "state.params['conv1']['kernel']".
      donated: for each input whether the caller gives it up.
      shardings: the `jax.sharding.Sharding` of each input; none for those on one device.
      hosted: for each input in host memory its index, and that of the output that goes there again.
      platform: that it is compiled for; on "cpu" XLA copies what some convolutions take.
      products: as `Inputs` has it.
    """
    flat = with_equal_stacks_merged(with_constants_in_loops(flatten(closed)))
    flat = with_operands_rounded(flat, platform)
    flat, transposed = with_known_transposed(flat, platform)
    flat, dilated = with_known_dilated(flat, platform)
    flat, misread = with_known_kernel_gradients(flat, platform)
    flat = with_padding_apart(flat, platform)
    flat, written = with_layouts(flat, platform)
    flat, tables = with_known_tables(flat, platform, shardings)
    flat, applied = apply_exact_rules(with_stated_splits(flat, shardings))
    known = tuple(input_names), tuple(donated), tuple(shardings), tuple(hosted)
    inputs = Inputs(*known, platform, products)
    separate = drop_dead(flat)
    captured = _in_loops(separate, applied, inputs, lambda flat: with_stack_layouts(flat, platform))
    written = dataclasses.replace(written, spreading={**transposed, **dilated, **tables})
    return dataclasses.replace(captured, misread=misread, written=written)


def _in_loops(
    separate: ClosedJaxpr,
    applied: tuple[Applied, ...],
    given: Inputs,
    then: Callable[[ClosedJaxpr], ClosedJaxpr],
) -> Captured:
    """The step `separate` with updates in loops, whose bodies `then` changes."""
    donated, hosted, shardings = given.donated, given.hosted, given.shardings
    flat, stacked, why = with_state_in_loops(separate, donated, hosted, shardings, then)
    captured = _captured(flat, separate, applied, given, None)
    whole = given.whole(separate, why)
    return dataclasses.replace(captured, stacked=stacked, whole=whole)


def _by_slices(
    flat: ClosedJaxpr,
    given: Inputs,
    then: Callable[[ClosedJaxpr], ClosedJaxpr],
    why: Mapping[int, str] | None = None,
) -> tuple[ClosedJaxpr, Mapping[int, str]]:
    """`flat`, which runs its batch in sub-batches, with state by slices where that can be, and for
    each argument in host memory why it comes as a whole.

    Args:
      then: changes the bodies of its loops.
      why: the reasons that are known.
    """
    if not given.hosted:
        return then(flat), {}
    found, _, reasons = with_state_in_loops(
        flat, given.donated, given.hosted, given.shardings, then, why
    )
    return found, reasons


def capture_pair(
    pair: Pair, outside: Shards | None = None, step: Inputs = UNKNOWN
) -> tuple[PairedLoop, tuple[Var, ...]]:
    """One iteration of the two loops of `pair`, and the variable of `pair.body` of every buffer.

    Args:
      outside: how the values of the step are split over its devices.
      step: what is known of the step.
    """
    given = pair.given
    shards = None if outside is None else pair.shards(outside)
    made = pair.backward_made
    captured = _captured(
        *(pair.body, pair.body, (), step.inside, None, pair.boundary, shards),
        is_body=True,
        stacked=stacked_alone([a for a, _ in made.carried], [a for a, _ in made.stacked]),
    )
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


def _captured(
    flat: ClosedJaxpr,
    separate: ClosedJaxpr,
    applied: tuple[Applied, ...],
    given: Inputs,
    sub_batches: SubBatches | None,
    boundary: int | None = None,
    shards: Shards | None = None,
    is_body: bool = False,
    stacked: Collection[Var] = (),
) -> Captured:
    """The Program of `flat`, in which all exact-residual rules are applied and updates are moved.

    Args:
      boundary: as `fuse` has it.
      shards: how its values are split, where its arguments' shardings do not say it.
      is_body: whether it is the body of a loop.
      stacked: what it makes for stacks alone.
    """
    opened = compat.open_jaxpr(flat)
    eqns = opened.eqns
    on_gpu = given.platform != "cpu"
    as_one = products_as_one(eqns, boundary) if is_body and on_gpu else ()
    parts = {i for products in as_one for i in products}
    shards = follow_shards(flat, given.shardings) if shards is None else shards
    kernels: Sequence[Kernel] = fuse(flat, boundary, given.platform, parts, shards)
    slices = stacks(flat)

    inputs = [*opened.invars, *opened.constvars]
    names = [given.name(i) for i in range(len(opened.invars))]
    names += [f"constant {i}" for i in range(len(opened.constvars))]
    phases: Sequence[Phase] = phases_of(kernels, eqns)
    updates: Mapping[Kernel, int] = {}
    in_host_memory = hosted_values(flat, given.hosted)
    if given.platform == "gpu" and not is_body and shards.device_count == 1:
        joined = with_small_updates_joined(kernels, phases, eqns, in_host_memory)
        kernels, phases, updates = joined
    variables: list[Var] = [*inputs, *(v for k in kernels for v in k.writes)]
    index = {v: b for b, v in enumerate(variables)}

    # outputs in order, each buffer once; a literal output is no buffer
    outputs = tuple(dict.fromkeys(index[a] for a in opened.outvars if isinstance(a, Var)))
    made_last = set(outputs)
    kinds = kinds_of(kernels, phases, index, len(opened.invars), len(inputs), made_last)
    writer = {v: k for k in kernels for v in k.writes}
    made = StepMaker(eqns, kernels, index, shards, given, is_body)
    buffers = []
    for b, v in enumerate(variables):
        if b < len(inputs):
            label = f"{names[b]} {v.aval.str_short()}"
        else:
            root = eqns[writer[v].root]
            is_total = root.primitive.name in (BEGIN, END)
            where = "" if is_total else layer_of(root)  # a total is no layer's
            label = f"{where or root.primitive.name} {v.aval.str_short()}"
        movable = (
            is_array(v.aval)
            and not compat.is_in_host_memory(v.aval)
            and (shards.device_count == 1 or shards.spec(v) is not None)
        )
        depth = slices.get(v, 1) if movable and shards.are_slices_whole(v) else 1
        own = made.size(v)
        if given.platform == "cpu" and not is_body and (b < len(inputs) or b in made_last):
            # XLA:CPU counts host memory as the device's
            own += hosted_nbytes(v.aval) // shards.count(v)
        buffers.append(Buffer(own, kinds[b], label, movable, depth))

    bodies = [_body(eqns[kernel.root], shards, given) for kernel in kernels]
    steps = [
        made.step(kernel, phase, None if body is None else body.program, copied)
        for kernel, phase, (body, copied) in zip(kernels, phases, bodies, strict=True)
    ]
    steps = [
        dataclasses.replace(step, updates=updates[kernel]) if kernel in updates else step
        for step, kernel in zip(steps, kernels, strict=True)
    ]
    size = lambda atom: made.size(atom) if isinstance(atom, Var) else nbytes(atom.aval)
    if given.platform == "cpu":
        looped = is_body or sub_batches is not None
        beside = [cpu_workspace(eqns[kernel.root], size, looped=looped) for kernel in kernels]
        stays = read_by_others(kernels, inputs, opened.outvars)
        for k, (body, _) in enumerate(bodies):
            if body is not None:
                beside[k] += casts_nbytes(eqns[kernels[k].root], size, stays)
                beside[k] += more_in_float32(body.program, body.variables)
        padded = [0 if s.convolution is None else s.convolution.padded_nbytes for s in steps]
        steps = [  # XLA:CPU pads nothing in memory
            dataclasses.replace(step, workspace=step.workspace + more - less)
            for step, more, less in zip(steps, beside, padded, strict=True)
        ]
    else:
        saved = saved_by_merging(kernels, phases, eqns, size, is_body, boundary, as_one, stacked)
        steps = [
            dataclasses.replace(
                step, nbytes=step.nbytes - less, launched=step.launched and not with_another
            )
            for step, (less, with_another) in zip(steps, saved, strict=True)
        ]
    if sub_batches is not None:
        buffers, steps = in_parts(buffers, steps, sub_batches.count)
    for b in carried_into_results(steps, len(inputs), made_last):
        buffers[b] = dataclasses.replace(buffers[b], nbytes=0, movable=False)
    streamed = {v for v in in_host_memory if not compat.is_in_host_memory(v.aval)}
    apart = streamed if given.platform == "cpu" else in_host_memory
    program = Program(
        buffers=tuple(buffers),
        steps=tuple(steps),
        inputs=tuple(range(len(inputs))),
        outputs=outputs,
        aliases=tuple((index[i], index[o]) for i, o in aliases(flat, given.donated, apart)),
        hosted=tuple(sorted(index[v] for v in streamed)),
        sub_batch_size=None if sub_batches is None or sub_batches.is_even else sub_batches.size,
        on_gpu=on_gpu,
    )
    found = Captured(flat, program, (*variables,), shards, applied, given, separate, sub_batches)
    if sub_batches is None or sub_batches.smaller is None:
        return found
    smaller = tuple(nbytes(v.aval) for v in found.of(sub_batches.smaller).variables)
    return dataclasses.replace(found, program=dataclasses.replace(program, smaller_nbytes=smaller))


def capture_body(
    eqn: compat.JaxprEqn, outside: Shards | None = None, step: Inputs = UNKNOWN
) -> Captured:
    """An iteration of the scan `eqn`.

    Args:
      outside: how the values of the step are split over its devices.
      step: what is known of the step.
    """
    body = flatten(eqn.params["jaxpr"])
    inputs = compat.open_jaxpr(body).invars
    values = dict(zip(inputs, eqn.invars, strict=True))
    slices = inputs[sum(compat.scan_counts(eqn)) :]
    shards = None if outside is None else outside.within(body, values, slices)
    results, carry = compat.open_jaxpr(body).outvars, compat.scan_counts(eqn)[1]
    return _captured(
        *(body, body, (), step.inside, None, None, shards),
        is_body=True,
        stacked=stacked_alone(results[:carry], results[carry:]),
    )


def _body(eqn: compat.JaxprEqn, shards: Shards, step: Inputs) -> tuple[Captured | None, Traffic]:
    """An iteration of `eqn`, if that is a scan, and what it copies."""
    if eqn.primitive.name != "scan":
        return None, Traffic()
    body = capture_body(eqn, shards, step)
    index = {v: b for b, v in enumerate(body.variables)}
    consts, carry = compat.scan_counts(eqn)
    opened = compat.open_jaxpr(body.flat)
    buffers = lambda atoms: tuple(index[a] for a in atoms if isinstance(a, Var))
    ends = Ends(
        before=buffers(opened.invars[consts : consts + carry]),
        slices=buffers(opened.invars[consts + carry :]),
        carried=buffers(opened.outvars[:carry]),
        stacked=buffers(opened.outvars[carry:]),
    )
    return body, traffic(body.program, ends, libraries_of(step.platform))
