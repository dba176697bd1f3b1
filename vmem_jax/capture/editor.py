"""Editor: def-use chains of a flat jaxpr, and local rewrites of it.

The exact residual rules are written on it. It knows which equations are the backward pass's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from vmem_jax import jax_compat as compat
from vmem_jax.capture.flatten import drop_dead, inline
from vmem_jax.capture.primitives import Class, class_of
from vmem_jax.jax_compat import Atom, ClosedJaxpr, Literal, Var

# A JaxprEqn: JAX declares its atoms and types too loosely for a type checker.
Equation = Any

# Primitives that keep a constant fill, and those that can keep every element.
_FILLS = ("broadcast_in_dim", "convert_element_type", "reshape", "copy", "stop_gradient")
_VIEWS = ("transpose", "reshape", "squeeze", "broadcast_in_dim", "expand_dims")


class Editor:
    """A flat jaxpr with its def-use chains, and the edits that one rewrite makes to it.

    Attributes:
        eqns: the equations. Indices everywhere are into it.
        results: variables that the jaxpr returns.
        producer: index of the equation that defines a variable.
        late: equations that belong to the backward pass, or need one that does.
        backward: `late`, and the cheap forward equations that only the backward pass reads.
        replaced: equations in place of one.
        inserted: equations after one.
    """

    def __init__(self, closed: ClosedJaxpr) -> None:
        self.closed = closed
        self.eqns: Sequence[Equation] = compat.open_jaxpr(closed).eqns
        self.results = {v for v in compat.open_jaxpr(closed).outvars if isinstance(v, Var)}
        self.producer: dict[Var, int] = {}
        self.consumers: dict[Var, list[int]] = {}
        self.late: set[int] = set()
        self.replaced: dict[int, list[Equation]] = {}
        self.inserted: dict[int, list[Equation]] = {}
        for i, eqn in enumerate(self.eqns):
            for v in {v for v in eqn.invars if isinstance(v, Var)}:
                self.consumers.setdefault(v, []).append(i)
            if (
                "transpose(" in compat.name_stack(eqn)
                or eqn.primitive.name == "select_and_scatter_add"
                or not self.late.isdisjoint(self.producers(eqn))
            ):
                self.late.add(i)
            self.producer.update((v, i) for v in eqn.outvars)
        # A cheap forward equation that only the backward pass reads (a mask, a derivative) may as
        # well run there: what it reads counts as read by the backward pass. Not so through the
        # heavy ones, or a step that returns no loss would be backward from its first layer on.
        self.backward = set(self.late)
        for i in reversed(range(len(self.eqns))):
            if (
                class_of(self.eqns[i]) in (Class.VIEW, Class.FUSIBLE)
                and self.backward.issuperset(self.users_of(i))
                and self.results.isdisjoint(self.eqns[i].outvars)
            ):
                self.backward.add(i)

    def source(self, atom: Atom) -> Equation | None:
        """The equation that defines a value; None for literals, arguments and constants."""
        i = self.producer.get(atom) if isinstance(atom, Var) else None
        return None if i is None else self.eqns[i]

    def producers(self, eqn: Equation) -> list[int]:
        """Indices of the equations whose results an equation reads."""
        return [
            self.producer[v]
            for v in eqn.invars
            if not isinstance(v, Literal) and v in self.producer
        ]

    def users(self, var: Var) -> list[int]:
        """Indices of the equations that read a value."""
        return self.consumers.get(var, [])

    def users_of(self, i: int) -> list[int]:
        """Indices of the equations that read a result of equation `i`."""
        return [j for v in self.eqns[i].outvars for j in self.users(v)]

    def only_user(self, var: Var) -> int | None:
        """Index of the one equation that reads a value, None if it has several or is a result."""
        users = self.users(var)
        return users[0] if len(users) == 1 and var not in self.results else None

    def constant(self, atom: Atom) -> Any:
        """The number that fills an array, as a NumPy scalar of its dtype, or None."""
        return constant(atom, self.source)

    def edited(self) -> ClosedJaxpr:
        """The program after the edits, without what they left dead."""
        opened = compat.open_jaxpr(self.closed)
        eqns: list[Equation] = []
        for i, eqn in enumerate(self.eqns):
            eqns += self.replaced.get(i, [eqn]) + self.inserted.get(i, [])
        consts = compat.constants(self.closed)
        parts = (opened.constvars, consts, opened.invars, opened.outvars, eqns)
        return drop_dead(compat.close(*parts, like=self.closed))


def constant(atom: Atom, source: Callable[[Any], Equation | None]) -> Any:
    """The number that fills an array, as a NumPy scalar of its dtype, or None.

    Args:
      source: gives the equation that defines a value, or None.
    """
    if isinstance(atom, Literal):
        aval: Any = atom.aval
        return None if aval.shape else np.asarray(atom.val).astype(aval.dtype)
    eqn = source(atom)
    if eqn is None or eqn.primitive.name not in (*_FILLS, "sub"):
        return None
    values = [constant(a, source) for a in eqn.invars]
    if any(value is None for value in values):
        return None
    value = values[0] if len(values) == 1 else values[0] - values[1]
    return value.astype(eqn.outvars[0].aval.dtype)


def spliced(
    fn: Callable[..., jax.Array], args: Sequence[Atom], like: Equation, out: Var | None = None
) -> tuple[list[Equation], Var]:
    """Traces `fn` to equations on `args`, without calls, with the name and source line of `like`."""
    avals = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in args]
    traced = compat.open_jaxpr(inline(jax.make_jaxpr(fn)(*avals)))
    env: dict[Var, Atom] = dict(zip(traced.invars, args, strict=True))
    env[traced.outvars[0]] = out or compat.new_var(traced.outvars[0].aval)
    eqns = []
    for eqn in traced.eqns:
        env.update((v, compat.new_var(v.aval)) for v in eqn.outvars if v not in env)
        eqns.append(
            eqn.replace(
                invars=[v if isinstance(v, Literal) else env[v] for v in eqn.invars],
                outvars=[env[v] for v in eqn.outvars],
                source_info=like.source_info,
                ctx=like.ctx,
            )
        )
    return eqns, env[traced.outvars[0]]


def with_each_replaced(
    closed: ClosedJaxpr, rules: Callable[[ClosedJaxpr], Callable[[Equation], Sequence[Equation]]]
) -> ClosedJaxpr:
    """`closed` with what a rule gives in place of each equation, in the bodies of its loops, too.

    Args:
      rules: makes the rule of `closed`, and one of each body.
    """
    opened, rule = compat.open_jaxpr(closed), rules(closed)
    eqns: list[Equation] = []
    for eqn in opened.eqns:
        if eqn.primitive.name == "scan":
            body = with_each_replaced(eqn.params["jaxpr"], rules)
            eqns.append(eqn.replace(params={**eqn.params, "jaxpr": body}))
        else:
            eqns += rule(eqn)
    parts = opened.constvars, compat.constants(closed), opened.invars, opened.outvars, eqns
    return compat.close(*parts, like=closed)


def is_view(eqn: Equation) -> bool:
    """Whether an equation only rearranges all elements of its input."""
    (x, *rest), y = eqn.invars, eqn.outvars[0]
    if rest or isinstance(x, Literal):
        return False
    if eqn.primitive.name == "reduce_sum":  # over dimensions of size one, as vmap leaves them
        return all(x.aval.shape[d] == 1 for d in eqn.params["axes"])
    permutes = eqn.primitive.name == "reshape" and eqn.params["dimensions"] is not None
    return eqn.primitive.name in _VIEWS and x.aval.size == y.aval.size and not permutes
