"""draws: the kernels in which XLA:GPU makes random values.

A threefry generator makes every word of its key and of the word's position, so XLA fuses it like any
chain of elementwise operations with what makes a value of the words: a dropout mask is written by a
kernel that reads a key, and neither positions nor words are in memory. Nothing is drawn twice,
though: what such a kernel makes exists, where a cheap value would be computed again by each reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet

from vmem_jax.capture.bits import pack_p
from vmem_jax.capture.fused_reads import Values
from vmem_jax.capture.primitives import ELEMENTWISE, Class, class_of
from vmem_jax.capture.random_bits import can_slice
from vmem_jax.jax_compat import JaxprEqn, Var

_SMALL_NBYTES = 4096


def draws_words(eqn: JaxprEqn) -> bool:
    """Whether `eqn` draws random words, each by itself."""
    name = eqn.primitive.name
    return name in ("threefry2x32", "random_part") or (name == "random_bits" and can_slice(eqn))


def drawn_values(eqns: Iterable[JaxprEqn]) -> set[Var]:
    """What is computed of random words element by element."""
    found: set[Var] = set()
    for eqn in eqns:
        moves = eqn.primitive.name in ELEMENTWISE or class_of(eqn) is Class.VIEW
        given = (a for a in eqn.invars if isinstance(a, Var))
        if draws_words(eqn) or (moves and not found.isdisjoint(given)):
            found.update(eqn.outvars)
    return found


def draws(values: Values, outputs: AbstractSet[Var]) -> Iterator[tuple[int, int]]:
    """Pairs of an equation that draws words, and the last of its kernel: behind it, that which makes
    the smallest value of these words alone.

    Args:
      outputs: results of the program.
    """
    for i, eqn in enumerate(values.eqns):
        if draws_words(eqn):
            yield i, _last(i, values, outputs)


def _last(i: int, values: Values, outputs: AbstractSet[Var]) -> int:
    last, made = i, values.eqns[i].outvars
    size = values.nbytes[made[0]]
    while outputs.isdisjoint(made):
        readers = {r for v in made for r in values.readers.get(v, ())}
        if len(readers) != 1:
            break
        [j] = readers
        eqn, kind = values.eqns[j], values.classes[j]
        elementwise = kind is Class.FUSIBLE and eqn.primitive.name in ELEMENTWISE
        pads = eqn.primitive.name == "pad"  # a mask, once for all that read it (`padded_rows`)
        fuses = elementwise or pads or eqn.primitive is pack_p
        others = (a for a in values.operands[j] if a not in made)
        if not (fuses or kind is Class.VIEW) or not all(_is_small(a, values) for a in others):
            break
        made = eqn.outvars
        if fuses and (pads or values.nbytes[made[0]] <= size):
            last, size = j, values.nbytes[made[0]]
    return last


def _is_small(v: Var, values: Values) -> bool:
    """Whether `v` is next to nothing, or spread from that."""
    while values.nbytes[v] > _SMALL_NBYTES:
        i = values.maker.get(v)
        spread = i is not None and values.eqns[i].primitive.name == "broadcast_in_dim"
        if i is None or not (spread or values.classes[i] is Class.VIEW):
            return False
        if not values.operands[i]:
            return True
        v = values.operands[i][0]
    return True
