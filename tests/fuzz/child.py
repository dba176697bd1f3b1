"""One worker process and what is known of it; it is started again after it ended or hung."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from .check import ENDED, HUNG, INVALID, Row
from .options import Options
from .programs import Spec
from .worker import PLAIN, as_json

WALL = 4
"""As many times the limit of processor seconds, on the clock: where nothing is computed at all, on a
machine that other processes share."""

PROGRAMS = 100
"""After so many a new process begins: what XLA keeps of each adds up."""


class Child:
    """A worker process.

    Args:
      environment: beside this process's own.
      limit: seconds of processor time, of all threads, that one set of options may take; `WALL` times
        as many on the clock.
      preface: Python that the process runs first; tests break the library with it.
      cores: on which it runs; None for all.
      alone: whether it should be as quick as the machine. Then `limit` is of the clock, too: on a
        machine of 32 cores XLA's compiler takes ten processor seconds in one.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        limit: float,
        preface: str = "",
        cores: Sequence[int] | None = None,
        alone: bool = False,
    ) -> None:
        self._environment, self._limit, self._preface = environment, limit, preface
        self._cores, self._alone = cores, alone
        self._process: subprocess.Popen | None = None
        self._served = 0

    def rows(
        self, spec: Spec, options: Sequence[tuple[int, Options, bool]], until: float = float("inf")
    ) -> Iterator[Row]:
        """A row for each of the options, whatever becomes of the process.

        Args:
          until: `time.monotonic()`; what is not done by then is given up without a row.
        """
        left = list(options)
        while left:
            if time.monotonic() > until:
                return
            self._start()
            assert self._process is not None and self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended, as `_lines` will find
                self._process.stdin.write(as_json(spec, left).encode() + b"\n")
                self._process.stdin.flush()
            at, own = PLAIN, False
            for kind, value in self._lines(until):
                if kind in ("at", "own"):
                    at, own = value, kind == "own"
                elif kind == "row":
                    yield value
                    left = [one for one in left if one[0] != value["option"]]
                elif kind == "done":
                    left = []
                elif kind == "late":
                    self.close()
                    return
                else:
                    # that plain jit ends or hangs is no finding, nor that comparing does
                    value |= {"outcome": INVALID, "signature": ""} if at == PLAIN or own else {}
                    stopped = [i for i, _, _ in left if at in (PLAIN, i)]
                    yield from ({"option": i, **value} for i in stopped)
                    left = [one for one in left if one[0] not in stopped]
                    self.close()
        self._served += 1
        if self._served >= PROGRAMS:
            self.close()

    def close(self) -> None:
        """Ends the process, if there is one."""
        if self._process is None:
            return
        self._process.kill()
        self._process.communicate()
        self._process, self._served = None, 0
        self._stderr.close()
        shutil.rmtree(self._compiled, ignore_errors=True)

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        root = Path(__file__).parents[__package__.count(".") + 1]
        path = os.pathsep.join([str(root), *filter(None, sys.path)])
        self._stderr = tempfile.TemporaryFile()
        # enables JAX's cache, which the worker keeps in memory (`compiled`): nothing is written there
        self._compiled = tempfile.mkdtemp(prefix="vmem_jax_fuzz_compiled_")
        cache = {
            "JAX_COMPILATION_CACHE_DIR": self._compiled,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        module = f"{__package__}.worker"
        code = f"import runpy\n{self._preface}\nrunpy.run_module({module!r}, run_name='__main__')"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, **cache, "PYTHONPATH": path, **self._environment},
            cwd=root,
        )
        if self._cores is not None:
            os.sched_setaffinity(self._process.pid, self._cores)
        self._buffer = b""

    def _lines(self, until: float) -> Iterator[tuple[str, object]]:
        """Until the job is done or has failed: ("at" | "own" | "row" | "done" | "found" | "late",
        value)."""
        assert self._process is not None and self._process.stdout is not None
        out = self._process.stdout.fileno()
        began, used = time.monotonic(), self._seconds()
        while True:
            while b"\n" in self._buffer:
                line, self._buffer = self._buffer.split(b"\n", 1)
                [(kind, value)] = json.loads(line).items()
                began, used = time.monotonic(), self._seconds()
                yield kind, value
                if kind == "done":
                    return
            if select.select([out], [], [], 0.5)[0]:
                if more := os.read(out, 2**16):
                    self._buffer += more
                    continue
                yield "found", self._ended()
                return
            on_clock = time.monotonic() - began
            spent = self._seconds() - used
            spent = min(spent, on_clock) if self._alone else spent
            if spent > self._limit or on_clock > WALL * self._limit:
                yield "found", self._hung(on_clock)
                return
            if time.monotonic() > until:
                yield "late", None
                return

    def _seconds(self) -> float:
        """Processor seconds of the process, of all its threads."""
        assert self._process is not None
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _said(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace")

    def _ended(self) -> Row:
        assert self._process is not None
        code = self._process.wait()
        name = signal.Signals(-code).name if code < 0 else f"exit {code}"
        said = self._said()
        return {
            "outcome": ENDED,
            "signature": f"ended:{name}:{_reason(said)}",
            "detail": f"{name}: {_reason(said) or said[-300:]}",
            "trace": said[-6000:],
        }

    def _hung(self, seconds: float) -> Row:
        assert self._process is not None
        self._process.send_signal(signal.SIGABRT)  # faulthandler writes where every thread is
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
        said = self._said()
        ours = re.findall(r'vmem_jax/([\w/]+\.py)", line \d+ in (\w+)', said)
        where = ":".join(ours[0]) if ours else "outside"
        return {
            "outcome": HUNG,
            "signature": f"hung:{where}",
            "detail": f"no result after {seconds:.0f} s",
            "trace": said[-6000:],
        }


def _reason(said: str) -> str:
    """The line of a failed check, without what differs from run to run."""
    lines = [
        line for line in said.splitlines() if "Check failed" in line or "terminate called" in line
    ]
    if not lines:
        return ""
    return re.sub(r"0x[0-9a-f]+|\d+", "N", lines[-1].split("] ")[-1])[:120]
