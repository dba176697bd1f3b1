"""primitives: tables of how XLA treats each primitive, with a default for unknown ones.

The class of a primitive says whether it is fused; further tables give its flops and workspace.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Any

import jax

from vmem_jax import jax_compat as compat
from vmem_jax.capture import cudnn_attention
from vmem_jax.jax_compat import JaxprEqn, Var


class Class(enum.Enum):
    """How XLA treats an equation.

    VIEW: costs nothing, its result is its operand's memory (or folds into the reader's layout).
    FUSIBLE: computed inside the kernel that reads it; exists in memory only where it must.
    REDUCE: ends a fusion: operands are computed inside it, results exist.
    HEAVY: a kernel of its own: operands and results exist.
    """

    VIEW = 0
    FUSIBLE = 1
    REDUCE = 2
    HEAVY = 3


_VIEWS = """
reshape squeeze expand_dims transpose bitcast_convert_type name sharding_constraint stop_gradient
copy layout_constraint reduce_precision pvary
""".split()

_FUSIBLE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh broadcast broadcast_in_dim cbrt ceil
clamp clz complex concatenate conj convert_element_type cos cosh digamma div dynamic_slice eq eq_to
erf erf_inv erfc exp exp2 expm1 floor gather ge gt imag integer_pow iota is_finite le le_to lgamma
log log1p log2 logistic lt lt_to max min mul mulhi ne neg nextafter not one_minus_square or pad
population_count pow real rem rev round rsqrt select_and_gather_add select_n shift_left
shift_right_arithmetic shift_right_logical sign sin sinh slice split sqrt square sub tan tanh xor
copy_p pack_bits stack unpack_bits unstack window_gradient window_index
""".split()

_REDUCE = """
argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor reduce
""".split()

SCATTERS = frozenset("scatter scatter-add scatter_add scatter-sub".split())
"""What XLA:GPU computes the updates of in its own kernel, which ends a fusion as a reduction does."""

ELEMENTWISE = (
    frozenset(_FUSIBLE)
    .difference(
        """
broadcast broadcast_in_dim concatenate dynamic_slice gather iota pack_bits pad rev
select_and_gather_add slice split stack unpack_bits unstack window_gradient window_index
""".split()
    )
    .union(
        """
bessel_i0e bessel_i1e bitcast_convert_type copy igamma igamma_grad_a igammac layout_constraint name
polygamma random_gamma_grad reduce_precision regularized_incomplete_beta stop_gradient zeta
""".split()
    )
)
"""Each element of the result is made of the same elements of the operands."""

_CLASSES = {
    **dict.fromkeys(_VIEWS, Class.VIEW),
    **dict.fromkeys(_FUSIBLE, Class.FUSIBLE),
    **dict.fromkeys(_REDUCE, Class.REDUCE),
}


def class_of(eqn: JaxprEqn) -> Class:
    """The class of `eqn`; anything unknown, and anything with an effect, stands alone."""
    if eqn.effects:
        return Class.HEAVY
    return _CLASSES.get(eqn.primitive.name, Class.HEAVY)


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of a value; () of what has none, such as a token."""
    return tuple(getattr(atom.aval, "shape", ()))


def nbytes(aval: Any) -> int:
    """Bytes of a value of `aval` on the device; PRNG keys count their words, tokens nothing."""
    shape = getattr(aval, "shape", None)
    dtype = getattr(aval, "dtype", None)
    if shape is None or dtype is None or compat.is_in_host_memory(aval):
        return 0
    size = math.prod(shape)
    itemsize = getattr(dtype, "itemsize", 4)
    return size * itemsize


def hosted_nbytes(aval: Any) -> int:
    """Bytes of a value of `aval` in host memory; 0 of one on the device."""
    if not compat.is_in_host_memory(aval):
        return 0
    return math.prod(aval.shape) * aval.dtype.itemsize


def is_array(aval: Any) -> bool:
    """Whether a value of `aval` is plain bytes: no token, no PRNG key."""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and not jax.dtypes.issubdtype(dtype, jax.dtypes.extended)


def _conv_flops(eqn: JaxprEqn) -> int:
    """2 · outputs · (taps · input features / groups), less the zeros that lhs_dilation puts in."""
    rhs = eqn.invars[1].aval.shape
    numbers = eqn.params["dimension_numbers"]
    out_features = rhs[numbers.rhs_spec[0]]
    taps = math.prod(rhs) // max(out_features, 1)
    zeros = math.prod(eqn.params["lhs_dilation"])
    out = math.prod(eqn.outvars[0].aval.shape)
    return 2 * out * taps // zeros


def _dot_flops(eqn: JaxprEqn) -> int:
    (contract, _), _ = eqn.params["dimension_numbers"]
    lhs = eqn.invars[0].aval.shape
    return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(lhs[d] for d in contract)


_POOLED, _INDEXED, _GATHERED = 25, 50, 30
"""Operations of XLA:GPU for an element of a window that is pooled, or in which the largest is found,
and for a window that an element lies in: what its kernels of 3 x 3 windows take on an H200, each
element read by itself under a test of the padding (`benchmarks/pools.py`)."""


def _window_flops(eqn: JaxprEqn) -> int:
    each = _INDEXED if eqn.primitive.name == "window_index" else _POOLED
    return each * math.prod(eqn.outvars[0].aval.shape) * math.prod(eqn.params["window_dimensions"])


def _windows_flops(eqn: JaxprEqn) -> int:
    sizes = zip(eqn.params["window_dimensions"], eqn.params["window_strides"], strict=True)
    windows = math.prod(-(-w // s) for w, s in sizes)
    return _GATHERED * math.prod(eqn.outvars[0].aval.shape) * windows


_OF_OURS = 14
"""The same of our kernels, of those of the 49 T operations a second that their share of the memory's
rate leaves: 3 x 3 windows of stride 2 take 1.0 to 1.3 T elements a second, gradients 1.4 to 2.8
(`benchmarks/results/pools_h200.jsonl`). With stride 1 these bound them, not bytes."""


def _pooled_flops(eqn: JaxprEqn) -> int:
    pooled = eqn.params["pooled"]
    return _OF_OURS * math.prod(pooled.made) * math.prod(pooled.windows.size)


def _spread_flops(eqn: JaxprEqn) -> int:
    windows = math.prod(eqn.invars[0].aval.shape)
    return _OF_OURS * windows * math.prod(eqn.params["spread"].windows.size)


_OF_ROWS = 0.78
"""The operations of our kernel of rows, in those of XLA's passes for as many elements. An H200 takes
1.1 ps an element for weights with dropout, and 1.6 for their gradient, of rows of 197, 257, 577 and
1,500 (`benchmarks/results/softmaxes_h200.jsonl`): 0.74 to 0.89 of theirs."""


def _rows_flops(eqn: JaxprEqn) -> int:
    reduced = eqn.params["reduced"]
    passes = sum(flops(each, in_tile=True) for each in reduced.equations)
    return int(_OF_ROWS * reduced.computed * passes)


def _scan_flops(eqn: JaxprEqn) -> int:
    return eqn.params["length"] * jaxpr_flops(eqn.params["jaxpr"])


_FLOPS: dict[str, Callable[[JaxprEqn], int]] = {
    "conv_general_dilated": _conv_flops,
    "micro_convolution": lambda eqn: eqn.params["convolution"].flops,
    "carried_product": lambda eqn: eqn.params["carried"].flops,
    "normalising_convolution": lambda eqn: eqn.params["convolution"].flops,
    "dot_general": _dot_flops,
    "reduce_window_max": _window_flops,
    "reduce_window_sum": _window_flops,
    "reduce_window": _window_flops,
    "window_index": _window_flops,
    "window_gradient": _windows_flops,
    "pooled_windows": _pooled_flops,
    "spread_windows": _spread_flops,
    "reduced_rows": _rows_flops,
    "scan": _scan_flops,
    cudnn_attention.FORWARD: cudnn_attention.flops,
    cudnn_attention.BACKWARD: cudnn_attention.flops,
    # what is not updated is not touched
    "dynamic_update_slice": lambda eqn: math.prod(eqn.invars[1].aval.shape),
    "optimization_barrier": lambda eqn: 0,
    "pack_bits": lambda eqn: 3 * math.prod(eqn.invars[0].aval.shape),
    "unpack_bits": lambda eqn: 3 * math.prod(eqn.outvars[0].aval.shape),
    # threefry: a dropout in bfloat16 takes as long on an H100 as on an H200, 4.3 ps a word
    "random_bits": lambda eqn: 200 * math.prod(eqn.outvars[0].aval.shape),
    "random_part": lambda eqn: 200 * math.prod(eqn.outvars[0].aval.shape),
    "threefry2x32": lambda eqn: 200 * math.prod(eqn.outvars[0].aval.shape),
}

_OPERATIONS = {
    **dict.fromkeys("tanh erf erfc erf_inv".split(), 62),
    **dict.fromkeys("exp exp2 expm1 log log1p logistic sin cos pow".split(), 20),
    **dict.fromkeys("div sqrt rsqrt".split(), 8),
}
"""Operations an element of what takes more than one. GELU in bfloat16 and a softmax take as long on
an H100 as on an H200: so many for tanh and exp. Others are taken for alike (JAX 0.11.2)."""

_ROW, _COLUMN, _IN_TILE = 15, 40, 10
"""The same of an element that is summed along the fastest dimension, along others, and where the
kernel that sums reads the sum, as in a softmax of scores (`benchmarks/rates.py`)."""


def flops(eqn: JaxprEqn, in_tile: bool = False) -> int:
    """Operations of `eqn`: floating-point ones of products, and of passes what takes as long; one an
    element where no rule says otherwise.

    A call in the body of a loop (a checkpointed layer) has those of what it calls, once.

    Args:
      in_tile: whether the kernel of `eqn` reads what it makes.
    """
    rule = _FLOPS.get(eqn.primitive.name)
    if rule is not None:
        return rule(eqn)
    if eqn.primitive.name not in ELEMENTWISE and (inner := inner_jaxprs(eqn)):
        return max(map(jaxpr_flops, inner))
    if class_of(eqn) is Class.REDUCE:
        shape = eqn.invars[0].aval.shape
        axes = eqn.params.get("axes", eqn.params.get("dimensions", ()))
        keeps_rows = len(shape) - 1 not in axes
        return (_COLUMN if keeps_rows else _IN_TILE if in_tile else _ROW) * math.prod(shape)
    sizes = [math.prod(getattr(v.aval, "shape", ())) for v in eqn.outvars]
    return _OPERATIONS.get(eqn.primitive.name, 1) * max(sizes, default=0)


def is_strict(eqn: JaxprEqn) -> bool:
    """Whether `eqn` multiplies in float32 without tensor cores, which would round its operands."""
    precision = eqn.params.get("precision")
    asked = precision if isinstance(precision, tuple) else (precision,)
    return _operand_dtype(eqn) == "float32" and jax.lax.Precision.HIGHEST in asked


_ON_CUDA_CORES = ("pooled_windows", "reduced_rows", "spread_windows")
"""Kernels of ours that multiply no matrices."""


def computed_in(eqn: JaxprEqn) -> str:
    """The dtype that `flops` are done in; "" where no rate of tensor cores holds for it."""
    on_others = is_strict(eqn) or eqn.primitive.name in _ON_CUDA_CORES
    return "" if on_others else _operand_dtype(eqn)


def _operand_dtype(eqn: JaxprEqn) -> str:
    return str(getattr(eqn.invars[0].aval, "dtype", "")) if eqn.invars else ""


def aligned(eqn: JaxprEqn) -> bool:
    """Whether the rows that `eqn` reads and writes are whole 16-byte vectors.

    cuDNN's tensor-core kernels want the channels (and cuBLAS's the inner dimensions) in multiples
    of 16 bytes; a 3-channel stem falls back to kernels that are an order of magnitude slower. Passes
    over memory read and write single elements of other rows.
    """
    if class_of(eqn) in (Class.FUSIBLE, Class.REDUCE):
        arrays = [a.aval for a in (*eqn.invars, *eqn.outvars) if getattr(a.aval, "ndim", 0)]
        largest = max(arrays, key=nbytes, default=None)
        return (
            largest is None or largest.shape[-1] * getattr(largest.dtype, "itemsize", 4) % 16 == 0
        )
    if is_strict(eqn):
        return True
    if eqn.primitive.name == "conv_general_dilated":
        lhs, rhs = (a.aval for a in eqn.invars)
        numbers = eqn.params["dimension_numbers"]
        channels = [lhs.shape[numbers.lhs_spec[1]], rhs.shape[numbers.rhs_spec[0]]]
        if numbers.lhs_spec[0] != 0:  # a weight gradient: the channels stand where the batch does
            channels = [lhs.shape[numbers.lhs_spec[0]], rhs.shape[numbers.rhs_spec[0]]]
    elif eqn.primitive.name == "dot_general":
        lhs, rhs = (a.aval for a in eqn.invars)
        channels = [x.shape[-1] for x in (lhs, rhs, eqn.outvars[0].aval) if x.ndim]
    else:
        return True
    return all(c * lhs.dtype.itemsize % 16 == 0 for c in channels)


def is_batched(eqn: JaxprEqn) -> bool:
    """Whether `eqn` is a matrix product with batch dimensions."""
    return eqn.primitive.name == "dot_general" and any(eqn.params["dimension_numbers"][1])


def exchanges_operands(product: JaxprEqn, reader: JaxprEqn) -> bool:
    """Whether `reader` transposes `product`, a matrix product, into that of the exchanged operands: a
    weight gradient, as JAX writes it."""
    if product.primitive.name != "dot_general":
        return False
    (contracted, _), (batch, _) = product.params["dimension_numbers"]
    if batch or reader.primitive.name != "transpose":
        return False
    left = len(product.invars[0].aval.shape) - len(contracted)
    exchanged = (*range(left, len(product.outvars[0].aval.shape)), *range(left))
    return tuple(reader.params["permutation"]) == exchanged


def takes_epilogue(eqn: JaxprEqn, kernel: JaxprEqn | None) -> bool:
    """Whether the library kernel of `eqn` can add a tensor and apply a ReLU before it writes.

    Forward convolutions and products can. A gradient by a flipped kernel becomes cuDNN's
    backward-data and cannot, unless the kernel has one tap, where nothing is flipped.

    Args:
      kernel: the equation that makes the last operand.
    """
    if eqn.primitive.name == "dot_general":
        return True
    if eqn.primitive.name != "conv_general_dilated" or eqn.params["batch_group_count"] != 1:
        return False
    numbers = eqn.params["dimension_numbers"]
    if numbers.lhs_spec[0] != 0 or any(d != 1 for d in eqn.params["lhs_dilation"]):
        return False  # a weight gradient, a strided backward-data
    rhs = eqn.invars[1].aval.shape
    taps = math.prod(rhs[d] for d in numbers.rhs_spec[2:])
    return taps == 1 or kernel is None or kernel.primitive.name != "rev"


def jaxpr_flops(jaxpr: Any) -> int:
    return sum(flops(eqn) for eqn in compat.open_jaxpr(jaxpr).eqns)


def inner_jaxprs(eqn: JaxprEqn) -> list[Any]:
    """The jaxprs among the parameters of an opaque equation: bodies, conditions, branches."""
    found = []
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(item, "eqns") and hasattr(item, "outvars"):
                found.append(item)
    return found


def has(jaxpr: Any, primitive: str) -> bool:
    """Whether `jaxpr`, or what its equations hold, has that primitive."""
    return any(
        eqn.primitive.name == primitive or any(has(inner, primitive) for inner in inner_jaxprs(eqn))
        for eqn in compat.open_jaxpr(jaxpr).eqns
    )


def workspace(eqn: JaxprEqn, of_product: Callable[[JaxprEqn], int] = lambda _: 0) -> int:
    """Bytes that live only inside an opaque equation: the peak of its largest inner jaxpr, or what a
    convolution in micro-batches was given, or what the programs of one kernel sum.

    Scan stacks its residuals in outputs, which are counted as buffers; what remains is one
    iteration's own values.

    Args:
      of_product: the same of a matrix product.
    """
    if eqn.primitive.name == "dot_general":
        return of_product(eqn)
    if eqn.primitive.name in ("micro_convolution", "normalising_convolution"):
        return eqn.params["configuration"].workspace
    if eqn.primitive.name == "carried_product":
        return eqn.params["carried"].workspace
    if eqn.primitive.name == "summed_rows":
        return eqn.params["summed"].workspace
    return max((_inner_peak(jaxpr, of_product) for jaxpr in inner_jaxprs(eqn)), default=0)


def _inner_peak(jaxpr: Any, of_product: Callable[[JaxprEqn], int]) -> int:
    """The most bytes live at once among the values that the equations of `jaxpr` make."""
    opened = compat.open_jaxpr(jaxpr)
    memory: dict[Any, Any] = {}  # of what is written in place the value whose memory it is
    owner: Callable[[Any], Any] = lambda a: memory.get(a, a)
    there = {*opened.invars, *opened.constvars}
    for eqn in opened.eqns:
        memory.update((v, owner(a)) for a, v in _in_place(eqn) if a in there)
        there.update(eqn.outvars if class_of(eqn) in (Class.HEAVY, Class.REDUCE) else ())
    last: dict[Any, int] = {}
    for i, eqn in enumerate(opened.eqns):
        last.update({owner(a): i for a in eqn.invars if isinstance(a, compat.Var)})
    last.update({owner(a): len(opened.eqns) for a in opened.outvars if isinstance(a, compat.Var)})
    made: set[Any] = set()
    live = peak = 0
    for i, eqn in enumerate(opened.eqns):
        own = class_of(eqn) in (Class.HEAVY, Class.REDUCE)
        outs = [v for v in eqn.outvars if own and v not in memory]
        made.update(outs)
        live += sum(nbytes(v.aval) for v in outs)
        peak = max(peak, live + workspace(eqn, of_product))
        read = {owner(a) for a in eqn.invars if isinstance(a, compat.Var)}
        gone = {a for a in read if a in made and last[a] == i}
        gone |= {v for v in outs if v not in last}
        live -= sum(nbytes(v.aval) for v in gone)
        made -= gone
    return peak


def _in_place(eqn: JaxprEqn) -> list[tuple[Any, Any]]:
    """Pairs (operand, result) of the same memory inside a loop."""
    if eqn.primitive.name == "optimization_barrier":
        pairs = [*zip(eqn.invars, eqn.outvars, strict=True)]
    elif eqn.primitive.name == "dynamic_update_slice":
        pairs = [(eqn.invars[0], eqn.outvars[0])]
    else:
        return []
    return [(a, v) for a, v in pairs if isinstance(a, compat.Var)]


def last_casts(body: Any) -> dict[Var, JaxprEqn]:
    """Of each result of `body` that is a wider type of a value in it, and read by nothing there, the
    equation that makes it. Gradients of weights that are cast for the computation are."""
    read = {a for eqn in body.eqns for a in eqn.invars if isinstance(a, Var)}
    made = {v for eqn in body.eqns for v in eqn.outvars}
    results = {a for a in body.outvars if isinstance(a, Var)}
    return {
        eqn.outvars[0]: eqn
        for eqn in body.eqns
        if eqn.primitive.name == "convert_element_type"
        and isinstance(eqn.invars[0], Var)
        and eqn.invars[0] in made
        and eqn.outvars[0] in results - read
        and nbytes(eqn.invars[0].aval) < nbytes(eqn.outvars[0].aval)
    }
