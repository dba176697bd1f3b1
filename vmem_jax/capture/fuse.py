"""fuse: which values of a flat jaxpr exist in memory, and which equations share a kernel.

A fusible equation is computed inside every kernel that reads it. Where the reader is far away (a
backward equation that reads a forward chain), two ways are open: the value exists in between, or the
chain is computed again from values that exist anyway. The cheaper one is taken, in bytes moved plus
bytes held: a dropout mask (1 byte an element) rather than the random bits (4), a batch-normalised
value from the convolution's output, which the backward pass reads anyway.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from vmem_jax import jax_compat as compat
from vmem_jax.capture.primitives import Class, class_of, nbytes
from vmem_jax.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Var

_MOST_VISITS = 500
"""Fusible equations looked at for one kernel; beyond it a value exists. XLA's fusions end too."""

_EPOCHS_PER_PASS = 8
"""Holding a value over so many heavy kernels counts as much as reading it once."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A heavy equation, or a chain of fusible ones, with what it reads and writes.

    Attributes:
      equations: indices of its equations, in order; the last gives it its name.
      reads: the existing values that it reads.
      writes: the values that it brings into existence.
    """

    equations: tuple[int, ...]
    reads: tuple[Var, ...]
    writes: tuple[Var, ...]


def fuse(flat: ClosedJaxpr) -> tuple[Kernel, ...]:
    """Returns the kernels of `flat`, in the order of their last equations."""
    return _Fuser(flat).kernels()


class _Fuser:
    def __init__(self, flat: ClosedJaxpr) -> None:
        opened = compat.open_jaxpr(flat)
        self.eqns: list[JaxprEqn] = opened.eqns
        self.classes = [class_of(eqn) for eqn in self.eqns]
        self.maker: dict[Var, int] = {
            v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars
        }
        self.outputs = {a for a in opened.outvars if isinstance(a, Var)}
        # the epoch of an equation: how many heavy kernels stand before it
        self.epoch: list[int] = []
        heavy = 0
        for eqn, kind in zip(self.eqns, self.classes, strict=True):
            self.epoch.append(heavy)
            sizes = [nbytes(v.aval) for v in (*eqn.outvars, *eqn.invars)]
            heavy += kind is Class.HEAVY and max(sizes, default=0) > 4096
        self.uses: dict[Var, int] = {}
        for eqn in self.eqns:
            for a in eqn.invars:
                if isinstance(a, Var):
                    self.uses[a] = self.uses.get(a, 0) + 1
        self.exists: set[Var] = set()  # fusible values that some kernel must write
        self.until: dict[Var, int] = {}  # the last epoch that reads an existing value

    def kernels(self) -> tuple[Kernel, ...]:
        self.exists |= {v for v in self.outputs if v in self.maker}
        for i, eqn in enumerate(self.eqns):
            if self.classes[i] is Class.HEAVY:
                for atom in eqn.invars:
                    source = self._source(atom)
                    if source is not None:
                        self.read_at(source, self.epoch[i])
        found: list[Kernel] = []
        for i in range(len(self.eqns) - 1, -1, -1):
            if self.classes[i] is Class.HEAVY:
                found.append(self._heavy(i))
            elif self.classes[i] is Class.REDUCE or any(
                v in self.exists for v in self.eqns[i].outvars
            ):
                found.append(self._chain(i))
        return tuple(_join_siblings(found[::-1], self.eqns, self.epoch))

    def _source(self, atom: Atom) -> Var | None:
        """The value behind views, or None for literals."""
        while isinstance(atom, Var) and atom not in self.outputs:
            i = self.maker.get(atom)
            if i is None or self.classes[i] is not Class.VIEW:
                break
            atom = self.eqns[i].invars[0]
        return atom if isinstance(atom, Var) else None

    def must_exist(self, v: Var) -> bool:
        """Whether `v` is in memory whatever is decided: an input, or made by a kernel of its own."""
        i = self.maker.get(v)
        return i is None or self.classes[i] in (Class.HEAVY, Class.REDUCE)

    def read_at(self, v: Var, epoch: int) -> None:
        """`v` is read in `epoch`: it exists from its making until then."""
        if not self.must_exist(v):
            self.exists.add(v)
        self.until[v] = max(self.until.get(v, 0), epoch)

    def _views(self, atoms: list[Atom]) -> set[int]:
        """The view equations between existing values and `atoms`."""
        found = set()
        for atom in atoms:
            while isinstance(atom, Var) and atom not in self.outputs:
                i = self.maker.get(atom)
                if i is None or self.classes[i] is not Class.VIEW:
                    break
                found.add(i)
                atom = self.eqns[i].invars[0]
        return found

    def _heavy(self, i: int) -> Kernel:
        eqn = self.eqns[i]
        reads = dict.fromkeys(
            s for s in map(self._source, eqn.invars) if s is not None
        )
        equations = (*sorted(self._views(eqn.invars)), i)
        return Kernel(equations, tuple(reads), tuple(eqn.outvars))

    def _chain(self, root: int) -> Kernel:
        """The fused chain that ends in equation `root`; decides what it reads."""
        epoch = self.epoch[root]
        # Twice: what the first pass finds to be read anyway makes reading it again free, so that
        # the second pass computes the rest from it.
        walk = _Walk(self, epoch, ())
        walk.visit_all(self.eqns[root].invars)
        walk = _Walk(self, epoch, walk.reads)
        walk.visit_all(self.eqns[root].invars)
        for v in walk.reads:
            self.read_at(v, epoch)
        written = [
            v for v in self.eqns[root].outvars
            if v in self.exists or self.classes[root] is Class.REDUCE
        ]
        equations = (*sorted(walk.inlined - {root}), root)
        return Kernel(equations, tuple(walk.reads), tuple(written))


class _Walk:
    """One walk from the operands of a chain's root back to the values that it reads."""

    def __init__(self, fuser: _Fuser, epoch: int, free: Iterable[Var]) -> None:
        self.fuser = fuser
        self.epoch = epoch
        self.until = fuser.until
        self.free = {v for v in free if v in fuser.exists or fuser.must_exist(v)}
        self.costs: dict[Var, tuple[float, bool]] = {}  # value -> (price in bytes, read it?)
        self.reads: dict[Var, None] = {}
        self.inlined: set[int] = set()

    def visit_all(self, atoms: Iterable[Atom]) -> None:
        for atom in atoms:
            self.visit(atom, 0)

    def visit(self, atom: Atom, depth: int) -> None:
        """Adds what computing `atom` reads and inlines."""
        if not isinstance(atom, Var):
            return
        _, read = self._cost(atom, depth)
        if read:
            self.reads[atom] = None
            return
        i = self.fuser.maker[atom]
        if i not in self.inlined:
            self.inlined.add(i)
            for operand in self.fuser.eqns[i].invars:
                self.visit(operand, depth + 1)

    def _cost(self, v: Var, depth: int) -> tuple[float, bool]:
        """The price in bytes of needing `v` here, and whether to read it (or compute it)."""
        if v in self.costs:
            return self.costs[v]
        fuser = self.fuser
        size = nbytes(v.aval)
        i = fuser.maker.get(v)
        if v in self.free:
            self.costs[v] = (0.0, True)
            return self.costs[v]
        if i is None:  # an input of the program: always there
            self.costs[v] = (float(size), True)
            return self.costs[v]
        born = fuser.epoch[i]
        outlives = max(0, self.epoch - max(self.until.get(v, born), born))
        read = size * (1 + outlives / _EPOCHS_PER_PASS)
        if fuser.classes[i] in (Class.HEAVY, Class.REDUCE):
            self.costs[v] = (read, True)
            return self.costs[v]
        if len(self.costs) > _MOST_VISITS or depth > 100:
            self.costs[v] = (read, True)
            return self.costs[v]
        compute = sum(
            self._cost(a, depth + 1)[0] for a in fuser.eqns[i].invars if isinstance(a, Var)
        )
        if v in fuser.exists:
            choice = (compute, False) if compute < read else (read, True)
        else:  # somebody has to compute and write it first
            read += size + compute / max(fuser.uses[v], 1)
            choice = (compute, False) if compute <= read else (read, True)
        self.costs[v] = choice
        return choice


def _join_siblings(
    kernels: list[Kernel], eqns: list[JaxprEqn], epoch: list[int]
) -> list[Kernel]:
    """Joins neighbouring reductions of the same values: XLA makes one multi-output fusion of them."""
    joined: list[Kernel] = []
    for kernel in kernels:
        last = kernel.equations[-1]
        if joined and class_of(eqns[last]) is Class.REDUCE:
            for back in range(len(joined) - 1, max(len(joined) - 4, -1), -1):
                other = joined[back]
                end = other.equations[-1]
                between = {v for k in joined[back:] for v in k.writes}
                if epoch[end] != epoch[last] or between & set(kernel.reads):
                    break
                big = max(kernel.reads, key=lambda v: nbytes(v.aval), default=None)
                if class_of(eqns[end]) is Class.REDUCE and big in other.reads:
                    joined[back] = Kernel(
                        tuple(sorted({*other.equations, *kernel.equations})),
                        tuple(dict.fromkeys((*other.reads, *kernel.reads))),
                        (*other.writes, *kernel.writes),
                    )
                    break
            else:
                joined.append(kernel)
                continue
            if joined[back] is other:
                joined.append(kernel)
        else:
            joined.append(kernel)
    return joined
