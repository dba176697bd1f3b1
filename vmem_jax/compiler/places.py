"""places: whether a compiled loop copies those slices that the program says.

XLA:GPU copies a slice of an array, rather than reading it by a kernel, where it follows from the
iteration's number. A rule in the program says which: the first place, and what an iteration adds. XLA
makes wrong ones. Of a number that the loop carries through a barrier before it adds to it (0.11.2),
and of one that is computed of the iteration's for several copies (0.10.2), it takes the iteration's
number in its place: a loop that counts down then copies the slices of other layers.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping

from vmem_jax.compiler.hlo import ENTRY, Instruction, computations, nbytes

_RULE = re.compile(r'"dynamic_slice_config":\{([^}]*)\}')
_NUMBER = re.compile(r'"(\w+)":"(-?\d+)"')
_ARRAY = re.compile(r"^\w+\[([\d,]*)\](?:\{([\d,]*))?")
_FIRST = {"dynamic-slice": 1, "dynamic-update-slice": 2}
"""Behind which operand the place of a slice stands."""

_SAME = ("bitcast", "convert", "copy", "opt-barrier", "reshape")
_COMPUTED: Mapping[str, Callable[..., int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "negate": operator.neg,
    "maximum": max,
    "minimum": min,
    "clamp": lambda least, x, most: min(max(least, x), most),
    "select": lambda chosen, x, other: x if chosen else other,
}
_WHOLE = re.compile(r"\{?(-?\d+)\}?")
_COMPARED = re.compile(r"\bdirection=([A-Z]+)")
_ITERATIONS = 3
"""So many are looked at of each loop: a rule adds the same in all."""


def are_right(text: str) -> bool:
    """Whether all such rules of the compiled step `text` say what the program does. One that cannot
    be followed does not."""
    if not _RULE.search(text):
        return True
    program = _Program(computations(text))
    return all(program.follows(*rule) for rule in _rules(program.every))


def rules(text: str) -> list[dict[str, int]]:
    """Each of them: "byte_offset", "byte_stride", and which loop counts, the innermost being 0."""
    return [rule for *_, rule in _rules(computations(text))]


_Computations = Mapping[str, Mapping[str, Instruction]]


def _rules(every: _Computations) -> Iterator[tuple[str, Instruction, dict[str, int]]]:
    """(where it stands, what copies a slice, its rule)."""
    for where, instructions in every.items():
        for one in instructions.values():
            if one.kind in _FIRST and (rule := _RULE.search(one.rest)):
                yield where, one, {name: int(n) for name, n in _NUMBER.findall(rule[1])}


class _Program:
    """The computations of a step.

    Attributes:
      loops: by its body, where a loop stands and which instruction it is.
      callers: the same of each other computation that is called.
    """

    def __init__(self, every: _Computations) -> None:
        self.every = every
        self.loops: dict[str, tuple[str, Instruction]] = {}
        self.callers: dict[str, tuple[str, Instruction]] = {}
        for where, instructions in every.items():
            for one in instructions.values():
                for word, called in one.called.items():
                    found = self.loops if word == "body" else self.callers
                    found[called] = where, one

    def follows(self, where: str, one: Instruction, rule: Mapping[str, int]) -> bool:
        around = [*self._loops_around(where)]
        at = rule.get("loop_index", 0)
        if at >= len(around):
            return False
        try:
            for numbers in itertools.product(*map(self._iterations, around)):
                iteration = dict(zip(around, numbers, strict=True))
                wanted = rule.get("byte_offset", 0) + rule.get("byte_stride", 0) * numbers[at]
                if self._place(where, one, iteration) != wanted:
                    return False
        except (LookupError, StopIteration, ValueError):  # so far the text is not understood
            return False
        return True

    def _loops_around(self, where: str) -> Iterator[str]:
        """The bodies of the loops that `where` is in, the innermost first."""
        while where != ENTRY:
            if where in self.loops:
                yield where
                where, _ = self.loops[where]
            elif where in self.callers:
                where, _ = self.callers[where]
            else:
                return

    def _iterations(self, body: str) -> range:
        """Those of a loop that are looked at."""
        trips = self.loops[body][1].trips
        return range(_ITERATIONS if trips is None else min(_ITERATIONS, trips))

    def _place(self, where: str, one: Instruction, iteration: Mapping[str, int]) -> int:
        """Bytes in front of the slice in its array."""
        array = _ARRAY.match(shape := self.every[where][one.operands[0]].shape)
        if array is None:
            raise LookupError(f"the place of a slice of {shape}")
        sizes = [int(n) for n in array[1].split(",") if n]
        order = [int(n) for n in array[2].split(",")] if array[2] else [*range(len(sizes))][::-1]
        elements = 0
        for at, name in enumerate(one.operands[_FIRST[one.kind] :]):
            step = math.prod(sizes[dim] for dim in order[: order.index(at)])
            elements += step * self._value(where, name, iteration)
        return elements * nbytes(array[0]) // math.prod(sizes)

    def _value(self, where: str, name: str, iteration: Mapping[str, int]) -> int:
        """The number that `name` is in these iterations.

        Raises:
          LookupError: it does not follow from iterations alone.
        """
        one = self.every[where][name]
        if one.kind == "constant" and (number := _WHOLE.fullmatch(one.arguments)):
            return int(number[1])
        if one.kind == "parameter" and where in self.callers:
            above, call = self.callers[where]
            return self._value(above, call.operands[int(one.arguments)], iteration)
        if one.kind in _SAME:
            return self._value(where, one.operands[0], iteration)
        if one.kind == "get-tuple-element":
            return self._element(where, one.operands[0], one.element, iteration)
        if one.kind in ("call", "fusion"):
            [called] = one.called.values()
            return self._value(called, self._root(called), iteration)
        values = (self._value(where, each, iteration) for each in one.operands)
        if one.kind in _COMPUTED:
            return _COMPUTED[one.kind](*values)
        if one.kind == "compare" and (compared := _COMPARED.search(one.rest)):
            return int(getattr(operator, compared[1].lower())(*values))
        raise LookupError(f"the number of {one.kind} {name}")

    def _element(self, where: str, name: str, at: int, iteration: Mapping[str, int]) -> int:
        """The number that element `at` of the tuple `name` is; errors of `_value`."""
        one = self.every[where][name]
        if one.kind == "tuple":
            return self._value(where, one.operands[at], iteration)
        if one.kind in _SAME:
            return self._element(where, one.operands[0], at, iteration)
        if one.kind in ("call", "fusion"):
            [called] = one.called.values()
            return self._element(called, self._root(called), at, iteration)
        if one.kind != "parameter" or where not in self.loops:
            raise LookupError(f"an element of {one.kind} {name}")
        number = iteration[where]
        if number:
            before = {**iteration, where: number - 1}
            return self._element(where, self._root(where), at, before)
        above, loop = self.loops[where]
        return self._element(above, loop.operands[0], at, iteration)

    def _root(self, where: str) -> str:
        return next(name for name, one in self.every[where].items() if one.is_root)
