"""isolate: steps of a captured program as a jaxpr of their own, and a key that equal ones share."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from vmem_jax import jax_compat as compat
from vmem_jax.capture.capture import Captured
from vmem_jax.capture.primitives import Class, class_of, flops, inner_jaxprs, nbytes
from vmem_jax.core.program import BEGIN, COMPRESS, DECOMPRESS, END, Program
from vmem_jax.jax_compat import ClosedJaxpr, JaxprEqn, Literal, Var

_NAMES = frozenset({"name", "name_and_src_info", "debug_info", "metadata", "backend"})
"""Parameters of equations that name something for people."""

_UNTIMEABLE = {
    BEGIN: "a boundary of the loop over sub-batches",
    END: "a boundary of the loop over sub-batches",
    COMPRESS: "its time depends on its data",
    DECOMPRESS: "its time depends on its data",
    "while": "a loop whose length depends on its data",
    "ffi_call": "a foreign function",
    "custom_call": "a foreign function",
    "shard_map": "split over devices",
    "psum": "split over devices",
    "all_gather": "split over devices",
    "all_to_all": "split over devices",
    "ppermute": "split over devices",
    "reduce_scatter": "split over devices",
}
"""Primitives that random data on one device says nothing about, or that it could harm."""


@dataclasses.dataclass(frozen=True)
class Isolated:
    """A step, or neighbours that XLA may fuse, that can be compiled alone.

    Attributes:
      closed: the equations; what they read are the arguments, what is read elsewhere the results.
      free: for each argument and then each result whether it is a temporary of the program, whose
        layout the compiler chooses; arguments and outputs of the program have the default one.
      carried: pairs (argument, result): a step alone updates the argument in place.
      key: equal for equal steps, whatever their variables and layers are called.
      what: for people.
      trouble: why it cannot be timed; "" if it can.
    """

    closed: ClosedJaxpr
    free: tuple[bool, ...]
    carried: tuple[tuple[int, int], ...]
    key: str
    what: str
    trouble: str = ""

    @property
    def avals(self) -> tuple[Any, ...]:
        return tuple(v.aval for v in compat.open_jaxpr(self.closed).invars)

    @property
    def out_avals(self) -> tuple[Any, ...]:
        return tuple(v.aval for v in compat.open_jaxpr(self.closed).outvars)


def folded_steps(captured: Captured) -> frozenset[int]:
    """The steps that run inside their readers' kernels: kernels flipped for a backward convolution.

    XLA takes a convolution by a `rev` for cuDNN's backward-data and never flips anything, so the
    two are timed together.
    """
    program = captured.program
    found = set()
    for s, step in enumerate(program.steps):
        if step.op != "rev" or len(step.writes) != 1 or program.is_resident[step.writes[0]]:
            continue
        readers = program.readers[step.writes[0]]
        if readers and all(program.steps[r].op == "conv_general_dilated" for r in readers):
            found.add(s)
    return frozenset(found)


def isolate(
    captured: Captured, steps: Sequence[int], folded: frozenset[int], platform: str
) -> Isolated:
    """`steps` of `captured` alone, with those of the `folded` steps that they read.

    Args:
      steps: in the order in which they run; values that no other step reads stay inside.
      platform: of the device that it will run on; part of the key.
    """
    program, variables = captured.program, captured.variables
    inside = {b for s in steps for b in program.steps[s].writes}
    reads: list[int] = []
    equations: set[int] = set()
    for s in steps:
        equations |= set(program.steps[s].equations)
        for b in program.steps[s].reads:
            maker = program.producer[b]
            if maker in folded:
                equations |= set(program.steps[maker].equations)
                reads += program.steps[maker].reads
            elif b not in inside:
                reads.append(b)
    reads = list(dict.fromkeys(reads))
    results = _results(program, steps)
    values = [*reads, *results]
    known = {variables[b] for b in reads}
    eqns = []
    every = compat.open_jaxpr(captured.flat).eqns
    for i in sorted(equations):
        if every[i].outvars and all(v in known for v in every[i].outvars):
            continue  # a view of what the step reads, read itself
        eqns.append(every[i])
        known.update(every[i].outvars)
    closed = compat.close(
        [],
        [],
        [variables[b] for b in reads],
        [variables[b] for b in results],
        eqns,
        captured.flat,
    )
    free = tuple(not program.is_resident[b] for b in values)
    head = program.steps[steps[0]]
    carried: tuple[tuple[int, int], ...] = ()
    # an update of a part: alone it would copy the whole
    if len(steps) == 1 and not head.fusible and head.in_place:
        carried = tuple((reads.index(r), results.index(w)) for r, w in head.in_place[:1])
    trouble = _trouble(eqns)
    if any(program.steps[s].fetched or program.steps[s].returned for s in steps):
        trouble = "it streams state that lies in host memory"
    if any(program.steps[s].updates > 1 for s in steps):
        trouble = "it updates several parameters, which are one kernel in the step alone"
    if not results:
        trouble = trouble or "it has no result"
    if any(program.buffers[b].nbytes != nbytes(variables[b].aval) for b in values):
        trouble = "split over devices"
    ops = "+".join(dict.fromkeys(program.steps[s].op for s in steps))
    shapes = " ".join(variables[b].aval.str_short(short_dtypes=True) for b in reads[:3])
    return Isolated(
        closed=closed,
        free=free,
        carried=carried,
        key=key_of(closed, free, carried, platform),
        what=f"{ops} {shapes}".strip(),
        trouble=trouble,
    )


def _results(program: Program, steps: Sequence[int]) -> list[int]:
    """What `steps` write for others: read by a step that is not among them, or an output."""
    among = set(steps)
    every = [b for s in steps for b in program.steps[s].writes]
    for_others = [
        b for b in every if program.is_resident[b] or not set(program.readers[b]) <= among
    ]
    return for_others if len(steps) > 1 else every


def _trouble(eqns: list[JaxprEqn]) -> str:
    for eqn in eqns:
        name = eqn.primitive.name
        if eqn.effects or "callback" in name:
            return "it has an effect or calls back"
        if name in _UNTIMEABLE:
            return _UNTIMEABLE[name]
        for inner in inner_jaxprs(eqn):
            if found := _trouble(compat.open_jaxpr(inner).eqns):
                return found
    return ""


# -- keys


def key_of(
    closed: ClosedJaxpr, free: tuple[bool, ...], carried: tuple[tuple[int, int], ...], platform: str
) -> str:
    """A hash of all that the time of `closed` depends on, data aside; the same in every process."""
    text = json.dumps([_canonical(closed), free, carried, platform])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _canonical(jaxpr: Any) -> list[Any]:
    """`jaxpr` with its variables numbered in the order in which they appear."""
    opened = compat.open_jaxpr(jaxpr)
    numbers: dict[Var, int] = {}
    named: dict[Any, Any] = {}  # what `checkpoint_name` gave another name

    def atom(a: Any) -> Any:
        if isinstance(a, Literal):
            return ["literal", _type(a.aval), repr(a.val)]
        a = named.get(a, a)
        first = a not in numbers
        n = numbers.setdefault(a, len(numbers))
        return [n, _type(a.aval)] if first else n

    eqns = []
    for eqn in opened.eqns:
        if eqn.primitive.name == "name" and isinstance(eqn.invars[0], Var):
            named[eqn.outvars[0]] = named.get(eqn.invars[0], eqn.invars[0])
            continue
        params = {k: _value(v) for k, v in sorted(eqn.params.items()) if k not in _NAMES}
        reads = [atom(a) for a in eqn.invars]
        eqns.append([eqn.primitive.name, params, reads, [atom(v) for v in eqn.outvars]])
    # The order of operands that equations share says nothing, so they come last.
    return [
        eqns,
        [atom(v) for v in opened.constvars],
        [atom(v) for v in opened.invars],
        [atom(a) for a in opened.outvars],
    ]


def _type(aval: Any) -> str:
    return f"{getattr(aval, 'dtype', aval)}{list(getattr(aval, 'shape', ()))}"


def _value(value: Any) -> Any:
    """A parameter as JSON that is the same in every process."""
    if hasattr(value, "eqns") and hasattr(value, "outvars"):
        return _canonical(value)
    if isinstance(value, tuple | list):
        return [_value(v) for v in value]
    if isinstance(value, Mapping):
        return [[str(k), _value(v)] for k, v in sorted(value.items(), key=str)]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.shape, hashlib.sha256(value.tobytes()).hexdigest()]
    if isinstance(value, bool | int | str | None):
        return value
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


# -- a part of the batch

_SHAPES: dict[str, str] = {
    "broadcast_in_dim": "shape",
    "reshape": "new_sizes",
    "iota": "shape",
    "slice": "limit_indices",
    "dynamic_slice": "slice_sizes",
    "random_bits": "shape",
    "rng_bit_generator": "shape",
}
"""Primitives whose parameters say the shape of their result."""


def smaller(isolated: Isolated, fits_nbytes: int) -> tuple[Isolated, int, int] | None:
    """The step on a part of its batch, so that arguments and results take at most `fits_nbytes`.

    The batch is the leading dimension of the largest value; what shares its size there is cut, too.
    Whether that was right is checked: the operations have to shrink with the batch.

    Returns:
      (the step, the part of the batch, the whole batch), or None where no part fits or works.
    """
    values = (*isolated.avals, *isolated.out_avals)
    largest = max(values, key=nbytes, default=None)
    if largest is None or not largest.shape:
        return None
    batch = largest.shape[0]
    for rank in sorted({1, 2, len(largest.shape)}):  # a vector of so many channels is no batch
        is_batched = lambda shape, rank=rank: len(shape) >= rank and shape[0] == batch
        for part in _parts(batch):
            share = batch // part
            cut = sum(nbytes(a) // (share if is_batched(a.shape) else 1) for a in values)
            if cut > fits_nbytes:
                continue
            try:
                closed = _with_batch(isolated, batch, part, is_batched)
            except (TypeError, ValueError):
                break  # an equation that does not take these shapes
            if abs(_work(closed) * share - _work(isolated.closed)) > 0.02 * _work(isolated.closed):
                break
            key = f"{isolated.key} {part}"
            return dataclasses.replace(isolated, closed=closed, key=key), part, batch
    return None


def _parts(batch: int) -> Iterator[int]:
    part = batch
    while part % 2 == 0:
        part //= 2
        yield part


def _work(closed: ClosedJaxpr) -> int:
    """Operations, where each element that an equation reads counts as one at least."""
    eqns = [e for e in compat.open_jaxpr(closed).eqns if class_of(e) is not Class.VIEW]
    read = lambda e: max((math.prod(getattr(a.aval, "shape", ())) for a in e.invars), default=0)
    return sum(max(flops(e), read(e)) for e in eqns)


def _with_batch(
    isolated: Isolated, batch: int, part: int, is_batched: Callable[[tuple[int, ...]], bool]
) -> ClosedJaxpr:
    opened = compat.open_jaxpr(isolated.closed)
    sizes = {batch}  # and what reshapes make of it: batch · positions

    def params(eqn: JaxprEqn) -> dict[str, Any]:
        found = dict(eqn.params)
        name = _SHAPES.get(eqn.primitive.name)
        if name is None or not found[name]:
            return found
        lead, *rest = found[name]
        operand = eqn.invars[0].aval.shape[:1] if eqn.invars else ()
        if name == "new_sizes" and operand and operand[0] in sizes and lead % batch == 0:
            sizes.add(lead)
        if is_batched(found[name]) or lead in sizes - {batch}:
            found[name] = (lead * part // batch, *rest)
        return found

    def run(*args: Any) -> list[Any]:
        env: dict[Any, Any] = dict(zip(opened.invars, args, strict=True))
        for eqn in opened.eqns:
            read = [a.val if isinstance(a, Literal) else env[a] for a in eqn.invars]
            outs = eqn.primitive.bind(*read, **eqn.primitive.get_bind_params(params(eqn)))
            outs = outs if eqn.primitive.multiple_results else [outs]
            env.update(zip(eqn.outvars, outs, strict=True))
        return [env[v] for v in opened.outvars]

    cut = [
        jax.ShapeDtypeStruct((part, *a.shape[1:]) if is_batched(a.shape) else a.shape, a.dtype)
        for a in isolated.avals
    ]
    return jax.make_jaxpr(run)(*cut)
