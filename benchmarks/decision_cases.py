"""The cases of `decisions.py`: train steps, policies and budgets."""

from __future__ import annotations

import dataclasses
from typing import Any

BF16, F32 = "bfloat16", "float32"


@dataclasses.dataclass(frozen=True)
class Case:
    """A train step and what `vmem_jax.jit` is asked for.

    Attributes:
      model, batch, dtype, image, tokens, optimizer: as `vmem_jax.models.job` has them. float32 is
        strict: products have the precision "highest".
      policy: its name.
      asked: the budget in words: a share of what plain jit needs, a size as "12GiB", "device" for
        all its memory, or "minimum" for 1 % more than arguments take, so that the error names
        the policy's minimum.
      options: of the policy.
      allow: techniques that a plan may use; empty for all.
      mesh: the sizes of the axes "data" and "model" of the devices; empty for one device.
      sub_batches: as `vmem_jax.jit` has it.
      small: it is also a test, so it takes seconds.
    """

    model: str
    batch: int
    dtype: str
    policy: str
    asked: str
    options: tuple[tuple[str, Any], ...] = ()
    allow: tuple[str, ...] = ()
    image: int | None = None
    tokens: int = 1024
    optimizer: str = "sgd"
    mesh: tuple[int, ...] = ()
    sub_batches: int | None = None
    small: bool = False

    @property
    def name(self) -> str:
        """What tells this case from all others."""
        options = "&".join(f"{key}={value}" for key, value in self.options)
        policy = f"{self.policy}?{options}" if options else self.policy
        policy += ":" + "+".join(self.allow) if self.allow else ""
        size = "" if self.image is None else f"x{self.image}"
        more = ["" if self.optimizer == "sgd" else self.optimizer]
        more.append("mesh" + "x".join(map(str, self.mesh)) if self.mesh else "")
        more.append(f"sub_batches={self.sub_batches}" if self.sub_batches else "")
        step = " ".join([f"{self.model}:{self.batch}{size}", self.dtype, *filter(None, more)])
        return f"{step} {policy}@{self.asked}"


def _each(step: tuple[str, int, str], *asked: str, policy: str = "auto", **how: Any) -> list[Case]:
    """`step`, a model with its batch and dtype, with each budget of `asked`."""
    return [Case(*step, policy, each, **how) for each in asked]


ALEXNET = "alexnet", 128, BF16
VGG = "vgg16", 64, BF16
OVERFEAT = "overfeat", 64, BF16

MOVING = ("order", "offload")
WITHOUT_MOVING = ("order", "recompute")

CASES: tuple[Case, ...] = (
    # The small ones, of every kind of step and policy.
    *_each(ALEXNET, "0.65", "0.52", small=True),
    *_each(ALEXNET, "minimum", policy="recompute", small=True),
    *_each(ALEXNET, "minimum", policy="vdnn", options=(("offload", "all"),), small=True),
    *_each(ALEXNET, "0.6", allow=MOVING, small=True),
    *_each(ALEXNET, "0.8", mesh=(2, 2), small=True),
    *_each(ALEXNET, "0.85", sub_batches=4, small=True),
    *_each(("alexnet", 128, F32), "0.5", small=True),
    *_each(("resnet11", 64, BF16), "0.75", image=32, small=True),
    *_each(("densenet7k12", 64, BF16), "device", policy="exact", small=True),
    *_each(("gpt1w64", 4, BF16), "0.65", tokens=256, optimizer="adamw", small=True),
    *_each(("resnet1-2-1-1-scan", 8, BF16), "0.95", image=32, small=True),
    # Every network, from budgets that cost nothing to those that nothing meets.
    *_each(VGG, "0.65", "0.5", "0.35", "0.2", "0.1"),
    *_each(VGG, "0.35", allow=WITHOUT_MOVING),
    *_each(VGG, "0.35", allow=MOVING),
    *_each(("vgg16", 64, F32), "0.5", "0.25"),
    *_each(ALEXNET, "0.4"),
    *_each(ALEXNET, "0.55", allow=MOVING),
    *_each(ALEXNET, "0.95", mesh=(4, 1)),
    *_each(OVERFEAT, "0.8", "0.65"),
    *_each(("overfeat", 64, F32), "0.5", policy="superneurons"),
    *_each(("fcn", 8, BF16), "0.65", "0.4"),
    *_each(("resnet20", 64, BF16), "0.5", image=32),
    *_each(("resnet20", 64, F32), "0.65", image=32, optimizer="momentum"),
    *_each(("gpt2w256", 8, BF16), "0.5", "0.2", optimizer="adamw", tokens=512),
    *_each(("gpt2w256", 8, BF16), "0.5", optimizer="adamw", tokens=512, mesh=(2, 2)),
    *_each(("resnet2-2-2-2-scan", 32, BF16), "0.65"),
    # Sizes, so that plain jit need not be compiled: batches as the papers have them in 12 GiB.
    *_each(("alexnet", 3584, F32), "12GiB", allow=("order", "recompute", "offload")),
    *_each(("alexnet", 3584, F32), "12GiB", policy="superneurons"),
    *_each(("vgg16", 256, BF16), "12GiB"),
    *_each(("vgg16", 256, BF16), "12GiB", policy="modnn"),
    *_each(("gpt2w256", 64, BF16), "12GiB", optimizer="adamw"),
    *_each(("resnet50", 384, BF16), "12GiB"),
    *_each(("googlenet", 32, BF16), "500MiB"),
    *_each(("densenet7k12", 64, BF16), "0.95"),
    *_each(("densenet10k12", 64, BF16), "35MiB", policy="recompute"),
    *_each(("inception4", 8, BF16), "550MiB"),
    *_each(("resnet50", 256, BF16), "2400MiB"),  # a fifth of what plain jit needs
    # The minimum of each policy, and how the papers' systems run without a budget.
    *_each(ALEXNET, "minimum"),
    *_each(ALEXNET, "minimum", policy="exact"),
    *_each(ALEXNET, "minimum", policy="keep"),
    *_each(ALEXNET, "minimum", policy="modnn"),
    *_each(ALEXNET, "minimum", policy="superneurons"),
    *_each(ALEXNET, "minimum", policy="ucudnn"),
    *_each(ALEXNET, "minimum", policy="vdnnpp"),
    *_each(VGG, "minimum"),
    *_each(VGG, "minimum", policy="modnn"),
    *_each(VGG, "minimum", policy="superneurons"),
    *_each(VGG, "minimum", policy="recompute"),
    *_each(VGG, "device", policy="exact"),
    *_each(VGG, "device", policy="vdnn", options=(("offload", "conv"),)),
    *_each(VGG, "device", policy="vdnnpp"),
)
"""In the order in which they run; each has a name of its own."""
