"""shards: how XLA splits each value of a flat jaxpr over devices, predicted from the arguments.

XLA's partitioner decides while it compiles, but a plan is needed before. So the usual cases are
propagated here, dimension by dimension: the mesh axes that split a batch or a weight go through
elementwise operations, products, convolutions, reductions and loops, and from a result back to what
is made for it alone (random bits, zeros). A value without a rule counts as whole, so the prediction
is never too small. A product whose operand is split by an axis that the result cannot have, as in
fully sharded data parallelism, gathers that operand first: its workspace.

Transfers move shard by shard, and their calls state how a value is split. If the partitioner would
have split it otherwise, that costs a collective. So only values whose split is *certain* are moved:
it follows from the arguments through equations whose rule the partitioner shares, without an axis
lost; or the value is computed elementwise from such values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from vmem_jax import jax_compat as compat
from vmem_jax.capture.flatten import inline
from vmem_jax.capture.primitives import Class, class_of, inner_jaxprs, nbytes
from vmem_jax.capture.shard_rules import (
    RULES,
    WHOLE,
    Rule,
    Split,
    aligned,
    axes_at,
    contracted_dims,
    origins,
    rank_of,
)
from vmem_jax.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Var


@dataclasses.dataclass(frozen=True)
class Shards:
    """How a step is split over its devices.

    Attributes:
      sizes: the number of devices along each mesh axis.
      splits: the split of every value that is not whole.
      certain: values whose split is certain, whole ones included.
      device_count: the number of devices of the step.
      mesh: the mesh that all arguments on several devices share; None for one device or several
      meshes.
    """

    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    splits: Mapping[Var, Split] = dataclasses.field(default_factory=dict)
    certain: Collection[Var] = frozenset()
    device_count: int = 1
    mesh: jax.sharding.AbstractMesh | None = None

    def count(self, v: Any) -> int:
        """Over how many devices `v` is split."""
        if not self.splits:
            return 1
        return self._parts(self._axes(v))

    def work(self, eqn: JaxprEqn) -> int:
        """Over how many devices the arithmetic of `eqn` is split, contracted dimensions included."""
        if not self.splits:
            return 1
        return self._parts(set().union(*map(self._axes, eqn.outvars[:1]), *self._summing(eqn)))

    def gathered(self, eqn: JaxprEqn) -> list[Var]:
        """Operands of a product that its devices have to hold whole for it."""
        if not (summing := self._summing(eqn)):
            return []
        result, places = self._of(eqn.outvars[0]), origins(eqn)
        used, found = self._axes(eqn.outvars[0]), []
        partial = summing[0].intersection(*summing)
        for side, (atom, axes) in enumerate(zip(eqn.invars, summing, strict=False)):
            split, summed = self._of(atom), axes - partial
            here = {d: axes_at(result, r) for r, (own, d) in enumerate(places) if own == side}
            lost = {a for d, axes in here.items() for a in axes_at(split, d) if a not in axes}
            if isinstance(atom, Var) and (summed | lost) & used:
                found.append(atom)
        return found

    def summed(self, eqn: JaxprEqn) -> int:
        """Over how many devices the partial sums of a product are spread."""
        if not (summing := self._summing(eqn)):
            return 1
        elsewhere = self._axes(eqn.outvars[0]) - summing[0].intersection(*summing)
        return self._parts(set().union(*summing) - elsewhere)

    def scattered_nbytes(self, eqn: JaxprEqn) -> int:
        """Bytes that a device has of a product before the devices' sums are added and each keeps its
        shard; 0 of a product whose sums are not scattered."""
        if not (summing := self._summing(eqn)):
            return 0
        [out], partial = eqn.outvars, summing[0].intersection(*summing)
        used = self._axes(out)
        return nbytes(out.aval) // self._parts(used - partial) if partial & used else 0

    def _summing(self, eqn: JaxprEqn) -> list[set[str]]:
        """For each operand of a product the axes that split what is summed. Along those of both the
        devices have partial sums. [] of another equation, and on one device."""
        each = zip(map(self._of, eqn.invars), contracted_dims(eqn), strict=False)
        in_parts = each if self.splits else ()
        return [{a for d in dims for a in axes_at(split, d)} for split, dims in in_parts]

    def spec(self, v: Var) -> jax.sharding.PartitionSpec | None:
        """How `v` is split over `mesh`; None where that is uncertain, or shards are not equal."""
        return self.stated(v) if v in self.certain else None

    def stated(self, v: Var) -> jax.sharding.PartitionSpec | None:
        """How `v` is split over `mesh`, certain or not; None where shards are not equal."""
        if self.mesh is None:
            return None
        mesh, split = self.mesh.shape, self._of(v)
        if any(mesh.get(a) != self.sizes[a] for axes in split for a in axes):
            return None  # an axis of another mesh, or of a sharding without names
        aval: Any = v.aval
        if any(n % self._parts(axes) for n, axes in zip(aval.shape, split, strict=False)):
            return None
        return jax.sharding.PartitionSpec(*(axes or None for axes in split))

    def are_slices_whole(self, v: Var) -> bool:
        """Whether no device holds only some of the slices of `v`, along its first dimension."""
        return not any(self._of(v)[:1])

    def is_split(self, v: Var, dim: int) -> bool:
        """Whether devices divide dimension `dim` of `v`."""
        return bool(axes_at(self._of(v), dim))

    def within(
        self, body: ClosedJaxpr, outside: Mapping[Var, Atom], slices: Collection[Var]
    ) -> Shards:
        """The splits of the values of `body`, an iteration of a loop of this step.

        Args:
          body: without calls.
          outside: for its arguments the values here that they are, or are slices of.
          slices: those that are slices.
        """
        if self.device_count == 1:
            return Shards()
        opened = compat.open_jaxpr(body)
        own = lambda v: self._of(outside[v])[1:] if v in slices else self._of(outside[v])
        known = {v: own(v) for v in opened.invars if v in outside and any(own(v))}
        told = {v for v, a in outside.items() if not isinstance(a, Var) or a in self.certain}
        certain = {*opened.constvars, *told.intersection(opened.invars)}
        sizes = dict(self.sizes)
        _follow(opened, known, certain, sizes)
        return Shards(sizes, known, certain, self.device_count, self.mesh)

    def _of(self, atom: Atom) -> Split:
        return self.splits.get(atom, WHOLE) if isinstance(atom, Var) else WHOLE

    def _axes(self, atom: Atom) -> set[str]:
        return {a for axes in self._of(atom) for a in axes}

    def _parts(self, axes: Any) -> int:
        return math.prod(self.sizes[a] for a in set(axes))


def follow_shards(flat: ClosedJaxpr, shardings: Sequence[Any]) -> Shards:
    """The splits of all values of `flat`, whose arguments have `shardings` (None: one device)."""
    opened = compat.open_jaxpr(flat)
    sizes: dict[str, int] = {}
    known: dict[Var, Split] = {}
    for v, sharding in zip(opened.invars, shardings, strict=False):
        split = _split_of(sharding, v.aval, sizes)
        if any(split):
            known[v] = split
    certain = {*opened.invars, *opened.constvars}
    spread = [s for s in shardings if s is not None and s.num_devices > 1]
    if spread or any(map(_may_split, opened.eqns)):  # else all is whole, in half a capture's time
        _follow(opened, known, certain, sizes)
    meshes = {getattr(getattr(s, "mesh", None), "abstract_mesh", None) for s in spread}
    mesh = meshes.pop() if len(meshes) == 1 else None
    if mesh is not None and len(set(mesh.axis_types)) > 1:
        mesh = None  # its types say part of a split, and nothing says the rest
    return Shards(sizes, known, certain, max((s.num_devices for s in spread), default=1), mesh)


def _split_of(sharding: Any, aval: Any, sizes: dict[str, int]) -> Split:
    """The split that a sharding gives a value; new axes go into `sizes`."""
    shape = getattr(aval, "shape", ())
    if isinstance(sharding, jax.sharding.NamedSharding):
        sizes.update(sharding.mesh.shape)
        if not any(sharding.spec):
            return WHOLE
        spec = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
        return tuple(
            () if not (isinstance(p, str | tuple) and p) else (p,) if isinstance(p, str) else p
            for p in spec
        )
    if sharding is None or len(getattr(sharding, "device_set", ())) < 2:
        return WHOLE
    split = []
    for d, (whole, part) in enumerate(zip(shape, sharding.shard_shape(shape), strict=True)):
        axis = f"{id(sharding)}/{d}"  # an axis of its own: nothing else is split just so
        sizes[axis] = -(-whole // part) if part else 1
        split.append((axis,) if sizes[axis] > 1 else ())
    return tuple(split)


def _follow(
    opened: Any,
    known: dict[Var, Split],
    certain: set[Var],
    sizes: dict[str, int],
    made: Collection[Var] = (),
) -> None:
    """Fills `known` and `certain` from operands to results, then back to what only results tell.

    Args:
      made: arguments that are made for `opened` alone, so that it tells how they are split.
    """
    read = lambda a: known.get(a, WHOLE) if isinstance(a, Var) else WHOLE
    arguments = {*opened.invars, *opened.constvars}.difference(made)
    for _ in range(2):
        for eqn in opened.eqns:
            operands = [read(a) for a in eqn.invars]
            surely = [not isinstance(a, Var) or a in certain for a in eqn.invars]
            nested = _NESTED.get(eqn.primitive.name)
            if nested is not None:
                splits, tells = nested(eqn, operands, surely, sizes)
            else:
                splits = _results(eqn, operands, sizes)
                tells = [_tells(eqn, operands, surely, splits)] * len(splits)
            for v, split, told_by_rule in zip(eqn.outvars, splits, tells, strict=True):
                if is_typed := _is_explicit(v.aval):  # the type of a value says it
                    split = _split_of(getattr(v.aval, "sharding", None), v.aval, sizes)
                if any(split):
                    known[v] = split
                if told_by_rule or is_typed:
                    certain.add(v)
        for eqn in reversed(opened.eqns):
            if eqn.primitive.name == "scan":
                given = [a for a in eqn.invars if isinstance(a, Var)]
                asked = {a for a in given if a not in known and a not in arguments and rank_of(a)}
                known.update(_asked(eqn, asked, list(map(read, eqn.invars)), sizes))
            if eqn.primitive.name in RULES or eqn.primitive.name in _NESTED:
                continue
            elementwise = class_of(eqn) is Class.FUSIBLE and certain.issuperset(eqn.outvars)
            for a in eqn.invars:
                if isinstance(a, Var) and a not in known and a not in arguments:
                    split = aligned(a.aval, eqn.outvars, [read(v) for v in eqn.outvars])
                    if any(split):
                        known[a] = split
                        if elementwise and len(split) == rank_of(eqn.outvars[0]):
                            certain.add(a)


def _may_split(eqn: JaxprEqn) -> bool:
    """Whether results of `eqn` may be split where no operand is."""
    if eqn.primitive.name in _STATED or any(_is_explicit(v.aval) for v in eqn.outvars):
        return True
    bodies = map(compat.open_jaxpr, inner_jaxprs(eqn))
    return any(_may_split(inner) for body in bodies for inner in body.eqns)


def _is_explicit(aval: Any) -> bool:
    """Whether the type of a value says how it is split: all axes of its mesh are explicit."""
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return mesh is not None and not mesh.empty and mesh.are_all_axes_explicit


def _tells(
    eqn: JaxprEqn, operands: Sequence[Split], surely: Sequence[bool], splits: Sequence[Split]
) -> bool:
    """Whether the partitioner is bound to split the results of `eqn` by `splits`, if no user of
    theirs has it otherwise.

    Args:
      operands: their splits.
      surely: whether each is certain.
    """
    name = eqn.primitive.name
    if name in _STATED:
        return True
    if name == "broadcast_in_dim" and nbytes(eqn.outvars[0].aval) != nbytes(eqn.invars[0].aval):
        return False  # its readers decide over the dimensions that it adds
    ranks = [rank_of(a) if isinstance(a, Var) else 0 for a in eqn.invars]
    if name in RULES or name in _WINDOWS:
        telling = [i for i, rank in enumerate(ranks) if rank]
        if not all(surely[i] for i in telling):
            return False
    elif class_of(eqn) in (Class.FUSIBLE, Class.VIEW):  # one tells, and the others follow
        rank = rank_of(eqn.outvars[0])
        telling = [i for i in range(len(ranks)) if ranks[i] == rank > 0 and surely[i]]
    else:
        return False
    gone: set[str] = set()
    for split, dims in zip(operands, contracted_dims(eqn), strict=False):
        gone |= {axis for d in dims for axis in axes_at(split, d)}
    if "axes" in eqn.params:
        gone |= {axis for d in eqn.params["axes"] for axis in axes_at(operands[0], d)}
    kept = {axis for split in splits for axes in split for axis in axes}
    lost = (a for i in telling for axes in operands[i] for a in axes if a not in kept | gone)
    return bool(telling) and next(lost, None) is None


def _results(eqn: JaxprEqn, splits: list[Split], sizes: dict[str, int]) -> list[Split]:
    rule = RULES.get(eqn.primitive.name) or _STATED.get(eqn.primitive.name)
    if rule is not None:
        return rule(eqn, splits, sizes)
    return [aligned(v.aval, eqn.invars, splits) for v in eqn.outvars]


def _inner(
    jaxpr: Any, splits: Sequence[Split], surely: Sequence[bool], sizes: dict[str, int]
) -> tuple[list[Split], list[bool]]:
    """The splits of the results of a body whose arguments have `splits`, and which are certain."""
    opened = compat.open_jaxpr(inline(jaxpr))
    known = {v: s for v, s in zip(opened.invars, splits, strict=True) if any(s)}
    certain = {*opened.constvars, *(v for v, t in zip(opened.invars, surely, strict=True) if t)}
    _follow(opened, known, certain, sizes)
    outs = [known.get(v, WHOLE) if isinstance(v, Var) else WHOLE for v in opened.outvars]
    return outs, [isinstance(v, Var) and (not rank_of(v) or v in certain) for v in opened.outvars]


def _asked(
    eqn: JaxprEqn, asked: set[Var], splits: list[Split], sizes: dict[str, int]
) -> dict[Var, Split]:
    """The splits that a scan wants of those of its operands `asked` that are the same in every
    iteration: masks, broadcast numbers."""
    consts, carry = compat.scan_counts(eqn)
    if not any(isinstance(a, Var) and a in asked for a in eqn.invars[:consts]):
        return {}
    opened = compat.open_jaxpr(inline(eqn.params["jaxpr"]))
    inside = [*splits[: consts + carry], *(s[1:] for s in splits[consts + carry :])]
    known = {v: s for v, s in zip(opened.invars, inside, strict=True) if any(s)}
    pairs = zip(opened.invars[:consts], eqn.invars[:consts], strict=True)
    made = {v: a for v, a in pairs if isinstance(a, Var) and a in asked}
    _follow(opened, known, set(), sizes, made)
    return {a: known[v] for v, a in made.items() if v in known}


def _scan(
    eqn: JaxprEqn, splits: list[Split], surely: list[bool], sizes: dict[str, int]
) -> tuple[list[Split], list[bool]]:
    consts, carry = compat.scan_counts(eqn)
    inside = [*splits[: consts + carry], *(s[1:] for s in splits[consts + carry :])]
    outs, certain = _inner(eqn.params["jaxpr"], inside, surely, sizes)
    return [*outs[:carry], *(((), *s) if s else WHOLE for s in outs[carry:])], certain


def _cond(
    eqn: JaxprEqn, splits: list[Split], surely: list[bool], sizes: dict[str, int]
) -> tuple[list[Split], list[bool]]:
    return _inner(eqn.params["branches"][0], splits[1:], surely[1:], sizes)


def _while(
    eqn: JaxprEqn, splits: list[Split], surely: list[bool], sizes: dict[str, int]
) -> tuple[list[Split], list[bool]]:
    count = len(eqn.outvars)
    return splits[len(splits) - count :], [False] * count


def _constraint(eqn: JaxprEqn, splits: list[Split], sizes: dict[str, int]) -> list[Split]:
    return [_split_of(eqn.params["sharding"], eqn.outvars[0].aval, sizes)]


def _shard_map(eqn: JaxprEqn, splits: list[Split], sizes: dict[str, int]) -> list[Split]:
    mesh = eqn.params["mesh"]
    sizes.update(mesh.shape)
    return [
        _split_of(jax.sharding.NamedSharding(mesh, spec), v.aval, sizes)
        for v, spec in zip(eqn.outvars, eqn.params["out_specs"], strict=True)
    ]


_NESTED: dict[str, Callable[..., tuple[list[Split], list[bool]]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
"""What has a body, where the same is done; their results' splits, and which are certain."""

_WINDOWS = frozenset(
    "cumsum cumprod cummax cummin cumlogsumexp reduce_window_max reduce_window_sum reduce_window "
    "select_and_scatter_add select_and_gather_add window_index window_gradient".split()
)
"""Split as their operands are, along the dimensions that no window runs over."""

_STATED: dict[str, Rule] = {"sharding_constraint": _constraint, "shard_map": _shard_map}
"""Primitives by which the user states a sharding."""


def is_typed(v: Var) -> bool:
    """Whether the type of `v` says how it is split; equations on slices would need types, too."""
    mesh = getattr(getattr(v.aval, "sharding", None), "mesh", None)
    return mesh is not None and jax.sharding.AxisType.Explicit in mesh.axis_types
