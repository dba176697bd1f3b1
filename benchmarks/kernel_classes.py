"""The instructions of a compiled step that launch kernels: of which class each is, what it moves, and
how often it runs.

Bytes are those of operands and results, each once: of an operand that is sliced the slices, of a
result that an operand is updated to the update. What a cache saves, and what a kernel reads again or
puts in a workspace, is not seen. Of branches all count.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

from vmem_jax.compiler.hlo import ENTRY, Instruction, computations, nbytes

FORWARDS = "convolutions forwards"
TO_INPUTS = "gradients to inputs"
TO_WEIGHTS = "gradients to weights"
CARRYING = "convolutions that carry"
PALLAS = "Pallas kernels"
PRODUCTS = "matrix products"
ATTENTION = "attention"
REDUCING = "passes that reduce"
ELEMENTWISE = "other passes"
COPIES = "copies and transposes"
UPDATES = "updates of the state"
HOST = "copies to or from host"
OTHERS = "other calls"
CLASSES = (
    *(FORWARDS, TO_INPUTS, TO_WEIGHTS, CARRYING, PALLAS, PRODUCTS, ATTENTION, REDUCING),
    *(ELEMENTWISE, COPIES, UPDATES, HOST, OTHERS),
)
"""In the order of tables."""

CALLS = {  # words in the target of a call
    "cudnn$convForward": FORWARDS,
    "cudnn$convBias": FORWARDS,
    "cudnn$convBackwardInput": TO_INPUTS,
    "cudnn$convBackwardFilter": TO_WEIGHTS,
    "gpu.triton": PALLAS,
    "cublas": PRODUCTS,
    "fmha": ATTENTION,
    "vmem_jax_offload": HOST,
    "vmem_jax_fetch": HOST,
}
_OURS = "vmem_jax_micro_conv"
_PASSES = {"forward": FORWARDS, "backward data": TO_INPUTS, "backward filter": TO_WEIGHTS}
_FUSIONS = ("fusion", "fusion-start")
_SLICES = ("slice", "dynamic-slice", "gather")
_MOVES = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "reshape", "broadcast"),
    *("iota", "copy", "copy-start", "convert", "transpose", "reverse", "pad", "concatenate"),
    *(*_SLICES, "dynamic-update-slice"),
}
_SILENT = {  # they launch nothing themselves
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier", "while"),
    *("call", "conditional", "async-start", "async-update", "async-done", "fusion-done"),
    *("copy-done", "after-all", "partition-id", "replica-id"),
}

_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_WHICH = re.compile(r'\bwhich = "([^"]*)"')
_ALIASED = re.compile(r"\{(\d+)\}: \(\d+, \{")
_WORKSPACE = re.compile(r"[us]8\[\d+\]")

Body = Mapping[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Launched:
    """An instruction that launches kernels.

    Attributes:
      name: its class.
      nbytes: what one run reads and writes.
      times: runs in a step.
      which: the class of its pass, of our convolutions; "" of all else.
    """

    name: str
    nbytes: int
    times: int
    instruction: Instruction

    @property
    def which(self) -> str:
        found = _WHICH.search(self.instruction.rest)
        return _PASSES[found[1]] if found and _OURS in self.instruction.rest else ""


def launched(text: str) -> dict[str, Launched]:
    """By name, in the order of the text `as_text()` of a compiled step."""
    bodies = computations(text)
    updated = _updated(bodies[ENTRY], text)
    return {
        name: Launched(
            _class(one, name in updated, bodies), _moved(one, bodies[body], bodies), times, one
        )
        for body, times in _running(ENTRY, 1, bodies)
        for name, one in bodies[body].items()
        if one.kind not in _SILENT
    }


def _running(body: str, times: int, bodies: Mapping[str, Body]) -> Iterator[tuple[str, int]]:
    """The computations that run, but for those inside kernels, and how often in a step."""
    yield body, times
    for one in bodies[body].values():
        if one.kind in ("while", "call", "conditional", "async-start"):
            called = [*one.called.values()]
            for branches in _BRANCHES.findall(one.rest):
                called += re.findall(r"%([\w.-]+)", branches)
            for inner in called:
                yield from _running(inner, times * (1 if one.trips is None else one.trips), bodies)


def _updated(entry: Body, text: str) -> set[str]:
    """Instructions that make results of the step which take the place of its arguments."""
    [root] = [one for one in entry.values() if one.is_root]
    aliases = text.partition("input_output_alias=")[2].partition("\n")[0].partition("entry_")[0]
    names = {root.operands[int(at)] for at in _ALIASED.findall(aliases)}
    found = set()
    for name in names:
        while entry[name].kind in ("get-tuple-element", "bitcast", "copy"):
            name = entry[name].operands[0]
        found.add(name)
    return found


def _class(one: Instruction, updates: bool, bodies: Mapping[str, Body]) -> str:
    if one.kind == "custom-call":
        return _class_of_call(one)
    if one.kind not in _FUSIONS:
        return COPIES if one.kind in _MOVES else OTHERS
    kinds = _kinds(one, bodies)
    if kinds & {"dot", "convolution"}:
        return PRODUCTS
    if "reduce" in kinds:
        return REDUCING
    if updates:
        return UPDATES
    return COPIES if kinds <= _MOVES else ELEMENTWISE


def _class_of_call(one: Instruction) -> str:
    """XLA makes some gradients to inputs by forward convolutions; names of operations tell."""
    named = _TARGET.search(one.rest)
    target = named[1] if named else ""
    if target == _OURS:
        carries = 'epilogue = "sums"' in one.rest or len(one.operands) >= 4  # scale and bias
        return CARRYING if carries else _PASSES[_WHICH.findall(one.rest)[0]]
    found = next((name for words, name in CALLS.items() if words in target), OTHERS)
    operation = _OP_NAME.search(one.rest)
    if found == FORWARDS and operation and "transpose(" in operation[1]:
        return TO_INPUTS
    return found


def _kinds(one: Instruction, bodies: Mapping[str, Body]) -> set[str]:
    """Those of the instructions in a fusion."""
    inner = [i for called in one.called.values() for i in bodies[called].values()]
    return {i.kind for i in inner}.union(*(_kinds(i, bodies) for i in inner if i.kind == "fusion"))


def _moved(one: Instruction, body: Body, bodies: Mapping[str, Body]) -> int:
    if one.kind in _FUSIONS:
        [called] = one.called.values()
        return _moved_by_fusion(one, bodies[called])
    read = sum(nbytes(body[name].shape) for name in set(one.operands) if name in body)
    shapes = one.shapes
    if one.kind == "custom-call" and len(shapes) > 1:
        shapes = [shape for shape in shapes if not _WORKSPACE.match(shape)]
    return read + sum(map(nbytes, shapes))


def _moved_by_fusion(one: Instruction, inside: Body) -> int:
    [root] = [each for each in inside.values() if each.is_root]
    results = [inside[name] for name in root.operands] if root.kind == "tuple" else [root]
    written = 0
    for result in results:
        while result.kind == "bitcast":
            result = inside[result.operands[0]]
        updates = result.kind == "dynamic-update-slice"
        written += nbytes(inside[result.operands[1]].shape if updates else result.shape)
    inputs = {n: int(i.arguments) for n, i in inside.items() if i.kind == "parameter"}
    most: dict[str, int] = {}  # of each operand
    for name, index in inputs.items():
        operand = one.operands[index]
        most[operand] = max(most.get(operand, 0), _read(name, inside))
    return written + sum(most.values())


def _read(name: str, inside: Body) -> int:
    """Bytes of `name` that the instructions of a fusion read; a slice with strides skips lines."""
    whole, total = nbytes(inside[name].shape), 0
    for user_name, user in inside.items():
        if name not in user.operands:
            continue
        if user.kind in _SLICES and name == user.operands[0]:
            total += nbytes(user.shape)
        elif user.kind == "bitcast":
            total += _read(user_name, inside)
        elif user.kind != "dynamic-update-slice" or name != user.operands[0]:
            return whole
    return min(whole, total)
