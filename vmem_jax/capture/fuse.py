"""fuse: which values of a flat jaxpr exist in memory, and which equations share a kernel.

A fusible equation is computed inside every kernel that reads it, and so are a softmax's reductions
on a GPU (`capture.softmax`). Where the reader is far away (a backward equation that reads a forward
chain), there is a choice: the value exists in between, or the chain is computed again from values
that exist anyway. The cheaper one is taken, in bytes moved plus bytes held: a dropout mask (1 byte an
element) rather than the random bits (4), a batch-normalised value from the convolution's output,
which the backward pass reads anyway. Random words are fused, too, but drawn once (`capture.draws`).
What compares a value with what is computed from it is one kernel (`capture.ties`).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Collection, Iterator
from typing import Any

from vmem_jax import jax_compat as compat
from vmem_jax.capture.bits import pack_p
from vmem_jax.capture.def_use import makers, readers
from vmem_jax.capture.draws import draws
from vmem_jax.capture.few_rows import is_elementwise
from vmem_jax.capture.fused_reads import Walk, narrowed, uses_in_wide
from vmem_jax.capture.kernels import Kernel, join_masks, join_siblings, made_before_read
from vmem_jax.capture.masks import masked_cotangents
from vmem_jax.capture.overlap import is_made_apart
from vmem_jax.capture.primitives import (
    SCATTERS,
    Class,
    class_of,
    exchanges_operands,
    is_batched,
    nbytes,
    takes_epilogue,
)
from vmem_jax.capture.shards import Shards
from vmem_jax.capture.softmax import makes_exponentials, reduced_at_once
from vmem_jax.capture.ties import COMPARISONS, Tie, ties
from vmem_jax.core.program import BEGIN
from vmem_jax.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Var

_LOOP_EPOCHS = 128
"""Heavy kernels that count as standing between a loop and the one that reads its stacks: those of
some ten layers. A value held so long costs what reading it 16 times does."""


def fuse(
    flat: ClosedJaxpr,
    boundary: int | None = None,
    platform: str = "",
    parts: Collection[int] = (),
    shards: Shards | None = None,
) -> tuple[Kernel, ...]:
    """Returns the kernels of `flat`, in the order of their last equations; those whose epilogues add
    what is there from the start, in that of their heavy ones.

    Args:
      platform: that it is compiled for; on "cpu" random words are made by a loop.
      boundary: where `flat` is one iteration of two loops, the first equation of the second one.
        What that reads of the first is held in a stack until then.
      parts: the products that are parts of others, without epilogues (`capture.shared_operands`).
      shards: how the values of `flat` are split over devices; None on one device.
    """
    return _Fuser(flat, boundary, platform, parts, shards or Shards()).kernels()


class _Fuser:
    def __init__(
        self,
        flat: ClosedJaxpr,
        boundary: int | None,
        platform: str,
        parts: Collection[int],
        shards: Shards,
    ) -> None:
        opened = compat.open_jaxpr(flat)
        self.platform, self.parts = platform, parts
        self.eqns: list[JaxprEqn] = opened.eqns
        self.classes = [class_of(eqn) for eqn in self.eqns]
        self.maker = makers(self.eqns)
        self.outputs = {a for a in opened.outvars if isinstance(a, Var)}
        age = lambda a: -self.maker.get(a, len(self.eqns))
        self.operands = [
            sorted((a for a in eqn.invars if isinstance(a, Var)), key=age) for eqn in self.eqns
        ]
        values = (*opened.invars, *opened.constvars, *self.maker)
        self.nbytes = {v: nbytes(v.aval) for v in values}
        # the epoch of an equation: how many heavy kernels stand before it
        self.epoch: list[int] = []
        heavy = 0
        for i, (eqn, kind) in enumerate(zip(self.eqns, self.classes, strict=True)):
            heavy += _LOOP_EPOCHS if i == boundary else 0
            self.epoch.append(heavy)
            sizes = [self.nbytes[v] for v in (*eqn.outvars, *self.operands[i])]
            heavy += kind is Class.HEAVY and max(sizes, default=0) > 4096
        self.readers = readers(self.eqns)
        self.uses: dict[Var, int] = collections.Counter(itertools.chain(*self.operands))
        self.at_once: set[int] = set()
        self.tied = {i: tie for tie in ties(flat) for i in tie.equations}
        for i in self.tied:  # a mask of a tie exists
            if self.eqns[i].primitive.name in COMPARISONS:
                self.classes[i] = Class.REDUCE
        for i, eqn in enumerate(self.eqns):
            if eqn.primitive is pack_p:  # bytes exist: packed where they are read, they save none
                self.classes[i] = Class.REDUCE
        if platform != "cpu":
            by = {v: eqn for eqn in self.eqns for v in eqn.outvars}
            for i, eqn in enumerate(self.eqns):
                if not self.outputs.isdisjoint(eqn.outvars) and makes_exponentials(eqn, by):
                    self.classes[i] = Class.REDUCE
                elif is_made_apart(eqn) or eqn.primitive.name in SCATTERS:
                    self.classes[i] = Class.REDUCE
                elif i not in self.tied and is_elementwise(eqn, self._readers(eqn)):
                    self.classes[i] = Class.FUSIBLE
                elif self._is_written_transposed(i):
                    self.classes[i] = Class.FUSIBLE
            for i, last in draws(self, self.outputs):
                if not {i, last} & {*self.tied}:
                    self.classes[i], self.classes[last] = Class.FUSIBLE, Class.REDUCE
            self.at_once.update(reduced_at_once(self, by, self.outputs, shards))
            for i in self.at_once:
                self.classes[i] = Class.FUSIBLE
        self.absorbed: dict[int, int] = {}  # equation of an epilogue -> its heavy equation
        # the last kernel that a sum reads adds the others: they need not wait with what they read
        self.epilogue = {i: self._epilogue(i) for i in reversed(range(len(self.eqns)))}
        for j in self.absorbed:
            self.classes[j] = Class.HEAVY
        self.narrow = narrowed(self.eqns, self.classes, self.nbytes)
        self.wide_uses = uses_in_wide(self.uses, self.narrow)
        self.exists: set[Var] = set()  # fusible values that some kernel must write
        self.until: dict[Var, int] = {}  # the last epoch that reads an existing value

    def _is_written_transposed(self, i: int) -> bool:
        """Whether equation `i` states the layout of what a chain transposes (`capture.row_major`):
        the chain writes it so, and does not make it in another order."""
        eqn = self.eqns[i]
        if eqn.primitive.name != "layout_constraint":
            return False
        maker = self.maker.get(eqn.invars[0])
        if maker is None or self.eqns[maker].primitive.name != "transpose":
            return False
        source = self._source(eqn.invars[0])
        if source not in self.maker:
            return False
        made = self.eqns[self.maker[source]]
        return self.classes[self.maker[source]] is Class.FUSIBLE or is_batched(made)

    def _readers(self, eqn: JaxprEqn) -> Iterator[JaxprEqn]:
        """What reads the results of `eqn`, and what reads views and broadcasts of them."""
        for j in itertools.chain(*(self.readers.get(v, ()) for v in eqn.outvars)):
            yield self.eqns[j]
            if self.classes[j] is Class.VIEW or self._spreads(j):
                yield from self._readers(self.eqns[j])

    def kernels(self) -> tuple[Kernel, ...]:
        self.exists |= {v for v in self.outputs if v in self.maker}
        masked = dict(masked_cotangents(self))
        self.exists.update(masked)
        for i in range(len(self.eqns)):
            if i in self.tied:
                for x in self.tied[i].compared:
                    self.read_at(x, self.epoch[i])
            elif self.classes[i] is Class.HEAVY and i not in self.absorbed:
                for source in self._given(i):
                    self.read_at(source, self.epoch[i])
        found: list[Kernel] = []
        for i in range(len(self.eqns) - 1, -1, -1):
            heavy = self.absorbed.get(i, i)
            if i in self.tied and i == self.tied[i].equations[-1]:
                found.append(self._tie(self.tied[i]))
            if i in self.tied and self.classes[i] in (Class.HEAVY, Class.REDUCE):
                continue
            if self.classes[heavy] is Class.HEAVY:
                if i == self._place(heavy):
                    found.append(self._put(i) if self._is_made_there(i) else self._heavy(heavy))
            elif self.classes[i] is Class.REDUCE or any(
                v in self.exists for v in self.eqns[i].outvars
            ):
                found.append(self._chain(i))
        joined = join_siblings(found[::-1], self.eqns, self.epoch)
        joined = join_masks(joined, [v for v, apart in masked.items() if not apart], self.eqns)
        if not self.tied:
            return tuple(joined)
        read = self.outputs.union(*(kernel.reads for kernel in joined))
        for k, kernel in enumerate(joined):
            if kernel.tied:  # the rest is in it alone
                writes = tuple(v for v in kernel.writes if v in read)
                joined[k] = dataclasses.replace(kernel, writes=writes)
        return tuple(made_before_read(joined, self.eqns))

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

    def _epilogue(self, i: int) -> list[int]:
        """The equations behind heavy equation `i` that its kernel computes before it writes.

        A transpose of a product is the product with its operands exchanged. cuDNN's forward
        convolutions, and products, take a bias, a tensor to add (a total of weight gradients, say)
        and a ReLU; XLA uses that where nothing else reads what is in between. XLA:GPU has a product
        add arguments alone, and totals that a loop carries; what is made, such as a residual, in a
        pass behind it (0.11.2); a bias that is made, of a cast for instance, is added by what reads
        the sum.
        """
        eqn = self.eqns[i]
        chain: list[int] = []
        if self.classes[i] is not Class.HEAVY or not eqn.invars or i in self.tied:
            return chain
        if (turned := self._transposed(i)) is not None:
            self.absorbed[turned] = i
            chain.append(turned)
            if self.platform == "cpu":  # it adds in a kernel of its own
                return chain
        if i in self.parts:
            return chain
        if turned is None and not takes_epilogue(eqn, self._source_equation(eqn.invars[-1])):
            return chain
        is_product = eqn.primitive.name == "dot_general"
        out, most = self.eqns[chain[-1] if chain else i].outvars[0], len(chain) + 3
        biases: list[int] = []  # of the chain, if a tensor is added behind them
        while out not in self.outputs and self.uses.get(out) == 1 and len(chain + biases) < most:
            j = self.readers[out][-1]
            name, after = self.eqns[j].primitive.name, self.eqns[j].outvars[0]
            same = (after.aval.shape, after.aval.dtype) == (out.aval.shape, out.aval.dtype)
            if name not in ("add", "add_any", "max") or not same or j in self.absorbed:
                break
            maker, is_spread = self._addend(j, out)
            if j in self.tied or (name == "max" and biases):
                break
            is_total = maker == BEGIN
            if is_product and is_total and self.platform == "cpu":
                break
            out = after
            if is_product and is_spread and maker and not is_total and self.platform != "cpu":
                biases.append(j)
                continue
            chain += [*biases, j]
            self.absorbed |= dict.fromkeys((*biases, j), i)
            biases = []
            if name == "max":
                break
        return chain

    def _addend(self, j: int, out: Var) -> tuple[str, bool]:
        """The primitive that makes what equation `j` adds to `out`, "" of an argument, and whether
        that is spread over more elements."""
        [atom] = [a for a in self.eqns[j].invars if a is not out] or [out]
        name, origin = self._origin(atom)
        return name, nbytes(origin.aval) < nbytes(out.aval)

    def _origin(self, atom: Atom) -> tuple[str, Atom]:
        """What `atom` is a view of, or spread from, and the primitive that makes that."""
        while isinstance(atom, Var) and atom in self.maker:
            maker = self.maker[atom]
            if self.classes[maker] is not Class.VIEW and not self._spreads(maker):
                return self.eqns[maker].primitive.name, atom
            atom = self.eqns[maker].invars[0]
        return "", atom

    def _place(self, i: int) -> int:
        """The equation in whose place the kernel of heavy equation `i` stands: its own if what its
        epilogue adds is an argument or a total, else the last, behind what makes that. So gradients
        that the user adds to totals at the end of an iteration are made where their operands are."""
        epilogue = self.epilogue[i]
        if not epilogue:
            return i
        inside = {self.eqns[j].outvars[0] for j in (i, *epilogue)}
        added = {a for j in epilogue for a in self.operands[j]} - inside
        there = all(self._origin(a)[0] in ("", BEGIN) for a in added)
        return i if there else epilogue[-1]

    def _spreads(self, i: int) -> bool:
        return self.eqns[i].primitive.name == "broadcast_in_dim"

    def _transposed(self, i: int) -> int | None:
        """The transpose that is all that reads a matrix product, if the product with its operands
        exchanged has the same layout: a weight gradient, as JAX writes it.

        What exists is the transposed value. A barrier over the other one would leave XLA to transpose
        the update and the optimiser state that are made of it.
        """
        eqn = self.eqns[i]
        if eqn.primitive.name != "dot_general":
            return None
        out = eqn.outvars[0]
        if out in self.outputs or self.uses.get(out) != 1 or self.readers[out][0] in self.tied:
            return None
        [reader] = self.readers[out]
        return reader if exchanges_operands(eqn, self.eqns[reader]) else None

    def _source_equation(self, atom: Atom) -> JaxprEqn | None:
        source = self._source(atom)
        return self.eqns[self.maker[source]] if source in self.maker else None

    def _heavy(self, i: int) -> Kernel:
        """The kernel of heavy equation `i` with its epilogue."""
        eqn = self.eqns[i]
        reads = dict.fromkeys(s for s in map(self._source, eqn.invars) if s is not None)
        equations = {i, *self._views(eqn.invars)}
        out: Any = eqn.outvars[0] if eqn.outvars else None
        for j in self.epilogue[i]:
            equations.add(j)
            for atom in self.eqns[j].invars:
                if atom is out:
                    continue
                # a bias is spread over the result inside the kernel
                while isinstance(atom, Var) and atom in self.maker:
                    maker = self.maker[atom]
                    spread = self._spreads(maker) or self.classes[maker] is Class.VIEW
                    if atom in self.outputs or not spread:
                        break
                    equations.add(maker)
                    atom = self.eqns[maker].invars[0]
                if isinstance(atom, Var):
                    reads[atom] = None
            out = self.eqns[j].outvars[0]
        writes: tuple[Var, ...] = (out,) if self.epilogue[i] else tuple(eqn.outvars)
        return Kernel(tuple(sorted(equations)), i, tuple(reads), writes)

    def _is_made_there(self, i: int) -> bool:
        """Whether equation `i` writes a slice that a chain makes for it alone: XLA's kernel of the
        chain writes it where it belongs, and the slice never exists by itself."""
        if self.eqns[i].primitive.name != "dynamic_update_slice" or i in self.tied:
            return False
        made: Atom | None = self.eqns[i].invars[1]
        while isinstance(made, Var) and made not in self.outputs and self.uses.get(made) == 1:
            j = self.maker.get(made)
            if j is None or j in self.tied or self.classes[j] is not Class.VIEW:
                return j is not None and j not in self.tied and self.classes[j] is Class.FUSIBLE
            made = self.eqns[j].invars[0]
        return False

    def _given(self, i: int) -> tuple[Var, ...]:
        """What heavy equation `i` reads whatever is decided."""
        if not self._is_made_there(i):
            return self._heavy(i).reads
        whole, _, *starts = self.eqns[i].invars
        return tuple(filter(None, map(self._source, (whole, *starts))))

    def _put(self, i: int) -> Kernel:
        """The kernel of a chain that writes its result into a slice of the first operand of `i`."""
        walk = self._walk(self.eqns[i].invars[1:2], self.epoch[i])
        whole, _, *starts = self.eqns[i].invars
        equations = sorted({*walk.inlined, *self._views([whole, *starts]), i})
        reads = dict.fromkeys((*self._given(i), *walk.reads))
        return Kernel(tuple(equations), i, tuple(reads), tuple(self.eqns[i].outvars))

    def _walk(self, operands: list[Atom], epoch: int) -> Walk:
        """The walk from `operands` of a root to what its kernel reads."""
        # Twice: what the first pass finds to be read anyway makes reading it again free, so that
        # the second pass computes the rest from it.
        walk = Walk(self, epoch, ())
        walk.visit_all(operands)
        if walk.weighs:
            walk = Walk(self, epoch, walk.reads)
            walk.visit_all(operands)
        for v in walk.reads:
            self.read_at(v, epoch)
        return walk

    def _chain(self, root: int) -> Kernel:
        """The fused chain that ends in equation `root`; decides what it reads."""
        walk = self._walk(self.eqns[root].invars, self.epoch[root])
        written = [
            v
            for v in self.eqns[root].outvars
            if v in self.exists or self.classes[root] is Class.REDUCE
        ]
        equations = (*sorted(walk.inlined - {root}), root)
        return Kernel(equations, root, tuple(walk.reads), tuple(written))

    def _tie(self, tie: Tie) -> Kernel:
        """The kernel of all equations of `tie`; what they read from elsewhere may be computed in it,
        but for the values that are compared."""
        inside, last = set(tie.equations), tie.equations[-1]
        given = [
            a
            for i in tie.equations
            for a in self.eqns[i].invars
            if isinstance(a, Var) and self.maker.get(a, -1) not in inside
        ]
        heavy = [i for i in tie.equations if self.classes[i] is Class.HEAVY]
        whole = [a for i in heavy for a in self.eqns[i].invars if a in given]  # its operands exist
        walk = Walk(self, self.epoch[last], tie.compared)
        for source in filter(None, map(self._source, whole)):
            walk.reads[source] = None
        whole_views = self._views(whole)
        walk.visit_all(a for a in given if a not in whole)
        for v in walk.reads:
            self.read_at(v, self.epoch[last])
        ends = [i for i in tie.equations if self.classes[i] in (Class.HEAVY, Class.REDUCE)]
        reduced = [i for i in ends if self.eqns[i].primitive.name not in COMPARISONS]
        equations = tuple(sorted({*inside, *walk.inlined, *whole_views}))
        writes = tuple(v for i in ends for v in self.eqns[i].outvars)
        root = (heavy or reduced or ends)[0]
        return Kernel(equations, root, tuple(walk.reads), writes, tie.compared)
