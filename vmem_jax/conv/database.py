"""database: the micro-configurations of convolutions, kept on disk for all layers and programs.

An entry has the algorithms that run a convolution of a given batch in one call. The micro-batches of
64 of two layers share an entry if the layers differ only in their batch. Algorithms that were listed
but
not timed, as on a machine without the device, have no seconds: null in the file, nan in a `Micro`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from vmem_jax.core.convolution import XLA, Convolution, Epilogue, Micro, Pass
from vmem_jax.profile.kept import Identity, Kept, positive


@dataclasses.dataclass(frozen=True)
class Entry:
    """The algorithms of one convolution.

    Attributes:
      micros: micro-configurations of its whole batch: the timed ones, fastest first, then the others.
      complete: whether every algorithm that the library has on the device is there, and timed.
    """

    micros: tuple[Micro, ...]
    complete: bool = False

    @property
    def timed(self) -> tuple[Micro, ...]:
        """Those that may be used."""
        return tuple(m for m in self.micros if not math.isnan(m.seconds))


Entries = Mapping[Convolution, Entry]


def identity_of(device: str, cudnn: str) -> Identity:
    """The key of cuDNN timings: the kind of device and the version of cuDNN."""
    return Identity(device, {"cudnn": cudnn})


class Database(Kept[Entries]):
    """The file of one device and version of cuDNN. Any number of processes may use it at once."""

    kind = "database of convolutions"
    schema = 4  # of 3 no result was held against anything
    folder = "convolutions"

    def nothing(self) -> Entries:
        return {}

    def merged(self, old: Entries, new: Entries) -> Entries:
        both = {c: _joined(old[c], new[c]) for c in old.keys() & new.keys()}
        return {**old, **new, **both}

    def to_json(self, value: Entries) -> dict[str, Any]:
        entries = [
            {
                "convolution": _convolution_to(convolution),
                "complete": entry.complete,
                "micros": [_micro_to(m) for m in _sorted(entry.micros)],
            }
            for convolution, entry in sorted(value.items(), key=lambda item: repr(item[0]))
        ]
        return {"convolutions": entries}

    def from_json(self, content: dict[str, Any]) -> Entries:
        found = {}
        for fields in content["convolutions"]:
            convolution = _convolution_from(fields["convolution"])
            micros = tuple(_micro_from(convolution.batch, m) for m in fields["micros"])
            if not isinstance(fields["complete"], bool):
                raise TypeError(f"complete is {fields['complete']!r}")
            found[convolution] = Entry(micros, fields["complete"])
        return found


def _joined(old: Entry, new: Entry) -> Entry:
    """Where both have an algorithm the new time holds, but no time never replaces a time."""
    found = {m.algorithm: m for m in (*old.micros, *new.micros, *old.timed, *new.timed)}
    return Entry(_sorted(found.values()), old.complete or new.complete)


def _sorted(micros: Any) -> tuple[Micro, ...]:
    rank = lambda m: (math.isnan(m.seconds), 0 if math.isnan(m.seconds) else m.seconds)
    return tuple(sorted(micros, key=lambda m: (*rank(m), m.workspace, m.algorithm)))


def _micro_to(micro: Micro) -> dict[str, Any]:
    return {
        "engine": micro.engine,
        "knobs": {str(knob): value for knob, value in micro.knobs},
        "workspace": micro.workspace,
        "seconds": None if math.isnan(micro.seconds) else micro.seconds,
        "channels": micro.channels,
    }


def _micro_from(batch: int, fields: Any) -> Micro:
    knobs = tuple(sorted((int(k), _whole(v)) for k, v in fields["knobs"].items()))
    seconds = math.nan if fields["seconds"] is None else positive(fields["seconds"])
    engine, workspace = _whole(fields["engine"], XLA), _whole(fields["workspace"], 0)
    return Micro(batch, engine, knobs, workspace, seconds, _whole(fields["channels"], 0))


def _convolution_to(convolution: Convolution) -> dict[str, Any]:
    """Its fields; without a prologue as they were written before there was one."""
    fields = dataclasses.asdict(convolution)
    if not convolution.prologue:
        del fields["prologue"]
    return fields


def _convolution_from(fields: Any) -> Convolution:
    found = Convolution(
        which=Pass(fields["which"]),
        dtype=str(fields["dtype"]),
        strict=bool(fields["strict"]),
        batch=_whole(fields["batch"], 1),
        features_in=_whole(fields["features_in"], 1),
        features_out=_whole(fields["features_out"], 1),
        size=tuple(_whole(n, 1) for n in fields["size"]),
        kernel=tuple(_whole(n, 1) for n in fields["kernel"]),
        strides=tuple(_whole(n, 1) for n in fields["strides"]),
        padding=tuple((_whole(low), _whole(high)) for low, high in fields["padding"]),
        dilation=tuple(_whole(n, 1) for n in fields["dilation"]),
        groups=_whole(fields["groups"], 1),
        channels_last=bool(fields["channels_last"]),
        epilogue=Epilogue(fields["epilogue"]),
        prologue=bool(fields.get("prologue", False)),
    )
    dimensions = {len(n) for n in (found.size, found.kernel, found.strides, found.padding)}
    if fields.keys() != _convolution_to(found).keys() or dimensions != {len(found.dilation)}:
        raise ValueError(f"{fields!r} is no convolution")
    return found


def _whole(number: Any, smallest: int | None = None) -> int:
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{number!r} is no integer")
    if smallest is not None and number < smallest:
        raise ValueError(f"{number} is less than {smallest}")
    return number
