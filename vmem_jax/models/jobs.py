"""Train steps by name: what `vmem-jax train`, `vmem-jax plan` and the benchmarks run."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax

from vmem_jax.models.resnet import ResNet, resnet_blocks
from vmem_jax.models.vgg import VGG, vgg_stages

Batch = tuple[jax.Array, jax.Array]
"""Images f32[n, h, w, c] and labels i32[n]."""

Metrics = dict[str, jax.Array]
"""`loss` (mean softmax cross-entropy, nats) and `accuracy` (0 to 1), each f32[]."""

Optimizer = Literal["sgd", "momentum", "adamw"]
Wrap = Literal["checkpoint"]

LEARNING_RATES: dict[str, float] = {"sgd": 0.01, "momentum": 0.01, "adamw": 0.001}
"""Learning rate of each optimiser where `job` is given none."""

SMALL_IMAGE = 64
"""Largest image, in pixels, for which `job` gives an ImageNet ResNet the 3x3 stem."""


class TrainState(flax.struct.PyTreeNode):
    """What one train step hands to the next.

    Attributes:
      params: parameters.
      batch_stats: batch norm's running statistics in float32; empty without batch norm.
      opt_state: state of the optimiser.
      count: i32[], steps taken.
    """

    params: Any
    batch_stats: Any
    opt_state: Any
    count: jax.Array


@dataclasses.dataclass(frozen=True)
class Job:
    """A train step, with what it needs: `step(state, batch) -> (state, metrics)`.

    Nothing is jitted. The state has the same shapes before and after a step, so argument 0 can be
    donated: `jax.jit(job.step, donate_argnums=0)`. Jit `init` too; run eagerly it computes a
    forward pass that a compiler drops.

    Attributes:
      name: what `job` was called with, such as "vgg16".
      step: (state, batch) -> (state, metrics): one step of training.
      evaluate: (state, batch) -> metrics, with batch norm's running statistics and no update.
      init: key -> state: parameters, batch statistics, optimiser state.
      batch: shapes of the images f32[n, h, w, c] and of the labels i32[n].
      classes: number of classes; labels are below it.
    """

    name: str
    step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    evaluate: Callable[[TrainState, Batch], Metrics]
    init: Callable[[jax.Array], TrainState]
    batch: tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]
    classes: int

    def state_shapes(self) -> TrainState:
        """Returns the state with a `jax.ShapeDtypeStruct` for each array; computes nothing."""
        return jax.eval_shape(self.init, jax.random.key(0))

    def random_batch(self, key: jax.Array) -> Batch:
        """Returns a batch of normally distributed images and uniform labels."""
        image_key, label_key = jax.random.split(key)
        images, labels = self.batch
        return (
            jax.random.normal(image_key, images.shape, images.dtype),
            jax.random.randint(label_key, labels.shape, 0, self.classes, labels.dtype),
        )


def cross_entropy(
    model: nn.Module, params: Any, batch_stats: Any, batch: Batch, train: bool = True
) -> tuple[jax.Array, tuple[Metrics, Any]]:
    """Returns (loss f32[], (metrics, new batch statistics)) of a model on one batch.

    Args:
      model: a `VGG` or `ResNet`.
      params: its parameters.
      batch_stats: its running statistics; an empty dict without batch norm.
      batch: images f32[n, h, w, c] and labels i32[n].
      train: normalise by the batch and update the running statistics.
    """
    images, labels = batch
    variables = {"params": params, "batch_stats": batch_stats}
    if train:
        logits, updated = model.apply(variables, images, train=True, mutable=["batch_stats"])
        batch_stats = updated.get("batch_stats", batch_stats)
    else:
        logits = model.apply(variables, images, train=False)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    accuracy = (logits.argmax(axis=-1) == labels).mean(dtype=jnp.float32)
    return loss, ({"loss": loss, "accuracy": accuracy}, batch_stats)


def build_model(
    name: str,
    *,
    image: int = 224,
    classes: int = 1000,
    dtype: Any = "bfloat16",
    param_dtype: Any = None,
    head_width: int | None = None,
    wrap: Wrap | None = None,
) -> VGG | ResNet:
    """Returns the model of a `job`; the arguments are those of `job`."""
    match = re.fullmatch(r"(vgg|resnet)(\d+)", name)
    if match is None:
        raise ValueError(f"There is no model {name!r}: say vgg or resnet and a depth, as in vgg16.")
    if wrap not in (None, "checkpoint"):
        raise ValueError(f"wrap is None or 'checkpoint', not {wrap!r}.")
    depth = int(match[2])
    dtype = jnp.dtype(dtype)
    param_dtype = dtype if param_dtype is None else jnp.dtype(param_dtype)
    if match[1] == "vgg":
        return VGG(
            stages=vgg_stages(depth),
            classes=classes,
            head_width=4096 if head_width is None else head_width,
            dtype=dtype,
            param_dtype=param_dtype,
            checkpoint=wrap == "checkpoint",
        )
    if head_width is not None:
        raise ValueError(f"{name} has no hidden fully connected layers: head_width is for VGG.")
    form = resnet_blocks(depth)
    return ResNet(
        blocks=form.blocks,
        bottleneck=form.bottleneck,
        classes=classes,
        dtype=dtype,
        param_dtype=param_dtype,
        width=16 if form.cifar else 64,
        cifar_stem=form.cifar or image <= SMALL_IMAGE,
        preactivation=form.cifar,
        checkpoint=wrap == "checkpoint",
    )


def _optimizer(name: str, learning_rate: float | None) -> optax.GradientTransformation:
    if name not in LEARNING_RATES:
        raise ValueError(f"optimizer is one of {', '.join(LEARNING_RATES)}, not {name!r}.")
    rate = LEARNING_RATES[name] if learning_rate is None else learning_rate
    if name == "adamw":
        return optax.adamw(rate)
    return optax.sgd(rate, momentum=0.9 if name == "momentum" else None)


def job(
    name: str,
    *,
    batch: int,
    image: int = 224,
    classes: int = 1000,
    channels: int = 3,
    dtype: Any = "bfloat16",
    param_dtype: Any = None,
    optimizer: Optimizer = "sgd",
    learning_rate: float | None = None,
    head_width: int | None = None,
    wrap: Wrap | None = None,
) -> Job:
    """Returns the train step of a model by name.

    Args:
      name: "vgg" or "resnet" and a depth that `vgg_stages` or `resnet_blocks` takes: "vgg16",
        "vgg116", "resnet50", "resnet1001". An ImageNet ResNet has the 3x3 stem without pooling for
        images up to `SMALL_IMAGE` pixels.
      batch: images in a batch.
      image: height and width of an image, in pixels.
      classes: number of classes.
      channels: channels of an image.
      dtype: type of the computation. Batch norm's statistics, logits and loss are float32.
      param_dtype: type of the parameters, and so of gradients and optimiser state; None is
        `dtype`. "float32" with bfloat16 computation gives float32 master parameters. Batch norm's
        scale and bias are float32 regardless.
      optimizer: "sgd", "momentum" (0.9) or "adamw".
      learning_rate: None takes `LEARNING_RATES[optimizer]`.
      head_width: width of VGG's two hidden fully connected layers; None is 4,096.
      wrap: "checkpoint" wraps each convolution layer of a VGG, or each residual block of a ResNet,
        in `jax.checkpoint`; parameters and their names stay the same.

    Raises:
      ValueError: when there is no such model, optimiser or wrapping, or a size is not positive.
    """
    sizes = {"batch": batch, "image": image, "classes": classes, "channels": channels}
    for what, size in sizes.items():
        if size < 1:
            raise ValueError(f"{what} is 1 or more, not {size}.")
    model = build_model(
        name,
        image=image,
        classes=classes,
        dtype=dtype,
        param_dtype=param_dtype,
        head_width=head_width,
        wrap=wrap,
    )
    transform = _optimizer(optimizer, learning_rate)

    def init(key: jax.Array) -> TrainState:
        variables = model.init(key, jnp.zeros((1, image, image, channels), jnp.float32))
        params = variables["params"]
        return TrainState(
            params=params,
            batch_stats=variables.get("batch_stats", {}),
            opt_state=transform.init(params),
            count=jnp.zeros((), jnp.int32),
        )

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        def loss(params: Any) -> tuple[jax.Array, tuple[Metrics, Any]]:
            return cross_entropy(model, params, state.batch_stats, batch)

        grads, (metrics, batch_stats) = jax.grad(loss, has_aux=True)(state.params)
        updates, opt_state = transform.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, batch_stats, opt_state, state.count + 1), metrics

    def evaluate(state: TrainState, batch: Batch) -> Metrics:
        _, (metrics, _) = cross_entropy(model, state.params, state.batch_stats, batch, train=False)
        return metrics

    return Job(
        name=name,
        step=step,
        evaluate=evaluate,
        init=init,
        batch=(
            jax.ShapeDtypeStruct((batch, image, image, channels), jnp.float32),
            jax.ShapeDtypeStruct((batch,), jnp.int32),
        ),
        classes=classes,
    )
