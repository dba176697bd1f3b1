"""xspace: spans in lanes as an XSpace, the file that xprof and TensorBoard's profiler read.

xprof's trace viewer opens `LOGDIR/plugins/profile/RUN/HOST.xplane.pb`, a protocol buffer of the
schema `xla/tsl/profiler/protobuf/xplane.proto`; JSON it reads no longer. The few fields that lanes
need are encoded here, so that nobody needs protobuf for them.
"""

from __future__ import annotations

import datetime
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vmem_jax.report.trace import LANES, Recording, chrome_trace, save
from vmem_jax.report.whole import write_whole

PLANE = "/device:CUSTOM:"
"""What the name of a plane begins with whose lines xprof shows as they are, and derives none from."""

COUNTERS = "_counters_"
"""The name of the line whose events xprof draws as numbers over time."""

MARKS = "marks"
"""The line of the moments worth finding."""


def save_trace(path: str | Path, *recordings: Recording) -> Path:
    """Writes `recordings`, for Perfetto if `path` has a suffix, else for xprof.

    Args:
      path: a file, which becomes a Chrome trace; or a directory (one that exists, or a name without
        a suffix), to which a profile is added: `xprof --logdir PATH` shows it.

    Returns:
      The file.
    """
    path = Path(path)
    if path.suffix and not path.is_dir():
        save(chrome_trace(*recordings), path)
        return path
    # a new directory each time, as JAX has it: xprof keeps what it made of a file beside the file
    run = datetime.datetime.now().strftime("%Y_%m_%d_%H_%M_%S_%f")
    folder = path / "plugins" / "profile" / run
    folder.mkdir(parents=True)
    return write_whole(folder / "vmem_jax.xplane.pb", xspace(*recordings))


def xspace(*recordings: Recording) -> bytes:
    """An XSpace of `recordings`: a plane each, a line a lane; bytes over time are counters."""
    planes = (_plane(i, recording) for i, recording in enumerate(recordings, 1))
    return b"".join(_field(1, plane) for plane in planes)  # XSpace.planes


def _plane(i: int, recording: Recording) -> bytes:
    names, stats = _Names(), _Names()
    lines: dict[str, list[bytes]] = {lane: [] for lane in LANES}
    for span in recording.spans:
        event = _event(names.id(span.name), span.begin, span.seconds, _stats(span.args, stats))
        lines[span.lane].append(event)
    for instant in recording.instants:
        event = _event(names.id(instant.name), instant.at, 0.0, _stats(instant.args, stats))
        lines.setdefault(MARKS, []).append(event)
    for track in recording.tracks:
        for name in dict.fromkeys(name for _, values in track.values for name in values):
            # a counter has one number; where a series has none it is 0, or an old value would stay
            shown = track.name if name == track.name else f"{track.name}: {name}"
            for at, values in track.values:
                value = _stats({"value": values.get(name, 0)}, stats)
                lines.setdefault(COUNTERS, []).append(_event(names.id(shown), at, 0.0, value))
    parts = [_field(1, i), _field(2, PLANE + recording.name)]
    for number, (line, events) in enumerate(lines.items(), 1):
        head = [_field(1, number), _field(2, line), _field(10, number), _field(11, line)]
        parts.append(_field(3, b"".join([*head, *(_field(4, event) for event in events)])))
    for field, known in ((4, names), (5, stats)):  # event_metadata, stat_metadata
        for name, key in known.ids.items():
            about = _field(1, key) + _field(2, name)
            parts.append(_field(field, _field(1, key) + _field(2, about)))  # an entry of a map
    return b"".join(parts)


class _Names:
    """Names and their numbers, from 1."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def id(self, name: str) -> int:
        return self.ids.setdefault(name, len(self.ids) + 1)


def _event(name: int, begin: float, seconds: float, stats: bytes) -> bytes:
    """An XEvent; its times are picoseconds."""
    begin_ps, end_ps = round(begin * 1e12), round((begin + seconds) * 1e12)
    return _field(1, name) + _field(2, begin_ps) + _field(3, end_ps - begin_ps) + stats


def _stats(args: Mapping[str, Any], names: _Names) -> bytes:
    """The field `stats` of an XEvent, once for each of `args`."""
    found = []
    for name, value in args.items():
        if isinstance(value, int) and not isinstance(value, bool):
            number = _field(4, value)  # int64_value
        elif isinstance(value, float):
            number = _key(2, 1) + struct.pack("<d", value)  # double_value
        else:
            number = _field(5, value if isinstance(value, str) else json.dumps(value))  # str_value
        found.append(_field(4, _field(1, names.id(name)) + number))
    return b"".join(found)


# -- the encoding of protocol buffers


def _field(number: int, value: int | str | bytes) -> bytes:
    """A field of an integer, or of a text or message, whose length stands before it."""
    if isinstance(value, int):
        return _key(number, 0) + _varint(value)
    content = value.encode() if isinstance(value, str) else value
    return _key(number, 2) + _varint(len(content)) + content


def _key(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; a negative number as its 64 bits."""
    value &= 2**64 - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
