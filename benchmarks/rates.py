"""What a card's products and its passes over memory reach, by their shapes.

    python benchmarks/rates.py --out=rows.jsonl

A row is one kernel or a few: a product [batch, m, k] x [batch, k, n]; a convolution, one with another
value added behind it ("sum"), or its gradient to the input or to the kernel; cuDNN's attention, or
its gradient, of which operations are those that a causal mask leaves; a pass that reads and writes
arrays once; what reduces rows; or a softmax of scores under a mask, or its gradient. It has the
microseconds of its kernels under JAX's profiler, the median of `--runs` runs on random normal data,
and what that is in operations or bytes a second.
`core/cards.py` has what is derived from these rows.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import math
import pathlib
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import records
from absl import app, flags
from jax import lax
from locks import held

FLAGS = flags.FLAGS

TOKENS = (2048, 8192, 12608, 16384, 25216)
"""Rows of activations: 64 and 128 images of 197 tokens among them."""

WEIGHTS = (
    *((1024, 1024), (1024, 3072), (1024, 4096), (4096, 1024)),  # ViT-L, GPT-2 medium
    *((2048, 2048), (2048, 512), (2048, 8192), (8192, 2048)),  # a decoder of 1.1 billion weights
)

SQUARES = (512, 1024, 2048, 4096, 8192)

ATTENTION = (  # batch, queries, keys, size of a head
    *((1024, 197, 197, 64), (2048, 197, 197, 64), (128, 1024, 1024, 64)),
    *((64, 2048, 2048, 128), (256, 512, 512, 64)),
)

OTHERS = (  # batch, m, n, k: a vocabulary, adapters of rank 16
    *((1, 8192, 32000, 2048), (1, 8192, 50257, 1024), (1, 2048, 32000, 2048)),
    *((1, 16384, 16, 2048), (1, 16384, 2048, 16), (1, 16, 2048, 16384), (1, 2048, 16, 16384)),
)

LENGTHS = (32, 49, 64, 96, 128, 192, 197, 256, 384, 768, 1024, 4096)
"""Of rows: the windows and widths of Swin, tokens of ViT, widths of transformers."""

DEPTHWISE = ((56, 128), (28, 256), (14, 512), (7, 1024))  # side, channels: ConvNeXt-B

CONVOLUTIONS = (  # batch, side, channels in and out, side of the kernel, stride
    *((256, 56, 64, 64, 3, 1), (256, 56, 64, 256, 1, 1), (256, 56, 256, 64, 1, 1)),  # ResNet-50
    *((256, 28, 128, 128, 3, 1), (256, 14, 256, 256, 3, 1), (256, 14, 1024, 256, 1, 1)),
    *((256, 7, 512, 512, 3, 1), (256, 56, 256, 512, 1, 2)),
    *((16, 64, 320, 320, 3, 1), (16, 64, 960, 320, 3, 1), (16, 32, 640, 640, 3, 1)),  # a U-Net
    *((16, 16, 1280, 1280, 3, 1), (16, 8, 1280, 1280, 3, 1), (16, 64, 320, 320, 3, 2)),
    *((128, 56, 128, 256, 2, 2), (128, 224, 3, 128, 4, 4)),  # ConvNeXt-B's patches
    *((128, 56, 64, 64, 1, 1), (128, 56, 64, 192, 3, 1), (128, 28, 192, 64, 1, 1)),  # GoogLeNet
    *((128, 28, 96, 128, 3, 1), (128, 28, 16, 32, 3, 1), (128, 14, 480, 192, 1, 1)),
    *((128, 14, 112, 224, 3, 1), (128, 14, 24, 64, 3, 1), (128, 7, 832, 384, 1, 1)),
    *((128, 112, 16, 96, 1, 1), (128, 56, 96, 24, 1, 1), (128, 56, 24, 144, 1, 1)),  # MobileNetV2
    *((128, 28, 144, 32, 1, 1), (128, 28, 32, 192, 1, 1), (128, 14, 384, 64, 1, 1)),
    *((128, 14, 96, 576, 1, 1), (128, 7, 160, 960, 1, 1)),
    *((8, 126, 128, 128, 1, 1), (8, 126, 128, 128, 3, 1)),  # as many positions as a WaveNet's
    *((16, 256, 64, 64, 3, 1), (16, 128, 128, 128, 3, 1), (16, 64, 256, 256, 3, 1)),  # a segmenter
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A program to time.

    Attributes:
      row: what its row says of it.
      call: arrays -> arrays.
      shapes: of its operands.
      flops, nbytes: what it computes, and what it reads and writes once.
    """

    row: dict[str, Any]
    call: Callable[..., Any]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    flops: int
    nbytes: int


def main(_: Any) -> None:
    found = [*products(FLAGS.dtypes)] if "product" in FLAGS.kinds else []
    found += [*convolutions()] if "convolution" in FLAGS.kinds else []
    found += [*attentions()] if "attention" in FLAGS.kinds else []
    found += [*passes()] if "pass" in FLAGS.kinds else []
    found += [*rows()] if "row" in FLAGS.kinds else []
    found += [*scores()] if "scores" in FLAGS.kinds else []
    with held(FLAGS.lock, alone=False), concurrent.futures.ThreadPoolExecutor(8) as pool:
        compiled = [*pool.map(program, range(len(found)), found)]
    with held(FLAGS.lock, alone=True):
        for begin in range(0, len(found), FLAGS.at_once):
            some = slice(begin, begin + FLAGS.at_once)
            for row in _timed(range(len(found))[some], found[some], compiled[some]):
                print(json.dumps(row), flush=True)
                with open(FLAGS.out, "a") as out:
                    out.write(json.dumps(row) + "\n")


def program(number: int, case: Case) -> Any:
    """What `case` compiles to; its number is in its name."""

    def named(*operands: Any) -> Any:
        return case.call(*operands)

    named.__name__ = f"case_{number}"
    return jax.jit(named).lower(*case.shapes).compile()


def products(dtypes: Sequence[str]) -> Iterator[Case]:
    """In the order of the rows."""
    for dtype in dtypes:
        sizes = [(1, n, n, n) for n in SQUARES]
        sizes += [(1, t, n, k) for t in TOKENS for k, n in WEIGHTS]
        gradients = [(1, k, n, t) for t in TOKENS for k, n in WEIGHTS]
        for batch, m, n, k in (*sizes, *OTHERS):
            yield _product(dtype, batch, m, n, k)
        for batch, m, n, k in gradients:  # to the weights: both operands are [tokens, channels]
            yield _product(dtype, batch, m, n, k, lhs_first=True)
        for batch, queries, keys, size in ATTENTION:
            yield _product(dtype, batch, queries, keys, size)
            yield _product(dtype, batch, queries, size, keys)
            yield _product(dtype, batch, keys, size, queries, lhs_first=True)


def _product(dtype: str, batch: int, m: int, n: int, k: int, lhs_first: bool = False) -> Case:
    """Args: lhs_first: whether the left operand has its contracted dimension first."""
    lhs = (batch, k, m) if lhs_first else (batch, m, k)
    dims = (((1,) if lhs_first else (2,), (1,)), ((0,), (0,)))
    shapes = [lhs, (batch, k, n)]
    if batch == 1:
        dims = (((0,) if lhs_first else (1,), (0,)), ((), ()))
        shapes = [shape[1:] for shape in shapes]
    operands = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    size = jnp.dtype(dtype).itemsize
    return Case(
        {"kind": "product", "dtype": dtype, "batch": batch, "m": m, "n": n, "k": k}
        | {"lhs_first": lhs_first},
        lambda x, y: lax.dot_general(x, y, dims),
        operands,
        2 * batch * m * n * k,
        size * batch * (m * k + k * n + m * n),
    )


def convolutions() -> Iterator[Case]:
    """In bfloat16, channels last, each three times."""
    for side, channels in DEPTHWISE:
        yield from _convolution(128, side, channels, channels, 7, 1, groups=channels)
    for sizes in CONVOLUTIONS:
        yield from _convolution(*sizes)


def _convolution(
    batch: int, side: int, before: int, after: int, kernel: int, stride: int, groups: int = 1
) -> Iterator[Case]:
    """Forwards, and both gradients, of one tap also with a sum behind.

    Args:
      before, after: channels of the input and of the output.
    """
    layout = ("NHWC", "HWIO", "NHWC")

    def convolved(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x, w, (stride, stride), "SAME", None, None, layout, feature_group_count=groups
        )

    of = lambda *shape: jax.ShapeDtypeStruct(shape, "bfloat16")
    x, w = of(batch, side, side, before), of(kernel, kernel, before // groups, after)
    y = jax.eval_shape(convolved, x, w)
    to_input = lambda w, y: jax.linear_transpose(lambda x: convolved(x, w), x)(y)[0]
    to_kernel = lambda x, y: jax.linear_transpose(lambda w: convolved(x, w), w)(y)[0]
    row = {"kind": "convolution", "dtype": "bfloat16", "batch": batch, "side": side}
    row |= {"before": before, "after": after, "kernel": kernel, "stride": stride, "groups": groups}
    calls = {"forward": (convolved, x, w), "input": (to_input, w, y), "kernel": (to_kernel, x, y)}
    if kernel == 1:
        calls["sum"] = (lambda x, w, y: convolved(x, w) + y, x, w, y)
    for role, (call, *operands) in calls.items():
        yield Case(
            row | {"role": role},
            call,
            tuple(operands),
            2 * y.size * kernel**2 * before // groups,
            2 * (x.size + w.size + (2 if role == "sum" else 1) * y.size),
        )


def attentions() -> Iterator[Case]:
    """In bfloat16, causal and not; the gradient is that to queries, keys and values together, and its
    time has the forward pass in it."""
    for tokens, size in ((512, 64), (512, 128), (1024, 64), (2048, 128), (8192, 128), (32768, 128)):
        for causal in (True, False):
            heads = jax.ShapeDtypeStruct((2**15 // tokens, tokens, 16, size), "bfloat16")

            def attend(q: Any, k: Any, v: Any, causal: bool = causal) -> jax.Array:
                return jax.nn.dot_product_attention(
                    q, k, v, is_causal=causal, implementation="cudnn"
                )

            def gradient(*args: Any, attend: Callable[..., Any] = attend) -> Any:
                *heads, cotangent = args
                return jax.vjp(attend, *heads)[1](cotangent)

            flops = 4 * heads.size * tokens // (2 if causal else 1)
            nbytes = 2 * heads.size
            row = {"kind": "attention", "dtype": "bfloat16", "tokens": tokens, "head": size}
            row |= {"batch": heads.shape[0], "heads": 16, "causal": causal}
            forward = row | {"role": "forward"}
            yield Case(forward, attend, (heads,) * 3, flops, 4 * nbytes)
            both = row | {"role": "both"}
            yield Case(both, gradient, (heads,) * 4, 7 * flops // 2, 12 * nbytes)


def passes() -> Iterator[Case]:
    """Behind the others."""
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    case = functools.partial(_moving, "pass")
    centred = lambda x: (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
    normed = lambda x: centred(x.astype(jnp.float32)).astype(x.dtype)
    for dtype in ("bfloat16", "float32"):
        for rows in (1024, 4096, 16384, 65536):  # of 1,024: from 2 to 268 MB
            x = of(dtype, rows, 1024)
            yield case("add", lambda x, y: x + y, x, x)
            yield case("gelu", jax.nn.gelu, x)
            yield case("norm", normed, x)
            yield case("sum of columns", lambda x: x.astype(jnp.float32).sum(0), x)
        yield case("softmax", _weights, of(dtype, 64, 16, 197, 197))
        yield case("softmax", _weights, of(dtype, 8, 16, 1024, 1024))
        yield case("heads", lambda x: jnp.swapaxes(x, 1, 2) * 2, of(dtype, 64, 197, 16, 64))
        yield case("transpose", lambda x: x.T * 2, of(dtype, 16384, 1024))
    yield case("rotary", _rotated, of("bfloat16", 8, 2048, 16, 128), of("float32", 2048, 64))
    rows = lambda *heads: jnp.stack([jnp.swapaxes(x, 1, 2) for x in heads], 2)
    for batch, tokens in ((64, 197), (8, 1024)):
        heads = of("bfloat16", batch, 16, tokens, 64)
        yield case("stacked heads", rows, heads, heads, heads)
    x, key = of("bfloat16", 64, 16, 197, 197), of("uint32", 2)
    keep = lambda key, x: x * jax.random.bernoulli(key, 0.9, x.shape).astype(x.dtype)
    yield case("dropout", keep, key, x)
    f32 = of("float32", 4096, 4096)
    moment = lambda w, g, m, v: (w - m / (jnp.sqrt(v) + 1e-8), 0.9 * m + g, 0.99 * v + g * g)
    yield case("adam", moment, f32, of("bfloat16", 4096, 4096), f32, f32)


def rows() -> Iterator[Case]:
    """Reductions of 2**26 elements of bfloat16 in rows of different lengths: maxima; two sums, as
    layer norms take them; two sums over the rows, as the gradients to scale and bias; a softmax, and
    its gradient."""

    def sums(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        wide = x.astype(jnp.float32)
        return wide.sum(-1), jnp.square(wide).sum(-1)

    def columns(x: jax.Array, y: jax.Array, mean: jax.Array, scale: jax.Array) -> Any:
        wide = y.astype(jnp.float32)
        return wide.sum(0), (wide * (x.astype(jnp.float32) - mean) * scale).sum(0)

    for length in LENGTHS:
        x = jax.ShapeDtypeStruct((2**26 // length, length), "bfloat16")
        of_row = jax.ShapeDtypeStruct((2**26 // length, 1), "float32")
        yield _moving("row", "maxima", lambda x: x.max(-1), x)
        yield _moving("row", "two sums", sums, x)
        yield _moving("row", "two sums of columns", columns, x, x, of_row, of_row)
        yield _moving("row", "softmax", _weights, x)
        yield _moving("row", "softmax gradient", _scores_gradient, x, x)


def scores() -> Iterator[Case]:
    """Softmaxes of the scores of 8 sequences of 1,024 tokens in 16 heads, and their gradients: of all
    tokens; with a causal mask, of which rows share one, or which is counted for each row; and with
    dropout by a mask in bytes."""
    shape = (8, 16, 1024, 1024)
    kept = jax.ShapeDtypeStruct(shape, "bool")

    def masked(x: jax.Array, mask: jax.Array) -> jax.Array:
        return jnp.where(mask, x, jnp.finfo(x.dtype).min)

    def causal(x: jax.Array) -> jax.Array:
        return _weights(masked(x, jnp.tril(jnp.ones(shape[-2:], bool))))

    def counted(x: jax.Array) -> jax.Array:
        query, key = (lax.broadcasted_iota("int32", shape, i) for i in (2, 3))
        return _weights(masked(x, query >= key))

    def dropped(x: jax.Array, kept: jax.Array) -> jax.Array:
        return jnp.where(kept, _weights(x) / 0.9, 0)

    calls: dict[str, tuple[Callable[..., jax.Array], tuple[jax.ShapeDtypeStruct, ...]]] = {
        "softmax": (_weights, ()),
        "causal softmax": (causal, ()),
        "counted causal softmax": (counted, ()),
        "softmax and dropout": (dropped, (kept,)),
    }
    for dtype, (name, (call, masks)) in itertools.product(("bfloat16", "float32"), calls.items()):
        x = jax.ShapeDtypeStruct(shape, dtype)

        def gradient(x: jax.Array, y: jax.Array, *masks: Any, call: Callable = call) -> jax.Array:
            return jax.vjp(lambda x: call(x, *masks), x)[1](y)[0]

        yield _moving("scores", name, call, x, *masks)
        yield _moving("scores", f"{name} gradient", gradient, x, x, *masks)
    yield from _padded_scores()


def _padded_scores() -> Iterator[Case]:
    """Softmaxes of a ViT's scores of 197 tokens, 64 images in 16 heads, and two of their products;
    with rows of whole vectors, and with rows, or rows and columns, of a whole tile."""
    for queries, keys in ((197, 197), (197, 200), (197, 256), (256, 256)):
        of = lambda *matrix: jax.ShapeDtypeStruct((64, 16, *matrix), "bfloat16")
        scores, query, key = of(queries, keys), of(queries, 64), of(keys, 64)
        yield _moving("scores", "softmax", _weights, scores)
        yield _moving("scores", "softmax gradient", _scores_gradient, scores, scores)
        yield _moving("scores", "queries and keys", lambda q, k: q @ k.mT, query, key)
        yield _moving("scores", "weights and values", jnp.matmul, scores, key)


def _moving(
    kind: str, name: str, call: Callable[..., Any], *operands: jax.ShapeDtypeStruct
) -> Case:
    """A case that reads its operands once, and writes its results."""
    results = jax.tree.leaves(jax.eval_shape(call, *operands))
    row = {"kind": kind, "name": name, "dtype": str(operands[0].dtype), "shape": operands[0].shape}
    size = lambda x: math.prod(x.shape) * jnp.dtype(x.dtype).itemsize
    return Case(row, call, operands, 0, sum(map(size, (*operands, *results))))


def _weights(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype)


def _scores_gradient(x: jax.Array, y: jax.Array) -> jax.Array:
    return jax.vjp(_weights, x)[1](y)[0]


def _rotated(x: jax.Array, angle: jax.Array) -> jax.Array:
    """Rotary embeddings (Su et al., 2021, equation 34) of x[batch, tokens, heads, size]."""
    a, b = jnp.split(x, 2, -1)
    cos, sin = (f(angle)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def _timed(
    numbers: Sequence[int], cases: Sequence[Case], compiled: Sequence[Any]
) -> Iterator[dict[str, Any]]:
    """The rows of `cases`, which run under one trace, with their numbers and programs."""
    runs = [(each, _operands(case.shapes)) for each, case in zip(compiled, cases, strict=True)]
    for each, operands in runs:
        jax.block_until_ready(each(*operands))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            for _ in range(FLAGS.runs):
                for each, operands in runs:
                    jax.block_until_ready(each(*operands))
        [file] = sorted(pathlib.Path(directory).rglob("*.xplane.pb"))
        profile = jax.profiler.ProfileData.from_serialized_xspace(file.read_bytes())
    micros, names = _kernels(profile)
    for i, case in zip(numbers, cases, strict=True):
        each = micros[f"jit_case_{i}"]
        median = statistics.median(each) if each else None
        yield {
            **case.row,
            "us": median,
            "us_least": min(each, default=None),
            "us_most": max(each, default=None),
            "kernels": names[f"jit_case_{i}"],
            "tflops": case.flops / median / 1e6 if median else None,
            "gb_per_s": case.nbytes / median / 1e3 if median else None,
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "commit": records.commit(),
        }


def _operands(shapes: tuple[jax.ShapeDtypeStruct, ...]) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    drawn = lambda key, x: (
        jax.random.key_data(key)
        if x.dtype == jnp.uint32
        else jax.random.normal(key, x.shape, jnp.float32).astype(x.dtype)
    )
    return [drawn(key, x) for key, x in zip(keys, shapes, strict=True)]


def _kernels(profile: Any) -> tuple[dict[str, list[float]], dict[str, list[str]]]:
    """Of each module the microseconds of its kernels in each run, and their names."""
    by_module = collections.defaultdict(list)
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):
                for event in line.events:
                    stats = dict(event.stats)
                    by_module[str(stats.get("hlo_module", ""))].append((event.start_ns, event))
    micros, names = collections.defaultdict(list), collections.defaultdict(list)
    for module, events in by_module.items():
        ordered = [event for _, event in sorted(events, key=lambda pair: pair[0])]
        of_a_run = len(ordered) // FLAGS.runs
        for begin in range(0, of_a_run * FLAGS.runs, max(of_a_run, 1)):
            run = ordered[begin : begin + of_a_run]
            micros[module].append(sum(event.duration_ns for event in run) / 1e3)
        names[module] = [event.name for event in ordered[:of_a_run]]
    return micros, names


if __name__ == "__main__":
    flags.DEFINE_list(
        "kinds", ["product", "pass"], "product, convolution, attention, pass, row, scores"
    )
    flags.DEFINE_list("dtypes", ["bfloat16"], "of products")
    flags.DEFINE_integer("runs", 7, "of each program under the profiler")
    flags.DEFINE_integer(
        "at_once", 16, "programs in a trace; their operands are in memory together"
    )
    flags.DEFINE_string("out", "rates.jsonl", "where rows are added")
    flags.DEFINE_string("lock", "", "file by which several benchmarks take turns; see `locks`")
    app.run(main)
