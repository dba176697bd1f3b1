"""The tables of docs/benchmarks.md, from rows that `run.py` and its sisters wrote.

Each is a function in TABLES. Of rows of one step, variant and budget the last stands.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import records
from cells import failure, grid, number
from compared import GIB, RESULTS, Compared, compared, compared_steps, latest, lines_of

STEPS = (
    "h200_recompute",
    "h200_transfers",
    "h200_convolutions",
    "h200_sub_batches",
    "h200_carry",
    "h100_carry",
)
"""Files whose rows are training steps, timed."""


# -- the tables


def recompute() -> str:
    """ResNets as `training_steps.py` timed them, but for `jax.checkpoint`."""
    return lines_of(_recomputing())


def _recomputing() -> list[Compared]:
    kept = lambda row: row.variant == "checkpoint" or row.model not in RESNETS
    rows = [each for each in compared("h200_recompute") if kept(each.row)]
    timed = [each for name in RESNETS for each in compared_steps("training_steps_h200", name)]
    return latest([*rows, *timed])


def _others(name: str) -> list[Compared]:
    """The rows of a file but for steps that `recompute` has of newer code."""
    newer = {each.step for each in _recomputing() if each.row.model in RESNETS}
    return [each for each in compared(name) if each.step not in newer]


def transfers() -> str:
    """Plans that move beside plans that may not, at the tightest budgets of each network."""
    wanted = {"33%", "20%", "35%", "25%", "30%"}
    rows = [each for each in latest(_others("h200_transfers")) if each.asked in wanted]
    variants = ("auto", "auto:recompute", "auto:offload")
    moving = {(e.step, e.asked) for e in rows if e.row.variant in variants and e.row.moved_nbytes}
    rows = [each for each in rows if (each.step, each.asked) in moving]
    return lines_of([each for each in rows if each.row.variant in variants], "moved", "predicted")


def transports() -> str:
    rows = latest(compared("h200_transfers"))
    return lines_of([each for each in rows if each.row.variant.count(":") > 1], "moved")


def compression() -> str:
    """Plans that may compress beside plans that may only move."""
    rows = latest(compared("h200_transfers"))
    budgets = {each.asked for each in rows if each.row.compressed}
    variants = ("auto:offload", "auto:offload+compress")
    chosen = [e for e in rows if e.row.variant in variants and e.asked in budgets]
    return lines_of(sorted(chosen, key=lambda each: each.asked), "moved", "compressed")


def convolutions() -> str:
    """Plans with and without cuDNN's configurations; equal ones are left out."""
    rows = latest(_others("h200_convolutions"))
    changed = {(e.step, e.asked) for e in rows if e.row.divided or e.row.outcome != "ok"}
    return lines_of([each for each in rows if (each.step, each.asked) in changed], "divided")


def sub_batches() -> str:
    return lines_of(compared("h200_sub_batches"), "sub_batches")


_BY_HAND = {
    "plain": "plain `jax.jit`",
    "checkpoint": "`jax.checkpoint` of each layer",
    "dots": "`dots_with_no_batch_dims_saveable`",
    "torch.compile": "`torch.compile`",
}

_STEPS = {
    "decoder": "decoder",
    "lora": "LoRA of the decoder",
    "gpt": "GPT-2 medium, dropout, scanned ({batch})",
    "vit": "ViT-L/16, dropout, scanned ({batch})",
    "resnet": "ResNet-152, scanned ({batch})",
    "resnet50": "ResNet-50 ({batch})",
    "resnet50_float16": "ResNet-50 in float16 ({batch})",
    "resnet152": "ResNet-152 ({batch})",
    "resnet152_float16": "ResNet-152 in float16 ({batch})",
    "googlenet": "GoogLeNet ({batch})",
    "inception4": "Inception-v4 ({batch})",
    "lstm": "LSTM ({batch})",
    "gru": "GRU ({batch})",
    "rnn": "recurrent network ({batch})",
    "vit_dropout": "ViT-L/16, {layers} layers (128)",
    "vit_flax": "ViT-L/16 of Flax's layers (128)",
    "convnext": "ConvNeXt-B ({batch})",
    "unet": "U-Net of latent diffusion ({batch})",
    "dit": "DiT-B/2 ({batch})",
    "bert": "BERT-base ({batch})",
    "t5": "T5 ({batch})",
    "segmenter": "U-Net of images ({batch})",
    "wavenet": "WaveNet ({batch})",
}


def training_steps() -> str:
    """The decoder's rows without a profile, with cuDNN's attention; those by hand of scanned layers
    are in `by_hand`. Where `allow` names techniques, it is unrolled plans that move something."""
    rows = [r for r in _json("training_steps_h200") if _is_of_the_decoder(r)]
    moves = lambda r: not r["scanned"] and "moved" in r.get("plan", "")
    rows = [r for r in rows if moves(r) or not r.get("allow")]
    rows = [r for r in rows if not (r["scanned"] and r["way"] in ("checkpoint", "dots"))]
    return _training_steps(rows, "decoder").replace("| decoder, ", "| ")


def _is_of_the_decoder(row: dict[str, Any]) -> bool:
    """Whether it is the decoder with cuDNN's attention and no profile, scanned or with a weight a
    layer."""
    others = ("profile", "attention", "tokens")
    is_usual = row["scanned"] or not row.get("stacked", True)
    return row["model"] == "decoder" and is_usual and not any(map(row.get, others))


def _training_steps(rows: Sequence[dict[str, Any]], *models: str) -> str:
    """Those of `rows` that are of `models`, the last of each variant."""
    lines: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["model"] not in models:
            continue
        way = row["way"].replace(".0GiB", "GiB")
        step = _STEPS[row["model"]].format(**{"layers": 24, **row})
        step = step if row["scanned"] else step.replace("scanned", "unrolled")
        if row["model"] in ("decoder", "lora"):
            step += ", scanned" if row["scanned"] else ", unrolled"
            is_stacked = not row["scanned"] and row.get("stacked", True)
            step += ", stacked weights" if is_stacked else ""
        if row.get("attention"):
            step += f", XLA's attention ({row['batch']})"
        if row["model"] == "decoder" and "layers" in row:
            step += ", {layers} layers of {tokens} tokens".format(**row)
        elif "tokens" in row:
            step += ", {batch} × {tokens:,} tokens".format(**row)
        step += f", fully sharded over {row['mesh']}" if "mesh" in row else ""
        step += "" if row.get("triton", True) else ", without Triton"
        if way[0] == "@":
            variant = f"`auto`, in the memory of `{way[1:]}`"
        elif "@" in way or "*" in way:
            named, _, parts = way.partition("*")
            policy, _, budget = named.partition("@")
            variant = f"`{policy}`"
            variant += f', "{budget}"' if budget else ""
            variant += f", {parts} sub-batches" if parts else ""
        else:
            variant = _BY_HAND.get(way, f"`{way}`" if way == "exact" else f'`auto`, "{way}"')
        variant += ", profiled" if row["profile"] else ""
        moves = way not in _BY_HAND and "offload" in row.get("allow", ())
        variant += ", transfers allowed" if moves else ""
        variant += f", {row['note']}" if "note" in row else ""
        predicted = f"{row['predicted_ms']:.1f}" if "predicted_ms" in row else ""
        is_late = row.get("error", "").startswith(records.LATE)
        ms = f"{row['ms']:.1f}" if "ms" in row else "not timed" if is_late else "does not run"
        of_plain = f"{row['of_plain']:.3f}" if "of_plain" in row else ""
        gib = number(row["gib"]) if "gib" in row else ms if is_late else "does not compile"
        line = [step, variant, gib, ms, of_plain, predicted]
        lines[step, variant] = lines.get((step, variant), line) if is_late else line
    header = ["step", "variant", "GiB", "ms", "time / plain", "ms predicted"]
    return "\n" + grid(header, [*lines.values()])


def by_hand() -> str:
    """What `auto` takes in the memory of each policy that a user may pick, as a share of its time."""
    by_network: dict[str, dict[str, dict[str, Any]]] = {}
    for row in _json("by_hand_h200"):
        step = _STEPS[row["model"]].format(**row).replace(", scanned", "")
        if row["model"] == "decoder":
            kernels = "XLA" if row.get("attention") == "xla" else "cuDNN"
            step += f", {kernels}'s attention ({row['batch']})"
        by_network.setdefault(step, {})[row["way"]] = row
    lines = []
    for step, rows in by_network.items():
        cells = []
        for way in _PICKED:
            hand, ours = rows[way], rows[f"@{way}"]
            if "ms" in ours and "ms" in hand:
                cells.append(f"{ours['ms'] / hand['ms']:.2f}")
            else:
                cells.append("alone" if "ms" in ours else "")
        lines.append([step, *cells])
    return "\n" + grid(["scanned step (batch)", *_PICKED.values()], lines)


_PICKED = {
    "checkpoint": "nothing kept",
    "every_dot": "products",
    "dots": "… without batch dimensions",
    "names": "names",
    "offload": "names offloaded",
    "sqrt": "√n segments",
}


def seven_billion() -> str:
    """The whole training of a network whose state is as large as the card."""
    lines = []
    for row in _json("seven_billion"):
        card = row["device"].removeprefix("NVIDIA ").removesuffix(" 80GB HBM3")
        way = "a checkpoint a layer" if row["way"] == "checkpoint" else f"`auto`, {row['budget']}"
        way += ", scanned" if row.get("scanned") else ""
        figures = [row["pinned_gib"], row["allocator_gib"]]
        predicted = f"{row['predicted_ms'] / 1e3:.2f}" if "predicted_ms" in row else ""
        seconds = [f"{row['ms'] / 1e3:.2f}", predicted]
        each = f"{row['tokens_per_second']:,.0f}"
        lines.append([card, way, *map(number, figures), *seconds, each])
    header = ["card", "way", "pinned, GiB", "peak", "s", "predicted", "tokens/s"]
    return "\n" + grid(header, lines)


def loops_compiled() -> str:
    names = {
        "decoder": "decoder",
        "lora": "LoRA of the decoder",
        "vit": "ViT-L/16",
        "gpt": "GPT-2 medium, dropout",
        "resnet": "ResNet-152",
    }
    lines, by_hand = [], {}
    for row in _json("loops_h200_compiled"):
        attention = {
            "xla": ", XLA's attention",
            "cudnn": ", cuDNN's",
            "chunks": ", attention in chunks",
        }.get(row.get("attention", ""), "")
        depth = "" if row["model"] == "resnet" else f", {row['layers']} layers"
        length = f", {row['tokens']:,} tokens" if "tokens" in row else ""
        model = f"{names[row['model']]}{attention}{depth}{length} ({row['batch']})"
        model += f", fully sharded over {row['mesh']}" if "mesh" in row else ""
        model += "" if row.get("scanned", True) else ", unrolled"
        if "predicted_gib" not in row:
            by_hand[model, row["way"]] = row["gib"]
            continue
        way = row["way"]
        asked = by_hand.get((model, way[1:]))
        given = f"`{way}`" if asked is None else f"`{way[1:]}`'s, {number(asked)}"
        if way == "lowest":
            beside = (f"`{hand}` {number(by_hand[model, hand])}" for hand in ("checkpoint", "sqrt"))
            given = f"lowest{', nothing moved' if 'allow' in row else ''} ({', '.join(beside)})"
        shares = [f"{row['predicted_gib'] / row['gib']:.3f}", str(row.get("compiles", ""))]
        lines.append([model, given, number(row["gib"]), *shares, f"{row['predicted_ms']:.0f}"])
    header = [
        "model (batch)",
        "budget, GiB",
        "GiB",
        "predicted / compiled",
        "compiles",
        "ms predicted",
    ]
    return "\n" + grid(header, lines)


def cache() -> str:
    lines = [
        [
            f"{row['cache_nbytes'] / row['moved_nbytes']:.0%}",
            f"{row['step_seconds'] / row['keeping_seconds']:.2f}",
            f"{row['hits']:.0f}",
            f"{row['misses']:.0f}",
            number(row["link_nbytes"] / GIB),
        ]
        for row in _json("h200_cache")
    ]
    header = [
        "cache, of what moves",
        "time / nothing moved",
        "hits",
        "misses",
        "over the link, GiB",
    ]
    return "\n" + grid(header, lines)


def zero_values() -> str:
    """The kernels of compression at three densities of the five that were timed."""
    rates = lambda row: [f"{row['bytes_per_second'][k] / 1e9:,.0f}" for k in _KERNELS]
    lines = [
        [f"{row['density']:.2g}", f"{row['compressed_nbytes'] / row['nbytes']:.0%}", *rates(row)]
        for row in _json("h200_zero_values")
        if row["dtype"] == "bfloat16" and row["density"] in (0, 0.5, 1)
    ]
    return "\n" + grid(["density", "of its bytes", *_KERNELS], lines)


_KERNELS = ("compress", "decompress", "copy")


def largest() -> str:
    """The largest batch that compiled to 12 GiB, and the smallest that did not."""
    rows = records.read(RESULTS / "largest_h200_compiled.jsonl")
    lines = []
    for model, variant in dict.fromkeys((row.model, row.variant) for row in rows):
        own = [row for row in rows if (row.model, row.variant) == (model, variant)]
        fits = max((row for row in own if row.outcome == "ok"), key=lambda row: row.batch)
        over = [row for row in own if row.outcome != "ok" and row.batch > fits.batch]
        first = min(over, key=lambda row: row.batch) if over else None
        lines.append(
            [
                model,
                f"`{variant}`",
                f"{fits.batch:,}",
                number((fits.need or 0) / GIB),
                "" if first is None else f"{first.batch:,} {failure(first)}",
            ]
        )
    return "\n" + grid(["network", "variant", "batch", "peak, GiB", "the next"], lines)


def planning() -> str:
    """What finding a plan takes, over the recorded decisions."""
    rows = _json("decisions_h200")
    lines = []
    for name, key in {
        "plans made": "plans",
        "compiles": "compiles",
        "planning, CPU s": "planning_seconds",
        "XLA, CPU s": "compile_seconds",
    }.items():
        values = [row[key] for row in rows if row["outcome"] != "TechniqueError"]
        lines.append([name, f"{statistics.median(values):.3g}", f"{max(values):.3g}"])
    return "\n" + grid([f"of {len(rows)} cases", "median", "largest"], lines)


RESNETS = ("resnet50", "resnet50_float16", "resnet152", "resnet152_float16")

README = {
    "VGG-16 (256)": ("vgg16", 256, "bfloat16", ("50%", "30%")),
    "VGG-116 (32)": ("vgg116", 32, "bfloat16", ("20%",)),
    "ResNet-50 (256)": ("resnet50", 256, "bfloat16", ("33%",)),
    "ResNet-152 (128)": ("resnet152", 128, "bfloat16", ("25%",)),
}
"""The networks of the README: model, batch, dtype, budgets."""


def readme() -> str:
    """Peak and time, relative to plain, of some networks in a budget, and of `jax.checkpoint`."""
    rows, lines = _recomputing(), []
    for name, (model, batch, dtype, budgets) in README.items():
        own = [e for e in rows if (e.row.model, e.row.batch, e.row.dtype) == (model, batch, dtype)]
        [wrapped] = [e for e in own if e.row.variant == "checkpoint"]
        for budget in budgets:
            [fits] = [e for e in own if e.row.variant == "auto" and e.asked == budget]
            other = f"{wrapped.share}, {float(wrapped.ratio):.2f}" if budget == budgets[0] else ""
            lines.append([name, fits.share, f"{float(fits.ratio):.2f}", other])
    for scanned in (True, False):
        own = [r for r in _json("training_steps_h200") if _is_of_the_decoder(r)]
        own = [r for r in own if r["scanned"] is scanned and not r.get("allow")]
        by_way = {r["way"].replace(".0GiB", "GiB"): r for r in own}
        budgeted = [r for r in by_way.values() if "predicted_ms" in r]
        budgeted.sort(key=lambda r: -r["gib"])
        share = lambda r, plain: (f"{r['gib'] / plain['gib']:.0%}", f"{r['of_plain']:.2f}")
        wrapped = ", ".join(share(by_way["checkpoint"], by_way["plain"]))
        for row in budgeted:
            first = row is budgeted[0]
            form = "16 scanned layers" if scanned else "unrolled"
            name = f"decoder, 1.1 B parameters, {form} (8 × 2,048)" if first else "the same"
            lines.append([name, *share(row, by_way["plain"]), wrapped if first else ""])
    header = ["model (batch)", "peak", "time", "`jax.checkpoint`: peak, time"]
    return "\n" + grid(header, lines)


def _json(name: str) -> list[dict[str, Any]]:
    return records.lines(RESULTS / f"{name}.jsonl")


TABLES: dict[str, Callable[[], str]] = {
    made.__name__: made
    for made in (
        recompute,
        training_steps,
        by_hand,
        seven_billion,
        transfers,
        transports,
        cache,
        sub_batches,
        convolutions,
        compression,
        zero_values,
        largest,
        planning,
        readme,
    )
}


def table(name: str) -> str:
    """What stands between the comments of that name."""
    return TABLES[name]() + "\n"


def every_row() -> str:
    """All rows of training steps, by file."""
    more = ("ms", "sub_batches", "divided", "recomputed", "compressed", "moved", "predicted")
    steps = "".join(
        f"\n## {name}.jsonl\n{lines_of(compared(name), *more, 'compiles', 'commit')}"
        for name in STEPS
    )
    timed = "".join(
        f"\n## {name}.jsonl\n{_training_steps(_json(name), *_STEPS)}"
        for name in ("training_steps_h200", "training_steps_h100", "by_hand_h200", "pairs_h200")
    )
    return f"{steps}{timed}\n## loops_h200_compiled.jsonl\n{loops_compiled()}"
