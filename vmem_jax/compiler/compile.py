"""compile: compiles a step's jaxpr as `jax.jit` would, for its devices or for a target."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from vmem_jax import jax_compat as compat
from vmem_jax.capture.primitives import has, nbytes
from vmem_jax.capture.product_workspaces import Products, products_on
from vmem_jax.compiler import places
from vmem_jax.compiler.recorded import Recorded
from vmem_jax.compiler.views import may_write_over_views
from vmem_jax.devices.device import devices_of, processors
from vmem_jax.errors import CompileError
from vmem_jax.jax_compat import ClosedJaxpr
from vmem_jax.logs import warn_once
from vmem_jax.tracing import arguments, hosted
from vmem_jax.tracing.traced import TracedStep

LONG = 20_000
"""From so many steps on, XLA's passes that take quadratic time are disabled."""

LARGE_NBYTES = 2**31
"""From so many bytes of arguments on, products are cuBLAS's for a card that is only described. Its
workspace of 32 MiB is at most a sixty-fourth of them; beside less it could be the peak, though a card
may choose another kernel for small products."""

_PASSES = "xla_disable_hlo_passes"


def with_ours(
    given: Mapping[str, Any],
    platform: str,
    steps: int,
    described: bool = False,
    fenced: bool = True,
    large: bool = False,
    sized: bool = False,
    streams: bool = False,
) -> dict[str, Any]:
    """The compiler options of a program of so many steps: ours, overridden by the user's. The passes
    that either disables are disabled.

    Args:
      described: whether no device times kernels: it is only described, or it could time none.
      fenced: whether it has our barriers; if not, it is compiled as by plain `jax.jit`.
      large: whether its arguments take `LARGE_NBYTES`.
      sized: whether only its memory is asked for.
      streams: whether some of its arguments are in host memory.
    """
    ours = [compat.FENCE_OPTIONS.get(platform, {})] if fenced else []
    if streams:
        ours.append(compat.STREAM_OPTIONS.get(platform, {}))
        if not is_chosen([compat.GRAPHS], given):
            ours.append(compat.STREAM_GRAPH_OPTIONS.get(platform, {}))
    if described:
        ours.append(compat.DESCRIBED_OPTIONS.get(platform, {}))
        if large:
            ours.append(compat.DESCRIBED_LARGE_OPTIONS.get(platform, {}))
    if sized:
        ours.append(compat.SIZED_OPTIONS.get(platform, {}))
    if steps > LONG:
        ours.append(compat.LONG_OPTIONS.get(platform, {}))
    return _merged(*ours, given)


def _merged(*every: Mapping[str, Any]) -> dict[str, Any]:
    """The options of all: of one name the last one's, but the passes that any of them disables."""
    passes = [options[_PASSES] for options in every if options.get(_PASSES)]
    merged = {name: value for options in every for name, value in options.items()}
    return {**merged, _PASSES: ",".join(passes)} if passes else merged


def products_of(avals: Sequence[jax.ShapeDtypeStruct], target: str | None) -> Products:
    """How XLA computes the products of a step of these arguments."""
    large = _are_large(avals)
    return products_on(*processors(avals, target), is_there=target is None, large=large)


def _are_large(avals: Iterable[jax.ShapeDtypeStruct]) -> bool:
    return sum(map(nbytes, avals)) >= LARGE_NBYTES


def is_chosen(options: Iterable[str], given: Container[str]) -> bool:
    """Whether the user sets one of `options`, in XLA_FLAGS or, `given`, for this step."""
    flags = os.environ.get("XLA_FLAGS", "")
    return any(name in flags or name in given for name in options)


def recording(given: Mapping[str, Any], platform: str) -> dict[str, Any]:
    """The further compiler options that have convolutions in CUDA graphs; none where the user says
    what these hold."""
    options = compat.GRAPH_OPTIONS.get(platform, {})
    return {} if is_chosen(options, given) else dict(options)


def left_out(platform: str, steps: int) -> str:
    """The compiler passes that are disabled for a program of so many steps, for people; "" for
    none."""
    passes = compat.LONG_OPTIONS.get(platform, {}).get(_PASSES, "")
    if not passes or steps <= LONG:
        return ""
    return (
        f"XLA's pass {passes} is left out, which for {steps:,} steps takes longer than all others "
        "together; kernels that read the same values may run one by one"
    )


def compile_jaxpr(
    traced: TracedStep,
    jaxpr: ClosedJaxpr,
    target: str | None,
    *,
    name: str,
    sig: arguments.Signature,
    options: Mapping[str, Any],
    streams: bool = False,
    sized: bool = False,
) -> Any:
    """Compiles `jaxpr`, a form of the step `traced`.

    Args:
      target: the name of a card to compile for; None for the devices of the arguments.
      name: the name of the step.
      options: the user's compiler options.
      streams: whether hosted arguments are in host memory; if not, all are on the device.
      sized: whether only its memory is asked for; it may run slowly.

    Raises:
      CompileError: XLA cannot compile `jaxpr`, or compiles it to something else (`compiler.views`),
        and it is not the user's own program (`traced.plain`).
        Errors of that program, or of the user's `options`, are raised unchanged.
    """
    described, platform = target is not None, devices_of(traced.avals)[0].platform
    checked = jaxpr is not traced.plain and not described and platform in compat.OVERWRITES_VIEWS

    def compiled(described: bool) -> Any:
        given = traced, jaxpr, target, name, sig, options, streams, sized, described
        made = _compiled(*given)
        if checked and may_write_over_views(made.as_text()):
            raise CompileError(name=name, message="it lets a kernel write over what it still reads")
        return made

    words = compat.NOT_CONFIGURED if described else compat.NOT_TIMED
    try:
        try:
            return compiled(described)
        except jax.errors.JaxRuntimeError as error:
            if not any(each in str(error) for each in words):
                raise
        return compiled(not described)
    except jax.errors.JaxRuntimeError as error:
        if jaxpr is traced.plain or any(option in str(error) for option in options):
            raise
        raise CompileError(name=name, message=str(error)) from error


def _compiled(
    traced: TracedStep,
    jaxpr: ClosedJaxpr,
    target: str | None,
    name: str,
    sig: arguments.Signature,
    given: Mapping[str, Any],
    streams: bool,
    sized: bool,
    described: bool,
) -> Any:
    avals = traced.avals if streams else tuple(map(hosted.on_device, traced.avals))
    if target is not None:
        from vmem_jax.devices.targets import target as card

        avals = tuple(
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding, weak_type=a.weak_type)
            for a, sharding in zip(
                avals, card(target).shardings([a.sharding for a in avals]), strict=True
            )
        )
    flat = jaxpr_as_fun(jaxpr)
    steps = len(traced.captured.program.steps)
    platform, fenced = devices_of(avals)[0].platform, jaxpr is not traced.plain
    large = _are_large(avals)
    streams = streams and bool(traced.hosted)
    options = with_ours(given, platform, steps, described, fenced, large, sized, streams)
    make: Callable[[dict[str, Any]], Any]
    if streams:
        donations = hosted.donations(traced.captured, traced.donated, traced.hosted)
        sliced, absent = traced.captured.sliced, target is not None
        ordered = flat, avals, donations, traced.hosted, name
        make = lambda options: hosted.compile_reordered(*ordered, options, absent, sliced)
    else:
        lowered = _lowered(traced, flat, avals, name, sig)
        make = lambda options: lowered.compile(compiler_options=options or None)
    made, loops = make(options), has(jaxpr, "scan") or has(jaxpr, "while")
    if loops and fenced and platform == "gpu" and not places.are_right(made.as_text()):
        warn_once(
            name,
            "XLA would copy wrong slices of arrays in its loops. Kernels read and write them, which "
            f"takes longer: the step is compiled with {compat.PLACES_OPTIONS}.",
        )
        options = _merged(options, compat.PLACES_OPTIONS)
        made = make(options)
    graphs = recording(given, platform)
    alone = streams or target is not None or not fenced
    if not graphs or alone or not has(jaxpr, "conv_general_dilated"):
        return made
    return Recorded(made, lambda: make({**options, **graphs}))


def _lowered(
    traced: TracedStep,
    flat: Any,
    avals: Sequence[jax.ShapeDtypeStruct],
    name: str,
    sig: arguments.Signature,
) -> Any:
    """`flat`, a function of leaves to leaves, as a function of the step's arguments, lowered."""
    donate: dict[str, Any]
    args: Any = avals
    kwargs: Any = {}
    if traced.whole is None:
        donate = {"donate_argnums": [i for i, gives in enumerate(traced.donated) if gives]}
    else:
        args, kwargs = jax.tree.unflatten(traced.whole, avals)
        donate = {
            "donate_argnums": [i for i in sorted(sig.donate_nums) if i < len(args)],
            "donate_argnames": [k for k in sorted(sig.donate_names) if k in kwargs],
        }

    def step(*args: Any, **kwargs: Any) -> Any:
        outs = flat(*jax.tree.leaves((args, kwargs)))
        return outs if traced.whole is None else jax.tree.unflatten(traced.out_tree, outs)

    step.__name__ = step.__qualname__ = name
    return compat.lower(jax.jit(step, keep_unused=True, **donate), *args, **kwargs)
