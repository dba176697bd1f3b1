"""Makes a failing program smaller while the same finding remains."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from .check import FINDINGS, Row
from .driver import Settings, single
from .options import Options
from .programs import Spec

_PLAIN = {"dtype": "float32", "update": "sgd", "loss": "mean", "skips": []}


def shrink(
    settings: Settings, row: Row, say: Callable[[str], None] = lambda text: None
) -> tuple[Row, int]:
    """The smallest program and options found with the signature of `row`, and how many were tried.

    One change at a time, as long as one of them leaves the finding: a layer less, a plainer update,
    loss or dtype, a smaller batch, fewer channels, an option less.
    """
    with single(settings) as run:
        row, tries, smaller = run(row["spec"], Options(**row["options"])), 1, True
        wanted = row["signature"]
        while smaller and row["outcome"] in FINDINGS:
            smaller = False
            for spec, options in _simpler(row["spec"], Options(**row["options"])):
                tries += 1
                tried = run(spec, options)
                if tried["signature"] == wanted and tried["outcome"] in FINDINGS:
                    say(f"{len(spec['layers'])} layers, {spec['shape']}: {wanted}")
                    row, smaller = tried, True
                    break
    return row, tries


def _simpler(spec: Spec, options: Options) -> Iterator[tuple[Spec, Options]]:
    layers = spec["layers"]
    for size in (len(layers) // 2, 1):
        for i in range(0, len(layers), max(size, 1)) if size else ():
            if len(layers) > size:
                yield {**spec, "layers": layers[:i] + layers[i + size :]}, options
    for name, plain in _PLAIN.items():
        if spec[name] != plain:
            yield {**spec, name: plain}, options
    for axis in range(3):
        if spec["shape"][axis] >= 4:
            shape = list(spec["shape"])
            shape[axis] //= 2
            yield {**spec, "shape": shape}, options
    for name in options.jit:
        if name != "policy":
            rest = {n: value for n, value in options.jit.items() if n != name}
            yield spec, dataclasses.replace(options, jit=rest)
    if options.mode != "call":
        yield spec, dataclasses.replace(options, mode="call")
    if options.form != "bytes":
        yield spec, dataclasses.replace(options, form="bytes")
