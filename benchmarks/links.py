"""What several devices of one host move at once between their memories and the host's.

    python benchmarks/links.py --out=rows.jsonl

A row is one direction ("out" to pinned host memory, "into" the device, or "both") and a number of
devices that copy at the same time: bytes a second of each device, and their share of what the first
device alone reaches. Where the share stays near 1, each device has a link of its own, and a plan for
one device holds for all; where it falls, transfers of a sharded step take longer than predicted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import records
from absl import app, flags

from vmem_jax.profile.timing import seconds_a_call

FLAGS = flags.FLAGS


def main(_: Any) -> None:
    devices = jax.local_devices()
    counts = sorted({1, len(devices) // 2 or 1, len(devices)})
    alone: dict[str, float] = {}
    for count in counts:
        for direction, rate in rates(devices[:count], FLAGS.mib * 2**20).items():
            alone.setdefault(direction, rate)
            row = {"kind": "link", "direction": direction, "devices": count, "mib": FLAGS.mib}
            row |= {"gb_per_s": rate / 1e9, "of_alone": rate / alone[direction]}
            row |= {"device": devices[0].device_kind, "jax": jax.__version__}
            row["commit"] = FLAGS.commit or records.commit()
            print(json.dumps(row), flush=True)
            with open(FLAGS.out, "a") as out:
                out.write(json.dumps(row) + "\n")


def rates(devices: Sequence[jax.Device], nbytes: int) -> dict[str, float]:
    """Direction -> bytes a second of each of `devices`, which all copy `nbytes` at once."""
    memory = lambda device, kind: jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
    here = [jax.device_put(np.ones(nbytes // 4, np.float32), each) for each in devices]
    there = [
        jax.device_put(x, memory(each, "pinned_host"))
        for x, each in zip(here, devices, strict=True)
    ]
    jax.block_until_ready((here, there))
    out = lambda: [
        jax.device_put(x, memory(each, "pinned_host"))
        for x, each in zip(here, devices, strict=True)
    ]
    into = lambda: [
        jax.device_put(x, memory(each, "device")) for x, each in zip(there, devices, strict=True)
    ]
    ways: dict[str, tuple[int, Callable[[], Any]]] = {
        "out": (1, out),
        "into": (1, into),
        "both": (2, lambda: (out(), into())),
    }
    return {
        name: copies * nbytes / seconds_a_call(call, most=FLAGS.runs)
        for name, (copies, call) in ways.items()
    }


if __name__ == "__main__":
    flags.DEFINE_integer("mib", 1024, "of each copy")
    flags.DEFINE_integer("runs", 10, "of which the median counts")
    flags.DEFINE_string("commit", "", "where the checkout has no history")
    flags.DEFINE_string("out", "links.jsonl", "where rows are added")
    app.run(main)
