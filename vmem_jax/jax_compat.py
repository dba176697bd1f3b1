"""Every private JAX import and every version split, each with its reason. Nothing else knows them.

Supported: 0.10.2 (the newest for Python 3.11), 0.11.2, 0.12.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax._src import compilation_cache as _compilation_cache  # where executables are kept
from jax._src import core as _core  # new_jaxpr_eqn, check_jaxpr, Tracer: no public equivalents
from jax._src import source_info_util  # name stacks and the user's frame of an equation
from jax._src.array import ArrayImpl as _ArrayImpl  # the one concrete array type
from jax._src.ffi import _FfiEffect  # what XLA's foreign calls have; not in the public API
from jax._src.interpreters import pxla as _pxla  # a cache of lowered steps
from jax._src.interpreters.partial_eval import DynamicJaxprTracer  # the tracer of jit
from jax.extend import core as jexc
from jax.extend.mlir import ir
from jax.interpreters.partial_eval import dce_jaxpr as _dce_jaxpr

VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3])

# JAX 0.11 merged ClosedJaxpr into Jaxpr: a jaxpr carries its constants. Before, they are two.
_MERGED = jexc.ClosedJaxpr is _core.Jaxpr

# XLA:CPU of JAX 0.10 moves the casts of what a loop reads in half precision out of the loop.
CASTS_STACKS_ON_CPU = VERSION < (0, 11)

Var = jexc.Var
Literal = jexc.Literal
if TYPE_CHECKING:  # JAX types these too loosely for a checker, and merged them in 0.11
    JaxprEqn = Any
    ClosedJaxpr = Any
else:
    JaxprEqn = jexc.JaxprEqn
    ClosedJaxpr = jexc.ClosedJaxpr
Atom = Any  # Var | Literal


def new_var(aval: Any) -> Var:
    return _core.Var(aval)


def in_host_memory(aval: Any) -> Any:
    """`aval` as the type of an array in host memory."""
    return aval.update(memory_space=jax.memory.Space.Host)


def is_in_host_memory(aval: Any) -> bool:
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def lower(jitted: Any, *args: Any, **kwargs: Any) -> Any:
    """`jitted.lower(*args, **kwargs)` of a `jax.jit(keep_unused=True)`, which can be freed.

    JAX 0.11.2 and 0.12 never free what such a step was lowered and compiled to: a cache whose keys
    are weakly held jaxprs has the same jaxpr as a value.
    """
    traced = jitted.trace(*args, **kwargs)
    lowered = traced.lower()
    if _MERGED:
        _pxla._dce_jaxpr.evict_weakref(traced.jaxpr)
    return lowered


def say_memory_kinds(lowered: Any, kinds: Sequence[str]) -> None:
    """Writes into a lowered step in which memory each of its arguments lies.

    JAX does so by their shardings, but drops the memory kind of a device that is not there, since
    such a device names no memories (0.10.2–0.12).
    """
    module = lowered.compiler_ir("stablehlo")
    [main] = [
        f for f in module.body.operations if ir.StringAttr(f.attributes["sym_name"]).value == "main"
    ]
    with module.context:
        named = lambda attrs: [attrs[i] for i in range(len(attrs))]
        given = [{a.name: a.attr for a in named(ir.DictAttr(attrs))} for attrs in main.arg_attrs]
        for attrs, kind in zip(given, kinds, strict=True):
            attrs["mhlo.memory_kind"] = ir.StringAttr.get(kind)
        main.arg_attrs = ir.ArrayAttr.get([ir.DictAttr.get(attrs) for attrs in given])


def new_equation(
    primitive: Any, invars: Sequence[Atom], outvars: Sequence[Var], params: dict, like: JaxprEqn
) -> JaxprEqn:
    """An equation with the source line, name stack and context of `like`."""
    return like.replace(
        primitive=primitive,
        invars=list(invars),
        outvars=list(outvars),
        params=params,
        effects=frozenset(),
    )


def open_jaxpr(jaxpr: Any) -> Any:
    """The part with `eqns`, `invars`, `outvars` and `constvars`, of either kind of jaxpr."""
    return jaxpr.jaxpr if isinstance(jaxpr, jexc.ClosedJaxpr) else jaxpr


def constants(jaxpr: Any) -> Sequence[Any]:
    return jaxpr.consts if isinstance(jaxpr, jexc.ClosedJaxpr) else ()


def close(
    constvars: Sequence[Var],
    consts: Sequence[Any],
    invars: Sequence[Var],
    outvars: Sequence[Atom],
    eqns: Sequence[JaxprEqn],
    like: ClosedJaxpr,
) -> ClosedJaxpr:
    """A closed jaxpr with the debug information (argument names) of `like`."""
    effects: set[Any] = set()
    for eqn in eqns:
        effects |= set(eqn.effects)
    names = open_jaxpr(like).debug_info
    if len(names.arg_names or ()) != len(invars) or len(names.result_paths or ()) != len(outvars):
        names = names._replace(arg_names=None, result_paths=None)  # without any, JAX warns
    kwargs: dict[str, Any] = {"effects": frozenset(effects), "debug_info": names}
    parts = (list(constvars), list(invars), list(outvars), list(eqns))
    if _MERGED:
        kwargs["consts"] = list(consts)
        return _core.Jaxpr(*parts, **kwargs)
    return jexc.ClosedJaxpr(_core.Jaxpr(*parts, **kwargs), list(consts))


def name_stack(eqn: JaxprEqn) -> str:
    return str(eqn.source_info.name_stack)


def nest_name_stack(eqn: JaxprEqn, outer: JaxprEqn) -> JaxprEqn:
    """`eqn` of an inner jaxpr with the name stack of the equation that called it put in front.

    What was traced before, for another caller, has no line of this one's: then it gets the caller's.
    """
    stack = outer.source_info.name_stack + eqn.source_info.name_stack
    traceback = eqn.source_info.traceback
    if traceback is None or source_info_util.user_frame(traceback) is None:
        traceback = outer.source_info.traceback
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack, traceback=traceback))


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """How many of a scan's operands are constants, and how many after them are carried."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()  # since 0.12
    return len(consts), len(carry)


def with_results(eqn: JaxprEqn, read: Sequence[bool]) -> JaxprEqn:
    """`eqn`, a scan, with only those of its results that are `read`, and what they take.

    JAX's rule for one equation has another signature in 0.12; that for a jaxpr has not.
    """
    invars = list(dict.fromkeys(a for a in eqn.invars if isinstance(a, Var)))
    outvars = [v for v, is_read in zip(eqn.outvars, read, strict=True) if is_read]
    alone = close([], [], invars, outvars, [eqn], eqn.params["jaxpr"])
    jaxpr, _ = _dce_jaxpr(open_jaxpr(alone), [True] * len(outvars), instantiate=True)
    [found] = jaxpr.eqns
    return found


def user_line(eqn: JaxprEqn) -> str:
    """ "file.py:41", the line of the user's code that made the equation, or ""."""
    traceback = eqn.source_info.traceback
    frame = None if traceback is None else source_info_util.user_frame(traceback)
    if frame is None:
        return ""
    return f"{frame.file_name.rsplit('/', 1)[-1]}:{frame.start_line}"


def check_jaxpr(jaxpr: ClosedJaxpr) -> None:
    _core.check_jaxpr(open_jaxpr(jaxpr))


def keep_executables(get: Callable[..., Any], put: Callable[..., None]) -> None:
    """From now on JAX's persistent cache, where it is enabled, keeps executables by these functions.

    Args:
      get: key, ... -> (executable, seconds that it took to compile), or (None, None).
      put: (key, name, executable, backend, seconds, ...).
    """
    _compilation_cache.get_executable_and_time = get
    _compilation_cache.put_executable_and_time = put


def is_array(x: Any) -> bool:
    """Whether `x` is a concrete JAX array (a subclass check of jax.Array asks tracers too)."""
    return type(x) is _ArrayImpl


def is_tracer(x: Any) -> bool:
    return isinstance(x, _core.Tracer)


def is_jit_tracer(x: Any) -> bool:
    """Whether `x` is traced by jit (or make_jaxpr), where a budgeted step may be inlined."""
    return isinstance(x, DynamicJaxprTracer)


def is_unspecified_sharding(x: Any) -> bool:
    return x is None or type(x).__name__ == "UnspecifiedValue"


MERGED_MIB = 8
"""MiB of operand and result of a matrix product that XLA:GPU may make one with others, beside what
they share. Its own 64 merge the keys' and values' products of a ViT-L with 128 images, and transpose
them then: its step takes 1.5 % longer than with 8 (H200, 0.11.2). Of a decoder with larger products
the step takes as long, and the small ones of recurrent layers are still merged."""

FFI_EFFECT = _FfiEffect
"""The effect of a primitive that becomes a foreign call: it is kept, and barriers wait for it."""

FENCE_OPTIONS: dict[str, dict[str, Any]] = {
    # XLA:CPU removes optimization barriers before it merges equal instructions and schedules, so no
    # rematerialisation, jax.checkpoint's included, survives there. Without that pass they live until
    # after scheduling, as on the GPU, and its code generator takes them as they are (0.10.2–0.12),
    # with one exception: the second pass makes one kernel of a small while loop, and the emitter of
    # that kernel does not know barriers. One of a tuple aborts the process, one of an array is
    # UNIMPLEMENTED. Small is a loop that touches at most 1 KiB in 0.10 and 0.11, and any loop without
    # a matrix product in 0.12. Without that pass they run as other loops do: 1,000 iterations on 12
    # floats take 48 µs in place of 32, 30 iterations on 10,000 floats 99 µs in place of 112.
    # Both passes are left out by name: a threshold of 0 for the second can only be set for the whole
    # process (xla_cpu_small_while_loop_byte_threshold in XLA_FLAGS, no option of one compile).
    # Inlined in the user's own jit, where the first pass runs, no barrier is left for the second.
    "cpu": {"xla_disable_hlo_passes": "cse_barrier_expander,small-while-loop-hoisting"},
    # Where layers are unrolled and their weights stacked, XLA:GPU casts the stack once in place of
    # each slice: the first pass moves a narrowing cast in front of the slice, the second anything
    # that is made of all slices alike. The cast stack lives from the first layer forwards to the last
    # one backwards: 2 GiB of a decoder of 1.1 billion weights, for casts that take 1 % of the step,
    # and that the plan makes again where they are read (0.11.2).
    # XLA:GPU fills the stacks of a loop with zeros before the loop writes every slice of them, unless
    # it is asked to see that: 9.4 of the 131 ms of a scanned GPT-2 medium (H100, 0.11.2).
    "gpu": {
        "xla_disable_hlo_passes": "convert-mover,slice-sinker",
        "xla_gpu_enable_dus_accumulator_zero_init_elimination": True,
        "xla_gpu_dot_merger_threshold_mb": MERGED_MIB,
    },
}
"""Compiler options, by platform, that keep a fenced program as it was emitted: fences until after
scheduling, casts where their layers are, stacks that nothing but their loop writes, and large matrix
products by themselves."""

SPLITS_PRODUCTS = VERSION >= (0, 11)
"""Whether XLA:GPU makes products of small results in parts by the formula that we have of it
(`capture.product_workspaces`). Nothing was compiled for a GPU with 0.10.2."""

OVERWRITES_VIEWS = frozenset({"cpu"})
"""Platforms whose compiler lets a kernel write over what it still reads in another shape: where a
barrier stands between a value and its reshape, XLA:CPU makes kernels that read it in both
(`compiler.views`; 0.11.2 and 0.12). On the GPU a reshape is part of the kernels that read it."""

# What XLA:GPU has in CUDA graphs by default, and convolutions. Otherwise they are launched one by
# one, since not every library's can be recorded, and cut the step into hundreds of graphs. A traced
# step of ResNet-152, whose kernels take 39 ms, then waits 13 ms for the host (H200), and 0.9 with
# convolutions in graphs; steps take up to 9 % less (0.11.2). Earlier versions cannot record them.
GRAPHS = "xla_gpu_enable_command_buffer"
"""The compiler option that names what CUDA graphs hold."""
_KERNELS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL"
GRAPH_OPTIONS: dict[str, dict[str, Any]] = {
    "gpu": {GRAPHS: f"{_KERNELS},DYNAMIC_SLICE_FUSION,CONVOLUTION"} if VERSION >= (0, 11) else {},
}
"""Compiler options, by platform, that have convolutions in graphs (`compiler.recorded`)."""

# A copy of a slice of a loop's stack to or from host memory is a dynamic slice, too, and a graph
# launches all that it holds one after another: no copy of a recorded loop hides under a kernel.
# Without them in graphs a scanned decoder of 7 billion weights with its moments in host memory takes
# 2.80 s for 4.29 (H200, 0.11.2).
STREAM_GRAPH_OPTIONS: dict[str, dict[str, Any]] = {
    "gpu": {GRAPHS: _KERNELS} if VERSION >= (0, 11) else {},
}
"""Compiler options, by platform, that keep such copies out of graphs."""

STREAM_OPTIONS: dict[str, dict[str, Any]] = {
    # XLA:GPU schedules a copy beside kernels only while two others at most are on their way, of
    # either direction, and only while the whole program is within the card's memory, to which it adds
    # the arguments that stay in host memory. Otherwise each copy stands right in front of its wait:
    # of a decoder of 7 billion weights with its moments in host memory, the copies that nothing
    # hides took a quarter of the step. The plan bounds both, and its fences hold (0.11.2).
    "gpu": {
        "xla_gpu_experimental_parallel_async_compute_limit": 1_000,
        "xla_gpu_memory_limit_slop_factor": 1_000,  # per cent of the card's memory
    },
}
"""Further compiler options, by platform, for programs with arguments in host memory."""


PLACES_OPTIONS = {"xla_disable_hlo_passes": "dynamic-slice-annotator"}
"""Compiler options by which XLA:GPU makes no rules of which slices loops copy (`compiler.places`):
kernels read and write them, over the link where a stack is in host memory."""


class OtherOptions(NamedTuple):
    """What compiler options change, for people; the operation that a step with them has; they."""

    what: str
    primitive: str
    options: Mapping[str, Any]


OTHER_OPTIONS: dict[str, tuple[OtherOptions, ...]] = {
    "gpu": (
        # XLA:GPU times its own kernels for products by Triton beside cuBLAS's, each product alone,
        # and takes the faster. In a whole step either may win: without Triton a GPT-2 takes 2 to 8 %
        # longer and a scanned decoder up to 10 % less (H100, 0.11.2).
        OtherOptions("products by cuBLAS", "dot_general", {"xla_gpu_enable_triton_gemm": False}),
    ),
}
"""Compiler options, by platform, that may make some steps faster and others slower."""

LONG_OPTIONS: dict[str, dict[str, str]] = {
    # XLA:GPU's multi-output fusion walks through the graph for each pair of siblings, to see whether
    # one leads to the other: of 35,000 kernels that takes longer than all else (0.11.2).
    "gpu": {"xla_disable_hlo_passes": "multi_output_fusion"},
}
"""Compiler options, by platform, for steps of very many kernels."""

SIZED_OPTIONS: dict[str, dict[str, str]] = {
    # XLA:CPU has assigned its buffers before LLVM writes code. With that unoptimised ResNet-50 takes
    # 5.5 s of a processor in place of 9.5, and needs the same bytes (0.10.2). On a GPU there are
    # kernels to time before the bytes are known.
    "cpu": {"xla_backend_optimization_level": "0"},
}
"""Compiler options, by platform, for programs that are compiled to know their memory, and not run."""

DESCRIBED_OPTIONS: dict[str, dict[str, str]] = {
    # With no card to time kernels on, XLA:GPU compiles all candidates all the same, and takes the
    # first. So does this, with the same buffers, in half of the time (0.11.2).
    "gpu": {"xla_gpu_autotune_level": "0"},
}
"""Compiler options, by platform, for devices that are not there."""

DESCRIBED_LARGE_OPTIONS: dict[str, dict[str, str]] = {
    # Of the kernels for a product the first is Triton's; a card chooses cuBLAS's for large ones,
    # whose result is an element of a tuple, and nothing is written over that. So compiled, a decoder
    # of 1.1 billion weights needs 20.266 GiB, and 29.887 by another plan, as on an H200 (0.11.2).
    "gpu": {"xla_gpu_enable_triton_gemm": "False"},
}
"""Further ones, for programs beside which cuBLAS's workspace of 32 MiB is negligible."""

NOT_CONFIGURED = ("No supported config found", "Failed to get configs")
"""XLA's errors where `DESCRIBED_OPTIONS` leave a kernel without parameters that has no defaults, such
as a product of an operand that is transposed where it is read."""

NOT_TIMED = ("All configs failed during profiling",)
"""XLA's error where the card has no room for the operands of a kernel that is to be timed."""


def triton_params(warps: int, stages: int) -> dict[str, Any]:
    """Arguments of `pallas_call` for a Triton kernel of so many warps and pipeline stages.

    JAX 0.12 still has this backend, but warns that it will go.
    """
    from jax.experimental.pallas import triton

    return {"compiler_params": triton.CompilerParams(num_warps=warps, num_stages=stages)}


def triton_assembly(template: str, operands: Sequence[Any]) -> Any:
    """What PTX of one result ($0) makes of u32 operands ($1 and so on) in a Triton kernel, for each
    element."""
    from jax.experimental.pallas import triton

    [made] = triton.elementwise_inline_asm(
        template,
        args=operands,
        constraints=",".join(["=r", *["r"] * len(operands)]),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(operands[0].shape, "int32")],
    )
    return made.astype("uint32")  # Triton's integers have no sign


def on_described_gpu(kind: str) -> Any:
    """A context in which Triton kernels are lowered for the NVIDIA card of that kind ("NVIDIA H200"),
    which need not be there: Pallas asks the first device of the process otherwise."""
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    device = AbstractDevice(device_kind=kind, num_cores=None, platform="cuda")
    return use_abstract_mesh(AbstractMesh((1,), ("_",), abstract_device=device))
