"""Gradients to tables of few rows, and sums over few rows: as JAX has them, and as a plan has them.

    python benchmarks/few_rows.py --out=rows.jsonl

A row has microseconds of both, and the largest error of each as a share of the largest element: of
tables beside a sum in float64, of sums beside the other one. A table is read at the indices of some
places, which are 512 x 512 relative positions ("positions") or drawn evenly. A sum is over the
samples of the gradient to a softmax's biases, as T5 has them: what it sums is made in its kernel, of
three arrays and a bias by position. With `--lock=FILE` all is compiled beside other benchmarks, and
timed alone (`locks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chained
import jax
import jax.numpy as jnp
import numpy as np
import records
from absl import app, flags
from jax.extend.core import jaxpr_as_fun
from locks import held

from vmem_jax.capture.flatten import flatten
from vmem_jax.capture.small_tables import with_known_tables
from vmem_jax.rewrite.column_sums import with_sums_in_parts

FLAGS = flags.FLAGS

Timed = tuple[dict[str, Any], Callable[[], dict[str, Any]]]
"""What a row is of, and what gives its figures."""

CALLS = 8
"""Of a program."""

HEADS, TOKENS = 12, 512

TABLES = (
    # indices of a table, its rows and columns, dtype
    ((TOKENS, TOKENS), 32, HEADS, "float32", True),
    ((32, 512), 2, 768, "float32", False),
    ((32, 512), 2, 768, "bfloat16", False),
    ((32, 512), 32, 768, "float32", False),
    ((32, 512), 32, 768, "bfloat16", False),
    ((32, 512), 512, 768, "bfloat16", False),
    ((16_384,), 2, 768, "bfloat16", False),
    ((16_384,), 512, 768, "bfloat16", False),
    ((65_536,), 16, 128, "bfloat16", False),
    ((8, 512), 8, 768, "bfloat16", False),
)

SAMPLES = (8, 9, 12, 16, 24, 31)


def main(_: Any) -> None:
    about = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    about["commit"] = records.commit()
    with held(FLAGS.lock, alone=False):
        made = [*_sums(), *_tables()]
    with held(FLAGS.lock, alone=True):
        for row, time_them in made:
            row |= time_them()
            records.append(Path(FLAGS.out), [{**row, **about}])
            print(row, flush=True)


def _tables() -> Iterator[Timed]:
    for places, rows, columns, dtype, is_position in TABLES:
        keys = jax.random.split(jax.random.key(rows), 2)
        updates = jax.random.normal(keys[0], (*places, columns), dtype)
        indices = jax.random.randint(keys[1], places, 0, rows)
        if is_position:
            distance = jnp.arange(places[1])[None] - jnp.arange(places[0])[:, None]
            indices = jnp.clip(distance, -rows // 2, rows // 2 - 1) + rows // 2

        def gradient(indices: Any, updates: Any, rows: int = rows) -> Any:
            table = jnp.zeros((rows, updates.shape[-1]), updates.dtype)
            return jax.vjp(lambda table: table[indices], table)[1](updates)[0]

        exact = np.zeros((rows, columns))
        np.add.at(exact, np.asarray(indices), np.asarray(updates, np.float64))
        closed = flatten(jax.make_jaxpr(gradient)(indices, updates))
        known, found = with_known_tables(closed, "gpu", ())
        assert found
        row = {"kind": "table", "places": places, "rows": rows, "columns": columns, "dtype": dtype}
        row["indices"] = "positions" if is_position else "drawn"
        yield row, _both(gradient, jaxpr_as_fun(known), [indices, updates], exact)


def _sums() -> Iterator[Timed]:
    for samples in SAMPLES:
        shape = samples, HEADS, TOKENS, TOKENS
        keys = jax.random.split(jax.random.key(samples), 7)
        of = lambda k, shape, dtype=jnp.float32, keys=keys: jax.random.normal(keys[k], shape, dtype)
        scores, dp = of(0, shape, jnp.bfloat16), of(1, shape, jnp.bfloat16)
        kept = jax.random.bernoulli(keys[2], 0.9, shape)
        table, largest, total, row = of(3, (32, HEADS)), *(of(k, shape[:3]) ** 2 for k in (4, 5, 6))
        given = [scores, dp, kept, table, largest + 8, total + 1, row]
        closed = jax.make_jaxpr(_gradient_to_biases)(*given)
        pieces = with_sums_in_parts(closed)
        is_divided = str(pieces) != str(closed)
        kind = {"kind": "sum", "samples": samples, "in_pieces": is_divided}
        yield kind, _both(_gradient_to_biases, jaxpr_as_fun(pieces), given, None)


def _gradient_to_biases(scores: Any, dp: Any, kept: Any, table: Any, *by_row: Any) -> jax.Array:
    largest, total, row = (a[..., None] for a in by_row)
    distance = jnp.arange(TOKENS)[None] - jnp.arange(TOKENS)[:, None]
    biases = table[jnp.clip(distance, -16, 15) + 16].transpose(2, 0, 1)
    p = jnp.exp(scores.astype(jnp.float32) * 0.125 + biases - largest) / total
    wide = jnp.where(kept, dp * jnp.asarray(1.109, dp.dtype), 0).astype(jnp.float32)
    return jnp.sum(p * (wide - row), 0)


def _both(
    plain: Callable, ours: Callable, given: list[Any], exact: Any
) -> Callable[[], dict[str, Any]]:
    """What gives microseconds of both, and their errors."""
    first = lambda made: made[0] if isinstance(made, (list, tuple)) else made
    calls = {"plain": plain, "ours": ours}
    run = {
        name: chained.compiled(f, [given] * CALLS, FLAGS.rounds, first) for name, f in calls.items()
    }

    def time_them() -> dict[str, Any]:
        found = {name: each() for name, each in run.items()}
        wide = {name: np.asarray(made, np.float64) for name, (_, made) in found.items()}
        beside = wide["plain"] if exact is None else exact
        error = lambda made: float(np.abs(made - beside).max() / np.abs(beside).max())
        seconds = {f"{name}_us": us for name, (us, _) in found.items()}
        return seconds | {f"{name}_error": error(made) for name, made in wide.items()}

    return time_them


if __name__ == "__main__":
    flags.DEFINE_string("out", "few_rows.jsonl", "where rows are added")
    flags.DEFINE_string("lock", "", "file by which several benchmarks take turns")
    flags.DEFINE_integer("rounds", 5, "runs of a program; the median counts")
    app.run(main)
