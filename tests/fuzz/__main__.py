"""python -m tests.fuzz: see `--help`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time

from . import ledger
from .driver import Counts, Settings, options_of, reproduce, run, run_one, seeds_from
from .options import Options
from .programs import draw_spec
from .shrink import shrink


def main() -> int:
    """Runs what the arguments say. Returns 1 where something was found that is not known."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--programs", type=int, help="as many seeds, and then the end")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--platform", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument(
        "--transport", choices=("any", "auto", "ffi", "memory_kinds"), default="any"
    )
    parser.add_argument("--each", type=int, default=4, help="sets of options for each step")
    parser.add_argument("--asked", type=float, default=0.3, help="share of lowest peaks asked for")
    parser.add_argument("--limit", type=float, default=60, help="processor seconds a program")
    parser.add_argument("--codegen", choices=("fast", "full"), default="fast")
    parser.add_argument("--out", help="a file of rows, one JSON object a line; appended to")
    parser.add_argument("--ledger", help="a file that gets one row for this run, as it goes")
    parser.add_argument("--commit", default="", help="that is run, for the ledger")
    parser.add_argument("--totals", help="a ledger: prints its totals, and runs nothing")
    parser.add_argument("--only", help="SEED or SEED:OPTION: that one, with all that it says")
    parser.add_argument("--spec", help="JSON: that program, with --options")
    parser.add_argument("--options", help="JSON, as rows have them")
    parser.add_argument("--shrink", action="store_true", help="makes that program smaller")
    args = parser.parse_args()
    if args.totals:
        with open(args.totals) as file:
            print(ledger.totals(map(json.loads, file)))
        return 0
    settings = Settings(
        args.platform,
        args.processes,
        args.transport,
        args.each,
        args.asked,
        args.limit,
        args.codegen,
    )
    os.environ["VMEM_JAX_CACHE"] = tempfile.mkdtemp(prefix="vmem_jax_fuzz_")
    if args.only or args.spec:
        return _single(settings, args)
    return _many(settings, args)


def _single(settings: Settings, args: argparse.Namespace) -> int:
    if args.spec:
        todo = [(json.loads(args.spec), Options(**json.loads(args.options)))]
    else:
        seed, _, index = args.only.partition(":")
        found = options_of(int(seed), settings)
        todo = [(draw_spec(int(seed)), one) for i, one, _ in found if index in ("", str(i))]
    status = 0
    for spec, options in todo:
        row = run_one(settings, spec, options)
        if args.shrink and row["signature"]:
            row, tries = shrink(settings, row, print)
            print(f"{tries} programs tried")
        print(json.dumps({n: v for n, v in row.items() if n != "trace"}, indent=1))
        print(row.get("trace", ""))
        print(reproduce(row))
        status |= bool(row["signature"])
    return status


def _many(settings: Settings, args: argparse.Namespace) -> int:
    counts, out, began = Counts(), open(args.out, "a") if args.out else None, time.monotonic()
    commit = args.commit or ledger.checked_out()
    book = ledger.Ledger(args.ledger) if args.ledger else None

    def report(row: dict) -> None:
        counts.add(row)
        if out:
            print(json.dumps(row), file=out, flush=True)
        if book:
            book.write(ledger.row_of(counts, settings, time.monotonic() - began, commit))
        if row["signature"]:
            print(
                f"{row['seed']}:{row['option']} {row['signature']}: {row['detail'][:200]}",
                flush=True,
            )

    seeds = seeds_from(args.seed)
    if args.programs is not None:
        seeds = range(args.seed, args.seed + args.programs)
    try:
        run(settings, seeds, args.seconds, report)
    except KeyboardInterrupt:
        pass
    print(json.dumps({"seconds": round(time.monotonic() - began), **counts.summary()}, indent=1))
    for signature, row in counts.unknown.items():
        print(f"{signature}\n  {reproduce(row)}")
    return 1 if counts.unknown else 0


if __name__ == "__main__":
    sys.exit(main())
