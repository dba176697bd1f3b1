"""A random train step: drawn from a seed as a spec, built from the spec.

A spec is a value that JSON can hold. Each layer of it has a salt of its own, so one can be left out
and the others stay as they are, which is how a failing program is shrunk.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import VERSION
from .layers import LAYERS, Draw
from .layers.base import DOUBLE, Dtypes
from .updates import LATER, TRAINING, UPDATES

Spec = dict[str, Any]

MOST = 2**17
"""Elements of the activations: what is larger is cut, so that a program takes about a second."""

COUNTS = [1] * 7 + [2] * 12 + [3] * 11 + [4] * 6 + [5] * 3 + [8]
"""Numbers of layers. A program of eight takes as long as ten of three, and what was found so far
shrank to one to three."""

OTHER = 2**20
"""A salt that no layer has: draws by it leave all others as they are."""

FEWEST = 2**12
"""Elements of the inputs, of most programs."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A step and its arguments.

    Attributes:
      step: (parameters, optimiser's state, inputs, targets, key) -> anything.
      args: the arguments in host memory; a key is kept as its data.
      layers: the names of the layers that are in it.
      roundoff: the unit roundoff of the dtype in which it computes.
      depth: about how many operations lie between the arguments and the results.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    layers: tuple[str, ...]
    roundoff: float
    depth: int

    def fresh(self) -> tuple[Any, ...]:
        """The arguments on the device, in arrays that nothing else holds."""
        *rest, key = self.args
        return (*jax.tree.map(jnp.array, tuple(rest)), jax.random.wrap_key_data(jnp.array(key)))


def draw_spec(seed: int) -> Spec:
    """The program of `seed`."""
    draw = Draw(VERSION, seed)
    batch = draw.one([1, 2, 4, 8, 16, 16, 32, 32, 33, 64, 64, 96, 128])
    time = draw.one([1, 4, 9, 16, 25, 36, 36, 64, 64, 64])
    channels = draw.one([4, 8, 8, 12, 16, 32])
    if draw.chance(0.9):
        # mostly the activations are the larger part, or no budget below plain's need can be met
        while batch * time * channels < FEWEST:
            batch, time = 2 * batch, 2 * time if time < 36 else time
    if draw.chance(0.02):
        batch, time = draw.one([(0, time), (batch, 0)])
    count = draw.one(COUNTS)
    names = [draw.one(list(LAYERS)) for _ in range(count)]
    other = Draw(VERSION, seed, OTHER)
    later = [other.one([*LATER])] if other.chance(0.05) else []
    return {
        "version": VERSION,
        "seed": seed,
        "shape": [batch, time, channels],
        "dtype": draw.one(["float32"] * 6 + ["bfloat16"] * 2 + ["mixed"] * 2 + ["float16"]),
        "layers": [[name, i] for i, name in enumerate(names)],
        "skips": [i for i in range(count) if draw.chance(0.25)],
        "loss": draw.one(["mean", "mean", "sum", "labels"]),
        "update": [draw.one([*UPDATES, *TRAINING * 2]), *later][-1],
    }


def build(spec: Spec, double: bool = False) -> Program:
    """The program of `spec`.

    Args:
      double: with every number in double precision, from the same arguments; for `jax.enable_x64`.

    Raises:
      ValueError: the spec is of another version of the generator.
    """
    if spec["version"] != VERSION:
        raise ValueError(f"the spec is of generator {spec['version']}; this is {VERSION}.")
    dtypes = DOUBLE if double else Dtypes()
    computed = spec["dtype"] if spec["dtype"] != "mixed" else "bfloat16"
    held = spec["dtype"] if spec["dtype"] != "mixed" else "float32"

    def cast(x: Any, dtype: str) -> Any:
        x = np.asarray(jnp.asarray(x, dtype))
        return x.astype(np.float64) if double else x

    active = dtypes.single if double else jnp.dtype(computed)
    shape = tuple(spec["shape"])
    key = jax.eval_shape(lambda: jax.random.key(0))
    chain, params, used = [], {}, []
    for name, salt in spec["layers"]:
        layer = LAYERS[name](Draw(VERSION, spec["seed"], salt + 1), shape, dtypes)
        if layer is None:
            continue
        label = f"{salt:02}_{name}"
        weights = {n: cast(a, held) for n, a in layer.params.items()}
        run = _cut(layer.apply)
        out = jax.eval_shape(run, weights, jax.ShapeDtypeStruct(shape, active), key)
        if len(out.shape) != 3 or out.dtype != active:
            raise AssertionError(f"layer {name} makes {out} of {shape} {active}")
        if weights:
            params[label] = weights
        chain.append((label, run, salt in spec["skips"] and out.shape == shape))
        used.append(name)
        shape = out.shape

    def forward(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        x = x.astype(active)
        for label, run, skip in chain:
            y = run(params.get(label, {}), x, key)
            x = y + x * 0.5 if skip else y
        return x

    draw = Draw(VERSION, spec["seed"], 0)
    x = cast(draw.normal(*spec["shape"]), held)
    targets: Any = cast(np.tanh(draw.normal(*shape)), "float32")
    if spec["loss"] == "labels":
        targets = draw.integers(shape[-1], shape[:1])

    def loss(params: Any, x: jax.Array, targets: jax.Array, key: jax.Array) -> jax.Array:
        y = forward(params, x, key).astype(dtypes.single)
        if spec["loss"] == "labels":
            logits = jax.nn.log_softmax(y.sum(1) / max(y.shape[1], 1))
            return -jnp.take_along_axis(logits, targets[:, None], 1).sum() / max(y.shape[0], 1)
        errors = (jnp.tanh(y) - targets) ** 2
        return errors.sum() if spec["loss"] == "sum" or not y.size else errors.mean() * 4

    step, state = {**UPDATES, **LATER}[spec["update"]](forward, loss, params)
    if double:
        state = jax.tree.map(lambda a: np.asarray(a, np.float64) if _is_float(a) else a, state)
    state = jax.tree.map(np.asarray, state)
    data = np.asarray(jax.random.key_data(jax.random.key(spec["seed"] % 1000)))
    roundoff = float(jnp.finfo(computed).eps) / 2
    args = (params, state, x, targets, data)
    return Program(step, args, tuple(used), roundoff, 2 * len(chain) + 2)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(np.asarray(x).dtype, jnp.floating)


def _cut(apply: Any) -> Any:
    """`apply`, whose result is cut in time or channels where it has become too large."""

    def run(p: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        y = apply(p, x, key)
        if y.ndim == 3 and math.prod(y.shape) > MOST and y.shape[0]:
            y = y[:, : max(MOST // (y.shape[0] * y.shape[2]), 1)]
        return y[..., :64] if y.shape[-1] > 64 else y

    return run
