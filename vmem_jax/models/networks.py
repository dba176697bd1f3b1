"""Networks by name, with the shapes of what they take."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp

from vmem_jax.models.alexnet import ALEXNET, OVERFEAT, AlexNet
from vmem_jax.models.densenet import DenseNet, dense_layers
from vmem_jax.models.fcn import FCN
from vmem_jax.models.googlenet import GoogLeNet
from vmem_jax.models.gpt import GPT
from vmem_jax.models.inception import InceptionV4
from vmem_jax.models.mobilenet import MobileNetV2
from vmem_jax.models.resnet import ResNet, ResNetBlocks, resnet_blocks
from vmem_jax.models.scanned_resnet import ScannedResNet
from vmem_jax.models.swin import Swin
from vmem_jax.models.vgg import VGG, vgg_stages
from vmem_jax.models.vit import ViT

Wrap = Literal["checkpoint", "dots", "every_dot", "offload"]

_SAVED = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "every_dot": jax.checkpoint_policies.dots_saveable,
}
"""What `jax.checkpoint` saves by these wrappings; by "checkpoint" nothing."""

SMALL_IMAGE = 64
"""Largest image, in pixels, for which an ImageNet ResNet has the 3x3 stem."""


@dataclasses.dataclass(frozen=True)
class Network:
    """A model, and what it is trained on.

    Attributes:
      model: of Flax Linen, called with inputs and `train`.
      inputs: images f32[n, h, w, c], or tokens i32[n, t].
      labels: i32[n], or one for each pixel or token.
      classes: number of classes; labels are below it.
    """

    model: nn.Module
    inputs: jax.ShapeDtypeStruct
    labels: jax.ShapeDtypeStruct
    classes: int

    @property
    def drops(self) -> bool:
        """Whether training needs a key for dropout."""
        return getattr(self.model, "dropout", 0.0) > 0


@dataclasses.dataclass(frozen=True)
class _Family:
    """Models that differ in the numbers of their names alone.

    Attributes:
      make: (match of the name, options) -> model.
      classes, image: where nothing else is said.
      takes: the options that only some families have.
      labels: "image", "pixel" or "token": what has one.
    """

    make: Callable[[re.Match[str], dict[str, Any]], nn.Module]
    classes: int = 1000
    image: int = 224
    takes: tuple[str, ...] = ()
    labels: str = "image"


def _types(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in ("classes", "dtype", "param_dtype", "checkpoint")}


def _vgg(name: re.Match[str], options: dict[str, Any]) -> VGG:
    stages, width = vgg_stages(int(name[1])), options["head_width"]
    return VGG(stages, head_width=4096 if width is None else width, **_types(options))


def _resnet(name: re.Match[str], options: dict[str, Any]) -> ResNet:
    numbers = tuple(int(n) for n in name.groups())
    stages = ResNetBlocks(numbers, bottleneck=True, cifar=False)
    form = stages if len(numbers) > 1 else resnet_blocks(*numbers)
    return ResNet(
        blocks=form.blocks,
        bottleneck=form.bottleneck,
        width=16 if form.cifar else 64,
        cifar_stem=form.cifar or options["image"] <= SMALL_IMAGE,
        preactivation=form.cifar,
        **_types(options),
    )


def _scanned_resnet(name: re.Match[str], options: dict[str, Any]) -> ScannedResNet:
    types = {key: value for key, value in _types(options).items() if key != "checkpoint"}
    small = options["image"] <= SMALL_IMAGE
    return ScannedResNet(tuple(int(n) for n in name.groups()), cifar_stem=small, **types)


def _densenet(name: re.Match[str], options: dict[str, Any]) -> DenseNet:
    return DenseNet(dense_layers(int(name[1])), growth=int(name[2] or 12), **_types(options))


def _gpt(name: re.Match[str], options: dict[str, Any]) -> GPT:
    layers, width = int(name[1]), int(name[2] or 768)
    if width % 64:
        raise ValueError(f"heads are 64 wide, so the width is a multiple of 64, not {width}.")
    types = {**_types(options), "policy": options["policy"]}
    return GPT(layers, width, context=options["tokens"], **types)


def _vit(name: re.Match[str], options: dict[str, Any]) -> ViT:
    layers, width, image = int(name[1]), int(name[2] or 768), options["image"]
    if width % 64:
        raise ValueError(f"heads are 64 wide, so the width is a multiple of 64, not {width}.")
    if image % 16:
        raise ValueError(f"patches are 16 by 16, so the image is a multiple of 16, not {image}.")
    return ViT(layers, width, **_types(options), policy=options["policy"])


FAMILIES: dict[str, _Family] = {
    r"vgg(\d+)": _Family(_vgg, takes=("head_width",)),
    r"resnet(\d+)": _Family(_resnet),
    r"resnet([1-9]\d*)-([1-9]\d*)-([1-9]\d*)-([1-9]\d*)": _Family(_resnet),
    r"resnet([1-9]\d*)-([1-9]\d*)-([1-9]\d*)-([1-9]\d*)-scan": _Family(_scanned_resnet),
    "alexnet": _Family(lambda _, o: AlexNet(ALEXNET, (4096, 4096), **_types(o))),
    "overfeat": _Family(lambda _, o: AlexNet(OVERFEAT, (3072, 4096), **_types(o)), image=231),
    "googlenet": _Family(lambda _, o: GoogLeNet(**_types(o))),
    "mobilenet2": _Family(lambda _, o: MobileNetV2(**_types(o))),
    "swin([tsb])": _Family(lambda name, o: Swin(name[1], **_types(o))),
    "inception4": _Family(lambda _, o: InceptionV4(**_types(o)), image=299),
    r"densenet(\d+)(?:k(\d+))?": _Family(_densenet, classes=10, image=32),
    "fcn": _Family(lambda _, o: FCN(**_types(o)), classes=21, labels="pixel"),
    r"gpt(\d+)(?:w(\d+))?": _Family(_gpt, classes=50257, takes=("policy",), labels="token"),
    r"vit(\d+)(?:w(\d+))?": _Family(_vit, takes=("policy",)),
}
"""By the pattern of their names."""

EXAMPLES = (
    "vgg16, resnet50, alexnet, overfeat, googlenet, inception4, mobilenet2, densenet40k12, fcn, "
    "gpt12w768, vit12w768, swint"
)


def build_network(
    name: str,
    *,
    batch: int,
    image: int | None = None,
    classes: int | None = None,
    channels: int = 3,
    tokens: int = 1024,
    dtype: Any = "bfloat16",
    param_dtype: Any = None,
    head_width: int | None = None,
    wrap: Wrap | None = None,
) -> Network:
    """Returns a network by name.

    Args:
      name: "vgg" or "resnet" and a depth that `vgg_stages` or `resnet_blocks` takes ("vgg116",
        "resnet1001"), or "resnet" and the bottleneck blocks of each of four stages, of the ImageNet
        form ("resnet6-32-596-6", as SuperNeurons goes deeper), and "-scan" behind them for the
        identical blocks of a stage in a loop, each checkpointed; "alexnet", "overfeat", "googlenet",
        "inception4", "mobilenet2", "swint", "swins", "swinb"; "densenet" and a depth, then "k" and
        the growth ("densenet40k40"); "fcn", with a label for each pixel; "gpt" and the number of
        blocks, then "w" and the width ("gpt12w768"), with a label for each token; "vit" likewise
        ("vit24w1024" is ViT-L/16), with a label for each image. An ImageNet ResNet has the 3x3 stem
        without pooling for images up to
        `SMALL_IMAGE` pixels.
      batch: images, or sequences, in a batch.
      image: height and width of an image, in pixels; by default as published.
      classes: number of classes, or of different tokens; by default as published.
      channels: of an image.
      tokens: in a sequence.
      dtype: type of the computation. Statistics of norms, logits and loss are float32.
      param_dtype: type of the parameters, and so of gradients and optimiser state; None is
        `dtype`. "float32" with bfloat16 computation gives float32 master parameters. Scale and bias
        of norms are float32 regardless.
      head_width: width of VGG's two hidden fully connected layers; None is 4,096.
      wrap: "checkpoint" wraps each convolution layer, or each block, in `jax.checkpoint`; parameters
        and their names stay the same. "dots" and "every_dot" wrap each block of a transformer so, and
        save the results of its matrix products, those without batch dimensions or all. "offload" is
        for `job`; the model is the same.

    Raises:
      ValueError: when there is no such model or wrapping, or a size is not positive.
    """
    found = [(m, f) for pattern, f in FAMILIES.items() if (m := re.fullmatch(pattern, name))]
    if not found:
        raise ValueError(f"There is no model {name!r}. There are, for instance, {EXAMPLES}.")
    [(match, family)] = found
    if wrap not in (None, *get_args(Wrap)):
        names = ", ".join(map(repr, get_args(Wrap)))
        raise ValueError(f"wrap is None or one of {names}, not {wrap!r}.")
    if wrap in _SAVED and "policy" not in family.takes:
        raise ValueError(f"wrap={wrap!r} is for transformers, and {name} is none.")
    if head_width is not None and "head_width" not in family.takes:
        raise ValueError(f"{name} has no hidden fully connected layers: head_width is for VGG.")
    image = family.image if image is None else image
    classes = family.classes if classes is None else classes
    sizes = {"batch": batch, "image": image, "classes": classes, "channels": channels}
    for what, size in (sizes | {"tokens": tokens}).items():
        if size < 1:
            raise ValueError(f"{what} is 1 or more, not {size}.")
    dtype = jnp.dtype(dtype)
    options = {
        "classes": classes,
        "image": image,
        "tokens": tokens,
        "dtype": dtype,
        "param_dtype": dtype if param_dtype is None else jnp.dtype(param_dtype),
        "head_width": head_width,
        "checkpoint": wrap == "checkpoint" or wrap in _SAVED,
        "policy": _SAVED.get(wrap or ""),
    }
    model = family.make(match, options)
    images = jax.ShapeDtypeStruct((batch, image, image, channels), jnp.float32)
    words = jax.ShapeDtypeStruct((batch, tokens), jnp.int32)
    inputs, labels = {
        "image": (images, jax.ShapeDtypeStruct((batch,), jnp.int32)),
        "pixel": (images, jax.ShapeDtypeStruct((batch, image, image), jnp.int32)),
        "token": (words, words),
    }[family.labels]
    return Network(model, inputs, labels, classes)
