"""timing: the seconds of one compiled call on random data, without what dispatching it costs."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Format, Layout
from jax.extend.core import jaxpr_as_fun

from vmem_jax import jax_compat as compat
from vmem_jax.capture.primitives import nbytes
from vmem_jax.profile.isolate import Isolated

_BLOCK = 1 << 20
"""Random numbers that are drawn once and repeated: drawing all takes longer than timing."""

_PROGRAM_SECONDS = 300e-6
"""A program this long hides its dispatch (some 50 µs) behind the one before it."""

_FEW_COPIES, _MOST_COPIES = 8, 32
_LEAST_SECONDS = 1e-8
"""What is left where a step takes less than what dispatching it varies by: a launch on a CPU."""

_LOOP_SECONDS = 0.015
_LOOPS = 5


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """What a program costs besides its steps, in seconds.

    Attributes:
      program: for a program with one result.
      result: more for each further result.
    """

    program: float = 0.0
    result: float = 0.0

    def seconds(self, results: int) -> float:
        return self.program + self.result * (results - 1)


def seconds_a_call(call: Callable[[], Any], most: int = 1000) -> float:
    """Seconds of one `call` in a row of them: the median of a few rows, warmed up.

    Args:
      call: dispatches work and returns its results.
      most: calls in a row at most; their results may be in memory together.
    """
    jax.block_until_ready(call())
    began = time.perf_counter()
    jax.block_until_ready(call())
    once = max(time.perf_counter() - began, 1e-9)
    count = max(1, min(most, math.ceil(_LOOP_SECONDS / once)))
    rows = []
    for _ in range(_LOOPS):
        began = time.perf_counter()
        for _ in range(count):
            out = call()
        jax.block_until_ready(out)
        rows.append((time.perf_counter() - began) / count)
    return statistics.median(rows)


def dispatch_seconds(device: jax.Device) -> Dispatch:
    """What a program costs besides its steps: on a CPU all that the host does for it."""
    if device.platform != "cpu":
        return Dispatch(_between_programs(device))
    x = jax.device_put(np.zeros(8, np.float32), device)

    def seconds(results: int) -> float:
        compiled = jax.jit(lambda x: [x + i for i in range(results)]).lower(x).compile()
        return seconds_a_call(lambda: compiled(x))

    few, many = seconds(1), seconds(_MOST_COPIES + 1)
    return Dispatch(few, max(many - few, 0.0) / _MOST_COPIES)


def _between_programs(device: jax.Device) -> float:
    """What a device waits between two programs that the host has dispatched ahead of it.

    Programs of few and of many kernels take a + few · b and a + many · b seconds: a is wanted. It is
    18 µs on an H200, a sixteenth of a program of 300 µs.
    """
    x = jax.device_put(np.zeros(1 << 23, np.float32), device)

    def seconds(kernels: int) -> float:
        def program(x: jax.Array) -> jax.Array:
            for _ in range(kernels):
                x = lax.optimization_barrier(x * 1.5)
            return x

        compiled = jax.jit(program).lower(x).compile()
        return seconds_a_call(lambda: compiled(x))

    few, many = seconds(_FEW_COPIES), seconds(_MOST_COPIES)
    a_kernel = (many - few) / (_MOST_COPIES - _FEW_COPIES)
    return max(few - _FEW_COPIES * a_kernel, 0.0)


class Operands:
    """Random arguments on one device, kept for the next step while there is room.

    Floats are normal and bools random, integers are 0 (labels, indices: always in range), keys
    valid. Values of the inside of a network are what a ReLU leaves of that, half of them 0: a GPU
    multiplies dense random numbers up to a fifth slower, because they cost more power.
    Two arguments of a step are never the same array: reading it twice would be cheaper.
    """

    def __init__(self, device: jax.Device, limit_nbytes: int) -> None:
        self._device = device
        self._limit = limit_nbytes
        self._kept: dict[tuple[Any, ...], jax.Array] = {}
        random = np.random.default_rng(0)
        self._normal = random.standard_normal(_BLOCK, np.float32)
        self._bools = random.integers(0, 2, _BLOCK).astype(bool)

    def of(self, avals: Sequence[Any], inside: Sequence[bool] = ()) -> list[jax.Array]:
        """An array for each of `avals`.

        Args:
          inside: for each whether it is a value of the inside of a network (default: none is).
        """
        wanted: list[tuple[Any, ...]] = []
        for i, aval in enumerate(avals):
            sort = (aval.shape, aval.dtype, i < len(inside) and inside[i])
            wanted.append((*sort, sum(w[:3] == sort for w in wanted)))
        need = sum(nbytes(a) for a in avals)
        kept = sum(nbytes(x) for k, x in self._kept.items() if k not in wanted)
        if kept + need > self._limit:
            self._kept = {k: x for k, x in self._kept.items() if k in wanted}
        for key in wanted:
            if key not in self._kept:
                self._kept[key] = self._make(*key[:3])
        found = [self._kept[key] for key in wanted]
        if need > self._limit // 2:
            self._kept = {}
        return found

    def clear(self) -> None:
        """Gives the memory back."""
        self._kept = {}

    def _make(self, shape: tuple[int, ...], dtype: Any, inside: bool) -> jax.Array:
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            keys = jax.random.key(0, impl=str(jax.random.key_impl(jnp.empty(0, dtype))))
            return jax.device_put(jax.random.split(keys, shape) if shape else keys, self._device)
        if jnp.issubdtype(dtype, jnp.inexact):
            normal = np.maximum(self._normal, 0) if inside else self._normal
            host = np.resize(normal.astype(dtype), shape)
        elif dtype == jnp.bool_:
            host = np.resize(self._bools, shape)
        else:
            host = np.zeros(shape, dtype)
        return jax.device_put(host, self._device)


def copies_of(isolated: Isolated, expected: float, limit_nbytes: int) -> int:
    """How often a program repeats a step that is expected to take so many seconds."""
    results = sum(map(nbytes, isolated.out_avals))
    most = max(1, min(_MOST_COPIES, limit_nbytes // (4 * max(results, 1))))
    fewest = 8 if isolated.carried else 1  # the first of them copies what the others update
    return max(fewest, min(most, math.ceil(_PROGRAM_SECONDS / max(expected, 1e-9))))


def compile_step(
    isolated: Isolated, device: jax.Device, copies: int, free_layouts: bool = True
) -> Any:
    """A compiled program with `copies` of the step, each after the one before.

    Args:
      free_layouts: let the compiler choose the layouts of temporaries, as in the whole program.

    Raises:
      jax.errors.JaxRuntimeError: it does not fit, or cannot be compiled.
    """
    fun = jaxpr_as_fun(isolated.closed)
    carried = dict(isolated.carried)

    def step(*args: Any) -> Any:
        results = []
        for left in range(copies - 1, -1, -1):
            outs = fun(*args)
            if left:
                # Tied to this run's results, the next can neither be merged with it nor overlap.
                # The results are returned, or nothing would ask for them.
                args, outs = lax.optimization_barrier((tuple(args), tuple(outs)))
                args = tuple(outs[carried[i]] if i in carried else a for i, a in enumerate(args))
                outs = [x for o, x in enumerate(outs) if o not in carried.values()]
            results.append(outs)
        return results

    options: Any = compat.FENCE_OPTIONS.get(device.platform) or None
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in isolated.avals]
    here: Any = jax.sharding.SingleDeviceSharding(device)
    free = (
        isolated.free if free_layouts and not _has_keys(isolated) else (False,) * len(isolated.free)
    )
    formats = [Format(Layout.AUTO, here) if chosen else here for chosen in free]
    reads, writes = formats[: len(avals)], formats[len(avals) :]
    others = [p for o, p in enumerate(writes) if o not in carried.values()]
    outs = [others] * (copies - 1) + [writes]
    jitted = jax.jit(step, in_shardings=tuple(reads), out_shardings=outs)
    return jitted.lower(*avals).compile(compiler_options=options)


def time_step(
    isolated: Isolated,
    operands: Operands,
    *,
    expected: float,
    limit_nbytes: int,
    dispatch: Dispatch,
    compiler: Callable[[Isolated, int], Any],
) -> float:
    """Seconds that `isolated` takes inside a program, launches included.

    A short step stands in one program many times; whole programs are dispatched back to back, so
    that the device never waits for the host.

    Args:
      expected: seconds, for the number of copies; corrected once if it was far off.
      limit_nbytes: for results at most.
      dispatch: to take off every program.
      compiler: `compile_step` of the step with a number of copies.

    Raises:
      jax.errors.JaxRuntimeError: it does not fit, or cannot be compiled.
    """
    results = sum(map(nbytes, isolated.out_avals))
    copies = copies_of(isolated, expected, limit_nbytes)
    seconds = 0.0
    for _ in range(2):
        compiled = compiler(isolated, copies)
        formats = compiled.input_formats[0]
        arrays = operands.of(isolated.avals, isolated.free)
        args = [
            x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jax.device_put(x, f)
            for x, f in zip(arrays, formats, strict=True)
        ]
        at_once = max(1, limit_nbytes // (4 * max(results * copies, 1)))
        total = seconds_a_call(functools.partial(compiled, *args), min(1000, at_once))
        total -= dispatch.seconds(copies * len(isolated.out_avals))
        total = max(total, copies * _LEAST_SECONDS)
        seconds = total / copies
        wanted = copies_of(isolated, seconds, limit_nbytes)
        if total > _PROGRAM_SECONDS / 3 or wanted < 2 * copies:
            break
        copies = wanted
    return seconds


def _has_keys(isolated: Isolated) -> bool:
    return any(
        jnp.issubdtype(a.dtype, jax.dtypes.prng_key) for a in (*isolated.avals, *isolated.out_avals)
    )
