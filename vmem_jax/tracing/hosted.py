"""hosted: state that lies in host memory between steps.

The user puts leaves of the state (Adam's moments, say) into pinned host memory, by their sharding.
The step is traced as if they were on the device. A plan streams them, and returns their successors in
host memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from vmem_jax import jax_compat as compat
from vmem_jax.capture import Captured
from vmem_jax.errors import show_nbytes
from vmem_jax.jax_compat import Var

PINNED = "pinned_host"


def is_hosted(aval: jax.ShapeDtypeStruct) -> bool:
    """Whether an argument lies in pinned host memory, by its sharding."""
    return getattr(aval.sharding, "memory_kind", None) == PINNED


def is_hosted_tracer(x: Any) -> bool:
    """Whether a traced value is one in host memory."""
    return getattr(x.aval, "memory_space", None) == jax.memory.Space.Host


def on_device(aval: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The same argument in device memory."""
    if not is_hosted(aval):
        return aval
    return jax.ShapeDtypeStruct(
        aval.shape,
        aval.dtype,
        sharding=aval.sharding.with_memory_kind("device"),
        weak_type=aval.weak_type,
    )


def committed(avals: tuple[jax.ShapeDtypeStruct, ...]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """`avals`, where one device has some of them in host memory, all on that device.

    The results of such a step are committed to it, and come back as arguments.
    """
    given = next((a.sharding for a in avals if is_hosted(a)), None)
    if given is None or given.num_devices > 1:
        return avals
    here = given.with_memory_kind("device")
    return tuple(
        a
        if a.sharding is not None
        else jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here, weak_type=a.weak_type)
        for a in avals
    )


def pairs(
    avals: Sequence[jax.ShapeDtypeStruct],
    paths: Sequence[tuple],
    out_avals: Sequence[Any],
    out_paths: Sequence[tuple],
) -> tuple[tuple[int, int | None], ...]:
    """For each hosted argument, its index and that of the result that replaces it, if any.

    It is a result of the same shape and dtype whose path in its tree has the same end:
    `state.opt_state[0].mu['w']` returns as `[0].opt_state[0].mu['w']`. The longest common ends of all
    arguments are matched first, equal ones in order. If no end is common, only an argument that is
    not a tree is matched, in order.

    Args:
      paths: the path of each argument within its tree.
      out_paths: the path of each result.
    """
    partner: dict[int, int] = {}
    taken: set[int] = set()
    for length in range(max(map(len, paths), default=0), -1, -1):
        free: dict[Any, list[int]] = {}
        for o, (out, path) in enumerate(zip(out_avals, out_paths, strict=True)):
            if o not in taken and len(path) >= length:
                key = (out.shape, out.dtype, path[len(path) - length :])
                free.setdefault(key, []).append(o)
        for i, (aval, path) in enumerate(zip(avals, paths, strict=True)):
            fitting = free.get((aval.shape, aval.dtype, path[len(path) - length :]))
            if i not in partner and fitting and len(path) >= length and (length or not path):
                partner[i] = fitting.pop(0)
                taken.add(partner[i])
    return tuple((i, partner.get(i)) for i, aval in enumerate(avals) if is_hosted(aval))


def check(
    name: str,
    names: Sequence[str],
    avals: Sequence[jax.ShapeDtypeStruct],
    donated: Sequence[bool],
    hosted: Sequence[tuple[int, int | None]],
    *,
    allowed: bool,
) -> None:
    """Checks that a step may stream its hosted arguments.

    Raises:
      ValueError: `allow` lacks "stream"; or one is donated and nothing replaces it.
    """
    if not hosted:
        return
    largest = max((i for i, _ in hosted), key=lambda i: _nbytes(avals[i]))
    total = sum(_nbytes(avals[i]) for i, _ in hosted)
    what = (
        f"{len(hosted)} of the arguments of `{name}` lie in pinned host memory, "
        f"{show_nbytes(total)} in all; the largest is `{names[largest]}`, "
        f"{show_nbytes(_nbytes(avals[largest]))}"
    )
    if not allowed:
        raise ValueError(
            f"{what}. To have them come and go while other work runs, put 'stream' into `allow`: "
            "allow=('order', 'recompute', 'offload', 'stream'). To have them on the device, "
            "jax.device_put(x, x.sharding.with_memory_kind('device')) before the step."
        )
    lost = [i for i, o in hosted if o is None and donated[i]]
    if lost:
        raise ValueError(
            f"`{names[lost[0]]}` lies in pinned host memory and is donated, but `{name}` returns "
            "nothing of its shape and dtype at its path in the tree, so nothing could be returned "
            "there. Return the state as the tree that it came as, or do not donate it."
        )


def _nbytes(aval: jax.ShapeDtypeStruct) -> int:
    return aval.size * aval.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Donations:
    """The pairs of donated arguments and results of a step, and an order that makes JAX pair them so.

    `jax.jit` pairs donated arguments with results of the same shape and dtype, first with first, in
    whatever memory they are. An argument in host memory must not be paired with a result on the
    device. In this order the donated arguments come first, in the order of their results.
    """

    arguments: tuple[int, ...]
    results: tuple[int, ...]
    count: int

    @classmethod
    def of(cls, given: Sequence[tuple[int, int]], arguments: int, results: int) -> Donations:
        """For `given` pairs (argument, result) of so many arguments and results."""
        first = [i for i, _ in given], [o for _, o in given]
        rest = lambda taken, n: [i for i in range(n) if i not in set(taken)]
        return cls(
            (*first[0], *rest(first[0], arguments)),
            (*first[1], *rest(first[1], results)),
            len(given),
        )


def donations(
    captured: Captured, donated: Sequence[bool], hosted: Sequence[tuple[int, int | None]]
) -> Donations:
    """Of a captured step: those on the device as its Program has them, and those in host memory."""
    opened = compat.open_jaxpr(captured.flat)
    index_of = {v: o for o, v in reversed([*enumerate(opened.outvars)]) if isinstance(v, Var)}
    given = [(i, index_of[captured.variables[o]]) for i, o in captured.program.aliases]
    taken = {o for _, o in given}
    given += [(i, o) for i, o in hosted if o is not None and donated[i] and o not in taken]
    return Donations.of(given, len(opened.invars), len(opened.outvars))


def compile_reordered(
    flat: Callable,
    avals: Sequence[jax.ShapeDtypeStruct],
    order: Donations,
    hosted: Sequence[tuple[int, int | None]],
    name: str,
    options: dict[str, Any],
    absent: bool,
    sliced: Collection[int] = (),
) -> Reordered:
    """`flat`, a function of leaves to leaves, compiled with the donations of `order`.

    Args:
      hosted: as `pairs` gives them.
      absent: for a card that is not there.
      sliced: arguments that `flat` takes where they lie.
    """
    there = {i for i, _ in hosted}
    only_read = all(o is None for _, o in hosted)

    def step(*leaves: Any) -> list[Any]:
        given: list[Any] = [None] * len(leaves)
        for i, leaf in zip(order.arguments, leaves, strict=True):
            given[i] = leaf
        # JAX traces arguments as if they were on the device, and leaves out every copy between
        # memories of a step that mentions the device's alone
        for i in sliced or ([min(there)] if absent and only_read else []):
            given[i] = jax.device_put(given[i], jax.memory.Space.Host)
        outs = flat(*given)
        return [outs[o] for o in order.results]

    step.__name__ = step.__qualname__ = name
    jitted = jax.jit(step, keep_unused=True, donate_argnums=range(order.count))
    lowered = compat.lower(jitted, *(avals[i] for i in order.arguments))
    if absent:
        kinds = [PINNED if i in there else "device" for i in order.arguments]
        compat.say_memory_kinds(lowered, kinds)
    return Reordered(lowered.compile(compiler_options=options or None), order)


class Reordered:
    """A compiled step whose arguments and results stand in the order of its donations."""

    def __init__(self, compiled: Any, donations: Donations) -> None:
        self.compiled, self._donations = compiled, donations

    def __call__(self, *leaves: Any) -> list[Any]:
        found = self.compiled(*(leaves[i] for i in self._donations.arguments))
        outs: list[Any] = [None] * len(found)
        for o, out in zip(self._donations.results, found, strict=True):
            outs[o] = out
        return outs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiled, name)
