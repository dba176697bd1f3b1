"""A process that checks programs: jobs as lines of JSON come in, rows go out.

A job is {"spec", "options": [[index, options, ask], ...]}. Before each of the options a line {"at":
index} is written, so that who started this knows what was at work where it ends or hangs.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import sys


def main() -> None:
    rows = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no row
    faulthandler.enable()
    import jax

    from .check import check
    from .options import Options

    for line in sys.stdin:
        job = json.loads(line)
        options = [(i, Options(**one), ask) for i, one, ask in job["options"]]
        at = iter([i for i, _, _ in options])
        print(json.dumps({"at": next(at)}), file=rows)
        for row in check(job["spec"], options):
            row["jax"] = jax.__version__
            print(json.dumps({"row": row}), file=rows)
            if (i := next(at, None)) is not None:
                print(json.dumps({"at": i}), file=rows)
        jax.clear_caches()
        print(json.dumps({"done": True}), file=rows)


def as_json(spec: dict, options: list) -> str:
    """A job as the line that `main` reads."""
    found = [(i, dataclasses.asdict(one), ask) for i, one, ask in options]
    return json.dumps({"spec": spec, "options": found})


if __name__ == "__main__":
    main()
