"""compiled: what XLA's own convolutions take in a step that it compiled for a GPU.

XLA calls cuDNN through custom calls whose second result is the workspace, as large as the algorithm
needs that its autotuner found fastest. Which convolution of a program such a call does follows from
sizes alone: XLA may do a gradient to x as a forward convolution, fuse a bias into it, or add
channels. What it adds channels to is a copy, which is live as long as the workspace is, and counts
with it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator

from vmem_jax.conv.slices import roles
from vmem_jax.core.convolution import Convolution

_DEFINED = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = \(?\w+\[([\d,]*)\]", re.MULTILINE)
_CALLED = re.compile(
    r"= \(\w+\[(?P<result>[\d,]*)\][^()]*, u8\[(?P<workspace>\d*)\][^()]*\) "
    r"custom-call\((?P<operands>[^)]*)\).*custom_call_target=\"__cudnn\$conv(?P<kind>\w+)\""
    r"(?:.*\"algo_id\":\"?(?P<engine>-?\d+))?"
)

_PADDED = (1, 4, 8)
"""XLA makes the channels a multiple of one of these, where that makes a convolution faster."""

_ALIGNMENT = 256
"""Bytes that XLA's buffers begin at multiples of, as the copies in a workspace of ours do."""

_Sizes = tuple[int, tuple[int, ...]]
"""Elements of the result, and of both operands, the smaller first."""


@dataclasses.dataclass(frozen=True)
class _Form:
    """One form in which XLA may do a convolution: sizes, and channels of x and bytes of copies."""

    sizes: _Sizes
    channels: int
    copies: int


@dataclasses.dataclass(frozen=True, order=True)
class Own:
    """What XLA's own convolution is in a compiled step.

    Attributes:
      workspace: bytes, those of copies with more channels included.
      engine: cuDNN's index of what does it; −1 where that is not known.
      fused: whether its epilogue is done by it, too. The engines for that are others.
      channels: of x, where they are more than those of the convolution; else 0.
    """

    workspace: int
    engine: int = -1
    fused: bool = False
    channels: int = 0


def own_convolutions(text: str, convolutions: Iterable[Convolution]) -> dict[Convolution, Own]:
    """Those of `convolutions` that XLA does in a compiled step; of several the one that takes most.

    Args:
      text: the step as `as_text()` gives it after compilation.
    """
    found: dict[_Sizes, Own] = {}
    elements = {m[1]: _elements(m[2]) for m in _DEFINED.finditer(text)}
    for line in text.splitlines():
        call = _CALLED.search(line) if "__cudnn$conv" in line else None
        if call is None:
            continue
        operands = [name.strip().rpartition("%")[2] for name in call["operands"].split(",")]
        if len(operands) < 2 or any(name not in elements for name in operands[:2]):
            continue
        sizes = _elements(call["result"]), tuple(sorted(elements[name] for name in operands[:2]))
        fused = "Bias" in call["kind"]
        own = Own(int(call["workspace"] or 1), int(call["engine"] or -1), fused)
        found[sizes] = max(found.get(sizes, own), own)
    owns = {}
    for convolution in convolutions:
        form = next((form for form in _forms(convolution) if form.sizes in found), None)
        if form is not None:
            own = found[form.sizes]
            workspace = own.workspace + form.copies
            owns[convolution] = dataclasses.replace(
                own, workspace=workspace, channels=form.channels
            )
    return owns


def _forms(convolution: Convolution) -> Iterator[_Form]:
    """As it stands first, then with more channels, and with padding that is part of x.

    It is where it is uneven: all of it, or what one side has more of.
    """
    c = convolution
    spaces = [c.size]
    if any(low != high for low, high in c.padding):
        for more in (sum, lambda sides: max(sides) - min(sides)):
            spaces.append(tuple(n + more(p) for n, p in zip(c.size, c.padding, strict=True)))
    units = _PADDED if c.groups == 1 else _PADDED[:1]
    up = lambda channels, unit: -(-channels // unit) * unit
    itemsize = c.nbytes // sum(map(math.prod, (c.x_shape, c.w_shape, c.y_shape)))
    aligned = lambda n: -(-n * itemsize // _ALIGNMENT) * _ALIGNMENT
    for space, unit_in, unit_out in itertools.product(spaces, units, units):
        features_in, features_out = up(c.features_in, unit_in), up(c.features_out, unit_out)
        elements = {
            "x": c.batch * features_in * math.prod(space),
            "w": features_out * (features_in // c.groups) * math.prod(c.kernel),
            "y": c.batch * features_out * math.prod(c.out),
        }
        *operands, result = (elements[role] for role in roles(c.which))
        more_in, more_out = features_in > c.features_in, features_out > c.features_out
        copied = {"x": more_in, "w": more_in or more_out, "y": more_out}
        yield _Form(
            sizes=(result, tuple(sorted(operands))),
            channels=features_in if more_in else 0,
            copies=sum(aligned(elements[role]) for role in elements if copied[role]),
        )


def _elements(dimensions: str) -> int:
    return math.prod(int(n) for n in dimensions.split(",") if n)
