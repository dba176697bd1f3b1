"""views: kernels of a compiled step that read a value as it is and reshaped, and may write over it.

XLA lets a kernel write its result over an operand that it reads element by element. Of a value that
it reads in two shapes it looks at one alone (`BufferAssigner::LiveRangeInterferes`). If the other
is read at other elements than are written, results are wrong: a max-pool's index, of the reshaped
input of the pool, beside the derivative of what made it. Under plain `jax.jit` the reshape is
mostly part of the kernel. Behind a barrier it stays outside of one that would repeat it often.
"""

from __future__ import annotations

from collections.abc import Mapping

from vmem_jax.compiler.hlo import Instruction, instructions


def may_write_over_views(text: str) -> bool:
    """Whether a kernel of the compiled step `text` reads a value in two shapes, and makes a result of
    one of them."""
    found = instructions(text)
    for each in found.values():
        if each.kind != "fusion" or len(each.operands) < 2:
            continue
        results = each.shapes
        shapes: dict[str, set[str]] = {}
        for operand in each.operands:
            if operand in found:
                shapes.setdefault(_value(operand, found), set()).add(found[operand].shape)
        if any(len(of) > 1 and of.intersection(results) for of in shapes.values()):
            return True
    return False


def _value(name: str, found: Mapping[str, Instruction]) -> str:
    """The instruction that made the value of `name`, behind views and barriers."""
    while (one := found.get(name)) is not None:
        inner = found.get(one.operands[0]) if one.operands else None
        if one.kind == "bitcast" or (one.kind == "opt-barrier" and not one.shape.startswith("(")):
            name = one.operands[0]
        elif one.kind == "get-tuple-element" and inner is not None and inner.kind == "opt-barrier":
            name = _value_of_tuple(inner.operands[0], one.element, found)
        elif one.kind == "get-tuple-element" and inner is not None and inner.kind == "tuple":
            name = inner.operands[one.element]
        else:
            return name
    return name


def _value_of_tuple(name: str, index: int, found: Mapping[str, Instruction]) -> str:
    one = found.get(name)
    while one is not None and one.kind == "opt-barrier":
        name = one.operands[0]
        one = found.get(name)
    return one.operands[index] if one is not None and one.kind == "tuple" else f"{name}#{index}"
