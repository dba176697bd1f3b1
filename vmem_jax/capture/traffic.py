"""traffic: the bytes that a kernel reads and writes.

All of its operands and results, but for what it does not touch: of an operand that it cuts a slice
out of the rest, of a result that is an operand with another slice in it the rest, and all that only
goes through a barrier. A loop writes its stacks beside what its iterations move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vmem_jax.capture.kernels import Kernel
from vmem_jax.capture.primitives import Class, class_of, nbytes
from vmem_jax.jax_compat import Atom, JaxprEqn, Var


def touched_nbytes(kernel: Kernel, eqns: Sequence[JaxprEqn], size: Callable[[Var], int]) -> int:
    """Bytes that `kernel` reads and writes.

    Args:
      size: of a value on one device.
    """
    root = eqns[kernel.root]
    if root.primitive.name == "optimization_barrier":
        return 0
    if root.primitive.name == "scan":  # its body has all, but for copies to and from stacks
        return 0
    own = [eqns[i] for i in kernel.equations]
    read = sum(_read(v, own, size) for v in kernel.reads)
    return read + sum(_written(v, own, size) for v in kernel.writes)


def read_nbytes(
    v: Var, kernel: Kernel, eqns: Sequence[JaxprEqn], size: Callable[[Var], int]
) -> int:
    """Bytes that `kernel` reads of `v`."""
    return _read(v, [eqns[i] for i in kernel.equations], size)


def _read(v: Var, own: Sequence[JaxprEqn], size: Callable[[Var], int]) -> int:
    total = 0
    for eqn in own:
        for index, a in enumerate(eqn.invars):
            if a is not v:
                continue
            name = eqn.primitive.name
            if index == 0 and (name in ("dynamic_slice", "gather") or _is_cut_in_rows(eqn)):
                total += size(v) * nbytes(eqn.outvars[0].aval) // max(nbytes(v.aval), 1)
            elif index == 0 and name == "dynamic_update_slice":
                pass
            elif class_of(eqn) is Class.VIEW and _is_read(eqn.outvars[0], own):
                total += _read(eqn.outvars[0], own, size)
            else:
                return size(v)
    return min(total, size(v))


def _is_cut_in_rows(eqn: JaxprEqn) -> bool:
    """Whether `eqn` is a slice that leaves what it skips of its operand unread: the layer of a stack,
    but not every second column."""
    if eqn.primitive.name != "slice":
        return False
    strides = eqn.params["strides"]
    return strides is None or strides[-1:] in ((), (1,))


def _is_read(v: Var, own: Sequence[JaxprEqn]) -> bool:
    return any(a is v for eqn in own for a in eqn.invars)


def _written(v: Atom, own: Sequence[JaxprEqn], size: Callable[[Var], int]) -> int:
    for eqn in own:
        if v in eqn.outvars:
            if eqn.primitive.name == "dynamic_update_slice":
                part = nbytes(eqn.invars[1].aval)
                return size(v) * part // max(nbytes(v.aval), 1)
    return size(v)
