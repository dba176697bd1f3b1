"""Train steps by name: what `vmem-jax train`, `vmem-jax plan` and the benchmarks run."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax

from vmem_jax.models.networks import Wrap, build_network
from vmem_jax.models.stock_offload import with_stock_offload

Batch = tuple[jax.Array, jax.Array]
"""Images f32[n, h, w, c] and labels i32[n], or i32[n, h, w] where each pixel has one; or tokens
i32[n, t] and those that follow them."""

Metrics = dict[str, jax.Array]
"""`loss` (mean softmax cross-entropy, nats) and `accuracy` (0 to 1), each f32[]."""

Optimizer = Literal["sgd", "momentum", "adamw"]
LEARNING_RATES: dict[str, float] = {"sgd": 0.01, "momentum": 0.01, "adamw": 0.001}
"""Learning rate of each optimiser where `job` is given none."""


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
      batch: shapes of a `Batch`.
      classes: number of classes; labels, and tokens, are below it.
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
        """Returns a batch of normally distributed images, or uniform tokens, and uniform labels."""
        input_key, label_key = jax.random.split(key)
        inputs, labels = self.batch
        uniform = lambda key, like: jax.random.randint(key, like.shape, 0, self.classes, like.dtype)
        if inputs.dtype == jnp.int32:
            return uniform(input_key, inputs), uniform(label_key, labels)
        return jax.random.normal(input_key, inputs.shape), uniform(label_key, labels)


def cross_entropy(
    model: nn.Module,
    params: Any,
    batch_stats: Any,
    batch: Batch,
    train: bool = True,
    key: jax.Array | None = None,
) -> tuple[jax.Array, tuple[Metrics, Any]]:
    """Returns (loss f32[], (metrics, new batch statistics)) of a model on one batch.

    Args:
      model: one of `build_network`.
      params: its parameters.
      batch_stats: its running statistics; an empty dict without batch norm.
      batch: as the model has it.
      train: normalise by the batch and update the running statistics.
      key: of what dropout drops, where the model has it.
    """
    inputs, labels = batch
    variables = {"params": params, "batch_stats": batch_stats}
    if train:
        rngs = None if key is None else {"dropout": key}
        logits, updated = model.apply(
            variables, inputs, train=True, mutable=["batch_stats"], rngs=rngs
        )
        batch_stats = updated.get("batch_stats", batch_stats)
    else:
        logits = model.apply(variables, inputs, train=False)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    accuracy = (logits.argmax(axis=-1) == labels).mean(dtype=jnp.float32)
    return loss, ({"loss": loss, "accuracy": accuracy}, batch_stats)


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
    optimizer: Optimizer = "sgd",
    learning_rate: float | None = None,
    wrap: Wrap | None = None,
    **options: Any,
) -> Job:
    """Returns the train step of a model by name.

    Args:
      name: of a model, as `build_network` has it.
      batch: images, or sequences, in a batch.
      optimizer: "sgd", "momentum" (0.9) or "adamw".
      learning_rate: None takes `LEARNING_RATES[optimizer]`.
      wrap: as `build_network` has it; "offload" leaves the inputs of layers in pinned host memory,
        by JAX's own offloading (`with_stock_offload`).
      options: all others of `build_network`.

    Raises:
      ValueError: when there is no such model, optimiser or wrapping, or a size is not positive.
    """
    network = build_network(name, batch=batch, wrap=wrap, **options)
    model, transform = network.model, _optimizer(optimizer, learning_rate)

    def init(key: jax.Array) -> TrainState:
        first = jnp.zeros((1, *network.inputs.shape[1:]), network.inputs.dtype)
        variables = model.init(key, first, train=False)
        params = variables["params"]
        return TrainState(
            params=params,
            batch_stats=variables.get("batch_stats", {}),
            opt_state=transform.init(params),
            count=jnp.zeros((), jnp.int32),
        )

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = None
        if network.drops:
            key = jax.random.fold_in(jax.random.key(0), state.count)

        def loss(params: Any) -> tuple[jax.Array, tuple[Metrics, Any]]:
            return cross_entropy(model, params, state.batch_stats, batch, key=key)

        loss_of = with_stock_offload(loss) if wrap == "offload" else loss
        grads, (metrics, batch_stats) = jax.grad(loss_of, has_aux=True)(state.params)
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
        batch=(network.inputs, network.labels),
        classes=network.classes,
    )
