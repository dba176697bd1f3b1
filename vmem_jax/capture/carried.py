"""carried: the passes over memory around 1×1 convolutions that their kernels can do in tiles.

A 1×1 convolution without strides, channels last, is a product of rows. What makes its operand
element by element (a normalisation, a residual sum, a ReLU, the gradient through all of them), and
sums over its rows that are made of its result (the statistics of the next batch norm, the sums of
the gradient to it) can be computed in its kernel. The gradient to the weight reads the same gradient
as that to the operand, and is the second product of that kernel.

Nothing here knows what a batch norm is: found is what is elementwise, one value for each channel, or
a sum over all rows. A value that only such kernels read, and masks, does not exist any more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from vmem_jax import jax_compat as compat
from vmem_jax.capture.convolutions import Matched
from vmem_jax.capture.primitives import ELEMENTWISE
from vmem_jax.capture.ties import COMPARISONS
from vmem_jax.capture.tiles import MOST_EQUATIONS, Behind, Tile, Tiles, convolves_in
from vmem_jax.core.convolution import Pass
from vmem_jax.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Var

DTYPES = ("bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Carrying:
    """A product that carries what stands around it.

    Attributes:
      product: the equation of the convolution.
      matched: it, as the pass of a layer.
      gradient: the equation of the gradient to the weight, and that as the pass of a layer; None
        without.
      before: makes its operand.
      stores: whether the operand is stored, too.
      behind: makes of its result, `raw`: x, where there is a gradient; `results`; the operands of
        sums.
      results: what is stored of it.
      sums: the equations of the sums.
    """

    product: int
    matched: Matched
    gradient: tuple[int, Matched] | None
    before: Tile
    stores: bool
    behind: Tile
    raw: Var
    results: tuple[Var, ...]
    sums: tuple[int, ...]


def find_carrying(flat: ClosedJaxpr) -> tuple[Carrying, ...]:
    """The products of `flat` that can carry more than themselves, in its order."""
    return tuple(_Finder(flat).found()) if convolves_in(flat, DTYPES) else ()


class _Finder(Tiles):
    def __init__(self, flat: ClosedJaxpr) -> None:
        super().__init__(flat)
        small = {i: m for i, m in self.matches.items() if _is_product(m)}
        is_gradient = lambda m: m.convolution.which == Pass.BACKWARD_FILTER
        self.products = {i: m for i, m in small.items() if not is_gradient(m)}
        self.gradients = {i: m for i, m in small.items() if is_gradient(m)}
        self.claimed: set[Var] = set()  # by the kernels that were found, of what is behind them
        self.returned: set[Var] = set()  # by these kernels: another one reads it

    def found(self) -> Iterable[Carrying]:
        pairs: dict[int, tuple[int, Matched] | None] = {}
        paired: set[int] = set()
        for i in self.products:  # one makes a gradient, though two may read what it reads
            pairs[i] = pair = self._gradient_of(i, paired)
            paired |= set() if pair is None else {pair[0]}
        operands = {self.eqns[i].invars[0] for i in self.products}
        self.virtual = {x for x in operands if self._is_virtual(x, paired)}
        carried: set[Var] = set()
        for i, matched in self.products.items():
            made = self._carrying(i, matched, pairs[i], carried)
            if made is not None:
                carried.add(self.eqns[i].invars[0])
                self.exists.update(made.results)  # and what is before them does not
                self.returned |= {*made.results, *(made.before.made if made.stores else ())}
                inner = {v for j in made.behind.equations for v in self.eqns[j].outvars}
                behind = self.after({made.raw})
                self.claimed |= {v for v in inner if v in behind}
                yield made

    def _gradient_of(self, i: int, paired: set[int]) -> tuple[int, Matched] | None:
        """The gradient to the weight that reads the operand of product `i` as the gradient to y, if
        it is not in `paired`."""
        dy, result = self.eqns[i].invars[0], self.eqns[i].outvars[0]
        for j in self.readers.get(dy, ()):
            if j in self.gradients and j not in paired and self.eqns[j].invars[1] is dy:
                if self.eqns[j].invars[0].aval.shape == result.aval.shape:
                    return j, self.gradients[j]
        return None

    def _is_virtual(self, x: Atom, paired: set[int]) -> bool:
        """Whether `x` is made element by element and read by products, masks and gradients to the
        weight alone, which make it again in their tiles."""
        if x in self.outputs or not self.is_elementwise(x):
            return False
        eqns = self.eqns
        for r in self.readers[x]:
            compares = eqns[r].primitive.name in COMPARISONS
            product = r in self.products and eqns[r].invars[0] is x
            gradient = r in paired and eqns[r].invars[0] is x
            if not (compares or product or gradient):
                return False
        return not _is_backward(eqns[self.maker[x]])  # gradients are stored: their sums are far

    def _carrying(
        self, i: int, matched: Matched, gradient: tuple[int, Matched] | None, carried: set[Var]
    ) -> Carrying | None:
        eqn = self.eqns[i]
        x, raw = eqn.invars[0], eqn.outvars[0]
        after = self.after({raw})
        before = None
        if self.is_elementwise(x) and x not in carried | self.outputs | self.returned:
            before = self.tile([x], x.aval.shape, {}, set())
        if before is None:
            before = Tile((), (x,), (), (x,))
        inside = {i} if gradient is None else {i, gradient[0]}
        others = [r for r in self.readers[x] if r not in inside]
        stores = bool(before.equations) and x not in self.virtual and bool(others)
        wanted = []
        if gradient is not None:
            wanted.append(self.eqns[gradient[0]].invars[0])
        result, results = self._stored(raw, after), []
        sums = self._sums(raw, after)
        results.append(result)
        wanted += [*results, *(self.eqns[s].invars[0] for s in sums)]
        behind = self.tile(wanted, raw.aval.shape, {raw: None}, after)
        if behind is None:
            return None
        if not (before.equations or sums or gradient):
            return None
        made = Carrying(
            i, matched, gradient, before, stores, behind, raw, tuple(results), tuple(sums)
        )
        return made if self._is_free(made) else None

    def _stored(self, raw: Any, after: Behind) -> Any:
        """The last value behind product `raw` that is alone made of it, and no wider."""
        v = raw
        while v not in self.outputs and len(self.readers.get(v, ())) == 1:
            [r] = self.readers[v]
            out = self.eqns[r].outvars[0]
            if self.eqns[r].primitive.name not in ELEMENTWISE or out.aval.shape != v.aval.shape:
                break
            if out.aval.dtype.itemsize != v.aval.dtype.itemsize:
                break
            if out in self.claimed | self.returned | self.virtual:
                break
            if self.tile([out], raw.aval.shape, {raw: None}, after) is None:
                break
            v = out
        return v

    def _sums(self, raw: Any, after: Behind) -> list[int]:
        """The sums over all rows that are made of `raw` and of what was there before."""
        found: list[int] = []
        seen, stack = {raw}, [raw]
        while stack and len(seen) < MOST_EQUATIONS:
            for r in self.readers.get(stack.pop(), ()):
                eqn = self.eqns[r]
                if eqn.primitive.name == "reduce_sum":
                    axes = tuple(range(len(raw.aval.shape) - 1))
                    operand = eqn.invars[0]
                    same = operand.aval.shape == raw.aval.shape
                    exact = operand.aval.dtype.name == "float32"
                    if same and exact and tuple(sorted(eqn.params["axes"])) == axes:
                        if self.tile([operand], raw.aval.shape, {raw: None}, after) is not None:
                            found.append(r)
                elif eqn.primitive.name in ELEMENTWISE:
                    out = eqn.outvars[0]
                    if out.aval.shape == raw.aval.shape and out not in seen | self.claimed:
                        seen.add(out)
                        stack.append(out)
        return sorted(set(found))

    def _is_free(self, made: Carrying) -> bool:
        """Whether all that its kernel reads can be there before all that it returns is read."""
        returned = {made.raw, *made.results, *(self.eqns[s].outvars[0] for s in made.sums)}
        if made.gradient is not None:
            returned.add(self.eqns[made.gradient[0]].outvars[0])
        if made.stores:
            returned.add(made.before.made[0])
        inner = {v for i in made.behind.equations for v in self.eqns[i].outvars}
        inner |= {v for i in made.before.equations for v in self.eqns[i].outvars}
        after = self.after(returned)
        read = {*made.before.rows, *made.before.vectors, *made.behind.rows, *made.behind.vectors}
        weight = self.eqns[made.product].invars[1]
        return not any(v in after for v in read) and (weight not in after or weight in inner)


def _is_product(matched: Matched) -> bool:
    """Whether a convolution is a product of rows."""
    c = matched.convolution
    ones = {*c.kernel, *c.strides, *c.dilation, c.groups}
    return c.channels_last and c.dtype in DTYPES and ones == {1} and not any(map(any, c.padding))


def _is_backward(eqn: JaxprEqn) -> bool:
    return "transpose(" in compat.name_stack(eqn)
