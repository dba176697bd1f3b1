"""A process that checks programs: jobs as lines of JSON come in, rows go out.

A job is {"spec", "options": [[index, options, ask], ...]}. Before each of the options a line
{"at": index} is written, {"at": PLAIN} before plain jit compiles, and {"own": index} before results
are compared, so that who started this knows what was at work where it ends or hangs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import json
import os
import sys

PLAIN = -1
"""Stands for an index while plain jit is at work."""

CLEARED = 10
"""After so many programs what JAX has traced is forgotten. Small operations, which all share,
are compiled anew then."""


def main() -> None:
    rows = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no row
    faulthandler.enable()
    import jax

    from . import compiled
    from .check import Plain, check, invalid
    from .options import Options

    compiled.keep_in_memory()
    gc.freeze()  # tracing makes so many objects that looking for cycles among them all is a tenth
    gc.set_threshold(100_000, 20, 100)
    write = lambda **line: print(json.dumps(line), file=rows)
    served = 0
    for line in sys.stdin:
        job = json.loads(line)
        write(at=PLAIN)
        plain = failed = None
        try:
            plain = Plain.of(job["spec"])
        except Exception as error:
            failed = invalid(error)
        for index, options, ask in job["options"]:

            @contextlib.contextmanager
            def own(index=index):
                write(own=index)
                yield
                write(at=index)

            write(at=index)
            row = failed or check(plain, Options(**options), ask, own)
            write(row={"option": index, **row, "jax": jax.__version__})
        plain = failed = None
        compiled.forget()
        served += 1
        if served % CLEARED == 0:
            jax.clear_caches()
            gc.collect()
        write(done=True)


def as_json(spec: dict, options: list) -> str:
    """A job as the line that `main` reads."""
    found = [(i, dataclasses.asdict(one), ask) for i, one, ask in options]
    return json.dumps({"spec": spec, "options": found})


if __name__ == "__main__":
    main()
