"""grouping: the layers of a step in few groups, for a picture of hundreds of layers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

MOST = 11
"""Groups: as many as there are colours that are told apart."""


def groups_of(nbytes: Mapping[str, int], most: int = MOST) -> dict[str, str]:
    """The group of each layer.

    The largest group is divided by the next part of its layers' names, as long as there are at most
    `most` groups. Where that gives too many, neighbours stand together: "block1 … block5".

    Args:
      nbytes: bytes of each layer, "ResNet/stage1/conv2", in the order of the step.
    """
    groups = {"": [*nbytes]}
    closed: set[str] = set()
    while True:
        size = {name: sum(nbytes[n] for n in layers) for name, layers in groups.items()}
        ready = [name for name in groups if name not in closed]
        if not ready:
            break
        name = max(ready, key=lambda name: size[name])
        parts = _divided(groups[name], name)
        closed.add(name)
        if len(parts) < 2 and set(parts) == {name}:
            continue
        room = most - len(groups) + 1
        if len(parts) > room:
            if room < 2:
                continue
            parts = _together(parts, room)
            closed |= {*parts}
        groups = {
            new: layers
            for old, own in groups.items()
            for new, layers in (parts if old == name else {old: own}).items()
        }
    return {layer: name or "(no layer)" for name, layers in groups.items() for layer in layers}


def _divided(layers: Sequence[str], name: str) -> dict[str, list[str]]:
    """`layers`, which begin with `name`, by the next part of their names."""
    depth = len(name.split("/")) if name else 0
    found: dict[str, list[str]] = {}
    for layer in layers:
        found.setdefault("/".join(layer.split("/")[: depth + 1]), []).append(layer)
    return found


def _together(parts: Mapping[str, list[str]], room: int) -> dict[str, list[str]]:
    """`parts` in at most `room` stretches of neighbours."""
    names = [*parts]
    size = -(-len(names) // room)
    found = {}
    for i in range(0, len(names), size):
        some = names[i : i + size]
        last = re.sub(r".*/", "", some[-1])
        title = some[0] if len(some) == 1 else f"{some[0]} … {last}"
        found[title] = [layer for name in some for layer in parts[name]]
    return found
