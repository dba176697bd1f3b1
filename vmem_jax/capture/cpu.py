"""cpu: the bytes that XLA:CPU holds beside operands and results while it convolves, or makes random
bits.

Its library for convolutions takes `[batch, *space, channels]` and `[*space, in, out]` alone, in
float32. Where the dimensions stand in another order, XLA copies (ConvCanonicalization): both operands
of a gradient to a kernel, in which samples and channels have changed places, and what is convolved
channels first. In the body of a loop it does not, and convolves as they stand. Halves are cast to
float32, in loops too.

XLA:CPU computes in float32. The cast of a slice of a stack in half precision is the slice of a cast
stack, which no iteration changes, so XLA of JAX 0.10 casts the stack as a whole before the loop, and
whatever else in half precision is the same in every iteration.

JAX makes threefry bits on the CPU by a loop over rounds, on two arrays of words. XLA holds both as
the loop reads and as it writes them: four words of 32 bits for each word that is asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from vmem_jax import jax_compat as compat
from vmem_jax.core.body import body_nbytes
from vmem_jax.core.program import Program
from vmem_jax.jax_compat import Atom, JaxprEqn, Var

_CAST = {"bfloat16": 2, "float16": 2}
"""How many times as large what is cast to float32 is."""


_FLOAT32 = 2
"""The same of what is in half precision."""

_WORDS_NBYTES = 4 * 4
"""Of threefry, for each word. Measured at 9 MiB of words: 27.0 MiB beside the result."""


def cpu_workspace(eqn: JaxprEqn, size: Callable[[Atom], int], *, looped: bool) -> int:
    """Bytes that are live beside operands and results while `eqn` runs on the CPU.

    Args:
      size: bytes of an operand or result.
      looped: it runs in the body of a loop.
    """
    name = eqn.primitive.name
    if name == "conv_general_dilated":
        return _copies_nbytes(eqn, size, looped=looped)
    fry = name == "random_bits" and str(eqn.invars[0].aval.dtype) == "key<fry>"
    if fry or name in ("random_part", "threefry2x32"):
        out = eqn.outvars[0]
        words = size(out) // out.aval.dtype.itemsize
        return max(_WORDS_NBYTES * words - sum(map(size, eqn.outvars)), 0)
    return 0


def casts_nbytes(eqn: JaxprEqn, size: Callable[[Atom], int], stays: Callable[[Atom], bool]) -> int:
    """Bytes by which the float32 copies of what the loop `eqn` reads exceed what they are made of.

    Args:
      size: bytes of an operand.
      stays: whether an operand is read by others, too, so that it is there beside its copy.
    """
    if not compat.CASTS_STACKS_ON_CPU:
        return 0
    consts, carry = compat.scan_counts(eqn)
    same = [*eqn.invars[:consts], *eqn.invars[consts + carry :]]
    halves = {a for a in same if isinstance(a, Var) and is_half(a)}
    return sum((_FLOAT32 if stays(a) else _FLOAT32 - 1) * size(a) for a in halves)


def is_half(atom: Any) -> bool:
    """Whether XLA:CPU casts `atom` to float32 to compute with it."""
    return getattr(atom.aval, "dtype", None) is not None and atom.aval.dtype.name in _CAST


def _copies_nbytes(eqn: JaxprEqn, size: Callable[[Atom], int], *, looped: bool) -> int:
    """Bytes of the copies that are live while `eqn`, a `conv_general_dilated`, runs.

    Args:
      size: bytes of an operand or result.
      looped: it runs in the body of a loop.
    """
    numbers = eqn.params["dimension_numbers"]
    batch, channels, *space = numbers.lhs_spec
    lhs = _copy(eqn.invars[0], (batch, *space, channels), size, looped)
    out_channels, in_channels, *space = numbers.rhs_spec
    rhs = _copy(eqn.invars[1], (*space, in_channels, out_channels), size, looped)
    batch, channels, *space = numbers.out_spec
    made = _copy(eqn.outvars[0], (batch, *space, channels), size, looped)
    if not made:
        return lhs + rhs
    # the result itself is written after the copies of the operands have gone
    return max(lhs + rhs + made - size(eqn.outvars[0]), made)


def _copy(atom: Any, order: Sequence[int], size: Callable[[Atom], int], looped: bool) -> int:
    """Bytes of the copy of `atom` with its dimensions in `order`; 0 where it is taken as it is."""
    shape, cast = atom.aval.shape, _CAST.get(atom.aval.dtype.name, 1)
    moved = [dim for dim in order if shape[dim] > 1]  # one of a single element stands anywhere
    if cast == 1 and (looped or moved == sorted(moved)):
        return 0
    return cast * size(atom)


def more_in_float32(body: Program, variables: Sequence[Var]) -> int:
    """Bytes that the iteration `body` takes more where halves are computed in float32.

    Args:
      variables: of its buffers.
    """
    buffers = tuple(
        dataclasses.replace(buffer, nbytes=2 * buffer.nbytes) if is_half(v) else buffer
        for buffer, v in zip(body.buffers, variables, strict=True)
    )
    return body_nbytes(dataclasses.replace(body, buffers=buffers)) - body_nbytes(body)
