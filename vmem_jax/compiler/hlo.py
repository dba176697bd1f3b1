"""hlo: the instructions of a compiled step, from its text."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

ENTRY = "ENTRY"
"""The name that `computations` gives to the one that runs."""

_INSTRUCTION = re.compile(r"^ *(ROOT )?%(\S+) = (.+?) ([a-z][\w-]*)\(([^()]*)\)(.*)$", re.M)
_COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(.*\{\n((?:.*\n)*?)\}", re.M)
_NAME = re.compile(r"%([\w.-]+)")
_CALLED = re.compile(r"\b(calls|body|condition|to_apply|\w+_computation)=%([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_INDEX = re.compile(r"\bindex=(\d+)")
_ARRAY = re.compile(r"\b([a-z]+(\d*)\w*)\[([\d,]*)\]")
_SHAPE = re.compile(r"\w+\[[\d,]*\](?:\{[^}]*\})?")


class Instruction(NamedTuple):
    """One line of the text.

    Attributes:
      shape: of its result, as the text has it: "bf16[2,3]{1,0}", or of a tuple "(f32[], s32[])".
      arguments: what stands in its parentheses: operands, or the number of a parameter.
      rest: what stands behind the operands: `calls=%a`, metadata, the backend's configuration.
      is_root: whether its computation returns it.
    """

    shape: str
    kind: str
    arguments: str
    rest: str
    is_root: bool

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of instructions."""
        return tuple(_NAME.findall(self.arguments))

    @property
    def element(self) -> int:
        """Which one of a tuple it takes; −1 if it takes none."""
        index = _INDEX.search(self.rest) if self.kind == "get-tuple-element" else None
        return int(index[1]) if index else -1

    @property
    def called(self) -> dict[str, str]:
        """The names of computations, by "calls", "body", "condition" and other words before them."""
        return dict(_CALLED.findall(self.rest))

    @property
    def trips(self) -> int | None:
        """How often a loop runs, where that is known."""
        trips = _TRIPS.search(self.rest)
        return int(trips[1]) if trips else None

    @property
    def shapes(self) -> list[str]:
        """Those of the arrays of its result."""
        return _SHAPE.findall(self.shape)


def instructions(text: str) -> dict[str, Instruction]:
    """By name, in the order of the text. Constants with parentheses in their values are left out."""
    return {
        name: Instruction(shape, kind, arguments, rest, bool(root))
        for root, name, shape, kind, arguments, rest in _INSTRUCTION.findall(text)
    }


def computations(text: str) -> dict[str, dict[str, Instruction]]:
    """The instructions of each computation, by its name; those of the whole step by ENTRY."""
    return {
        ENTRY if entry else name: instructions(body)
        for entry, name, body in _COMPUTATION.findall(text)
    }


def nbytes(shape: str) -> int:
    """Bytes of the arrays in a shape of the text; a `pred` takes one, a token none."""
    total = 0
    for name, bits, sizes in _ARRAY.findall(shape):
        width = 8 if name == "pred" else int(bits or 0)
        total += (math.prod(int(n) for n in sizes.split(",") if n) * width + 7) // 8
    return total
