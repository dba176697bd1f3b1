"""cudnn: the plans that it has for a convolution, how long they take, and whether they are right."""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import functools
import importlib.util
import math
import statistics
from pathlib import Path
from typing import Any

import jax

from vmem_jax.conv.database import Database, identity_of
from vmem_jax.conv.devices import description
from vmem_jax.conv.racing import race
from vmem_jax.conv.scratch import Scratch
from vmem_jax.core.convolution import Convolution, Micro
from vmem_jax.transfer import extension

_RUNTIME_COMPILATION = 0  # among cuDNN's behaviour notes
_MOST_SETS = 11
"""Of buffers to time a plan in: as many as there are runs."""

_MOST_OFF = 0.1
"""Of a result's root mean square: what a plan may be off. FFT, Winograd and sums in 16 bits are off
by a hundredth, a kernel that takes other padding than it was given by more than one."""

_INSTALL = 'pip install "vmem_jax[gpu-compile]"'


class Note(enum.IntEnum):
    """What cuDNN says of an engine's arithmetic, as far as it matters here."""

    TENSOR_CORE = 0
    DOWN_CONVERT_INPUTS = 1
    REDUCED_PRECISION_REDUCTION = 2
    FFT = 3
    NONDETERMINISTIC = 4
    WINOGRAD = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """One algorithm of cuDNN for a convolution, with its settings.

    Attributes:
      engine: its global index among cuDNN's engines for this pass.
      knobs: settings of the engine, pairs (type, value), sorted; all others are as cuDNN sets them.
      workspace: bytes that it needs while it runs, those of padded copies included.
      notes: numbers of cuDNN's numerical notes; those of `Note`, and others.
      compiled: its kernel is compiled when the plan is made.
      source: who named it: cuDNN's heuristics "A", "B" or "fallback", or "default", nobody.
      channels: as those of a `Micro`: what x is padded to, 0 for none.
    """

    engine: int
    knobs: tuple[tuple[int, int], ...]
    workspace: int
    notes: frozenset[int]
    compiled: bool
    source: str
    channels: int = 0

    @property
    def tensor_cores(self) -> bool:
        return Note.TENSOR_CORE in self.notes


def plans(
    convolution: Convolution, target: str | jax.Device, compiling: bool = False
) -> tuple[Plan, ...]:
    """Every plan for `convolution`, cuDNN's favourites first; none where it cannot do it.

    After them come those for each of `Convolution.paddings`, where the extension has kernels. Left
    out are plans that round the operands to a narrower type, always, and those that use tensor cores
    where `convolution.strict`. XLA leaves out the same. Indices and knobs mean something to one
    version of cuDNN on one kind of device.

    Args:
      target: a GPU that is here, or the name of one that is not ("h200"). The latter's list is the
        shorter: for a described Hopper GPU cuDNN names none by FFT or Winograd.
      compiling: also list plans that compile their kernels when they are made, on a GPU that is
        here. Each takes seconds, now and in every process that uses it.

    Raises:
      ValueError: the target is no GPU, or none that can be described.
      ImportError: cuDNN, what it needs, or the extension's part for it is not there.
    """
    where: int | str
    if isinstance(target, str):
        where = description(target)
        module = _open()
        _prepare_without_device()
    else:
        where = _ordinal(target)
        module = _open()
    banned = [Note.DOWN_CONVERT_INPUTS, *([Note.TENSOR_CORE] if convolution.strict else [])]
    arguments = _arguments(convolution)
    return tuple(
        Plan(
            engine=plan.engine,
            knobs=tuple(plan.knobs),
            workspace=plan.workspace,
            notes=frozenset(plan.notes),
            compiled=_RUNTIME_COMPILATION in plan.behaviour,
            source=plan.source,
            channels=channels,
        )
        for channels in (0, *convolution.paddings)
        for plan in module.conv_plans(
            *arguments,
            device=where,
            banned=banned,
            compiling=compiling,
            channels=channels,
            **_prologue(convolution),
        )
    )


def seconds(
    convolution: Convolution,
    plan: Plan,
    device: jax.Device,
    incumbent: float = math.inf,
    loaded: bool = False,
    scratch: Scratch | None = None,
) -> tuple[float, ...]:
    """What each run of a plan takes on `device`, on random data; padding included.

    A plan that is faster than the incumbent is also held against sums of products: cuDNN 9.19 lists
    plans that compute something else. On an H200 those for gradients to w of strided convolutions
    with unequal padding, as "SAME" has it, shift x by one.

    Args:
      incumbent, loaded: as `conv/racing.py` has them; how often the plan is run follows from them.
      scratch: memory to use; by default some is taken for this call.

    Raises:
      ValueError: the device is no GPU, or JAX has the dtype turned off.
      RuntimeError: the plan does not run there, what it computes is not `convolution`, or there is
        too little memory.
      ImportError: as `plans`.
    """
    trial = _trial(convolution, plan, device, scratch, _MOST_SETS)
    times = race(trial.run, incumbent, loaded)
    if statistics.median(times) < incumbent:
        _refuse(convolution, plan, trial.deviation())
    return times


def check(
    convolution: Convolution,
    algorithm: Plan | Micro,
    device: jax.Device,
    scratch: Scratch | None = None,
) -> None:
    """Holds what `algorithm` computes on `device` against the convolution, on random data.

    Raises:
      As `seconds`.
    """
    _refuse(convolution, algorithm, _trial(convolution, algorithm, device, scratch, 1).deviation())


def _trial(
    convolution: Convolution,
    algorithm: Plan | Micro,
    device: jax.Device,
    scratch: Scratch | None,
    most: int,
) -> Any:
    """The extension's `ConvTrial`, with `most` sets of buffers at most."""
    where, module = _ordinal(device), _open()
    if jax.dtypes.canonicalize_dtype(convolution.dtype) != convolution.dtype:
        raise ValueError(f"{convolution.dtype} needs JAX's option `jax_enable_x64`.")
    scratch = Scratch(device) if scratch is None else scratch
    return module.ConvTrial(
        *_arguments(convolution),
        device=where,
        engine=algorithm.engine,
        channels=algorithm.channels,
        knobs=list(algorithm.knobs),
        sets=scratch.sets(convolution, algorithm.workspace, most),
        workspace=max(algorithm.workspace, 1),
        **_prologue(convolution),
    )


def _refuse(convolution: Convolution, algorithm: Plan | Micro, deviation: float) -> None:
    """Raises where the result is off by `deviation` of its root mean square, and that is much.

    Without the kernel that measures it, it is nan; the plans that are known to be wrong are refused.
    """
    if math.isnan(deviation) and any(low != high for low, high in convolution.padding):
        raise RuntimeError(
            "unequal padding, and nothing to check the result by: built without nvcc"
        )
    if deviation > _MOST_OFF:
        raise RuntimeError(
            f"engine {algorithm.engine} computes something else: off by {deviation:.2g} times "
            "the root mean square"
        )


class Cudnn:
    """cuDNN as a library of `conv/profiler.py`, on a GPU or on the name of one."""

    def __init__(self, target: str | jax.Device) -> None:
        self.target = target
        self._scratch = None if isinstance(target, str) else Scratch(target)
        self._loaded: set[tuple[Any, ...]] = set()

    def plans(self, convolution: Convolution) -> tuple[Plan, ...]:
        return plans(convolution, self.target)

    def seconds(self, convolution: Convolution, plan: Plan, incumbent: float) -> float:
        if isinstance(self.target, str):
            return math.nan
        kernels = convolution.with_batch(0), plan.engine, plan.knobs, plan.channels
        loaded = kernels in self._loaded
        times = seconds(convolution, plan, self.target, incumbent, loaded, self._scratch)
        self._loaded.add(kernels)
        return statistics.median(times)


def database(target: str | jax.Device) -> Database:
    """What is known of the times of this version of cuDNN on a kind of GPU, or on the name of one.

    Raises:
      ImportError: as `version`.
    """
    device = target if isinstance(target, str) else target.device_kind
    return Database(identity_of(device, str(version())))


def version() -> int:
    """That of cuDNN, such as 91900.

    Raises:
      ImportError: it, or the extension's part for it, is not there.
    """
    return _open().cudnn_open("")


def _arguments(c: Convolution) -> tuple[Any, ...]:
    low, high = (tuple(side) for side in zip(*c.padding, strict=True))
    shapes = (c.x_shape, c.w_shape, c.y_shape)
    window = (c.strides, low, high, c.dilation)
    return str(c.which), str(c.epilogue), c.dtype, c.channels_last, shapes, window


def _prologue(c: Convolution) -> dict[str, bool]:
    return {"prologue": True} if c.prologue else {}


def _ordinal(device: jax.Device) -> int:
    if device.platform not in ("gpu", "cuda"):
        raise ValueError(f"cuDNN has no plans for {device}: it runs on NVIDIA GPUs.")
    return device.local_hardware_id


@functools.cache
def _open() -> Any:
    """The extension, with cuDNN open: the copy that JAX has loaded, or else would load."""
    module = extension.load()
    if module.CUDNN_BUILT is None:
        raise ImportError(
            "vmem_jax's extension was built without cuDNN, so it runs no convolutions. Install "
            "vmem_jax_cuda13, or a CUDA toolkit and nvidia-cudnn-cu13 and then vmem_jax's sources "
            "again, with CUDNN_INCLUDE_DIR naming the directory of cudnn.h if the end of the build's "
            "log says that there is none."
        )
    try:
        module.cudnn_open(next(iter(_wheel_libraries("libcudnn.so.9")), ""))
    except RuntimeError as error:
        raise ImportError(f"{error}. Install it with JAX's CUDA wheels: {_INSTALL}") from error
    return module


@functools.cache
def _prepare_without_device() -> None:
    """Loads what cuDNN needs to describe a device that is not here.

    It would look for these itself, and end the process where it finds no cuBLASLt.
    """
    for name in ("libnvrtc.so", "libcublasLt.so"):
        if not any(_loads(path) for path in _wheel_libraries(f"{name}.*")) and not any(
            _loads(f"{name}.{major}") for major in (13, 12)
        ):
            raise ImportError(f"cuDNN needs {name}, which is not there. Install it: {_INSTALL}")
    stub = Path(extension.load().__file__).with_name("_driver_stub.so")  # not here, if editable
    if not _loads("libcuda.so.1") and not _loads(stub):
        raise ImportError(f"vmem_jax is not installed whole: there is no {stub.name} in it.")


def _loads(library: str | Path) -> bool:
    try:
        ctypes.CDLL(str(library))
    except OSError:
        return False
    return True


def _wheel_libraries(pattern: str) -> list[str]:
    """Libraries of NVIDIA's wheels, found without importing anything."""
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec is not None else None
    return [
        str(path) for root in roots or () for path in sorted(Path(root).glob(f"*/lib/{pattern}"))
    ]
