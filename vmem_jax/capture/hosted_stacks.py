"""hosted_stacks: arguments in host memory that loops read, and write, a slice an iteration.

A stack of what each scanned layer has (its weights, its moments) may lie in host memory. Where all
that reads it are loops, each iteration fetches its own slice, and sends what replaces it back to
where it came from: the stack itself never is on the device. In the jaxpr the argument then has the
type of an array in host memory, and so has all that is carried of it. `jax.device_put` takes a slice
to the device, and the new one to host memory; XLA makes an asynchronous copy of each, to or from
where the slice lies in the stack, if that follows from the loop's own counter (0.11.2; `updates`).

A slice is fetched as soon as an iteration begins, whatever barriers stand in front of its readers:
the copy hides under all that comes before them. So no barrier holds a stack, but for those of
`hosted_pace`. What replaces a slice is written after that was read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from vmem_jax import jax_compat as compat
from vmem_jax.capture.calls import Calls
from vmem_jax.capture.hosted_pace import paced
from vmem_jax.capture.locations import location_of
from vmem_jax.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Var


class ReadWhole(Exception):
    """Why a stack has to be on the device as a whole, for people."""


def why_whole(flat: ClosedJaxpr, argument: int, result: int | None) -> str:
    """Why hosted `argument` is read or made as a whole; "" if all of it is, slice by slice.

    Args:
      flat: what is as yet on the device.
      result: the index of the result that replaces it; None if it is only read.
    """
    opened = compat.open_jaxpr(flat)
    v = opened.invars[argument]
    if not any(v in _variables(eqn.invars) for eqn in opened.eqns):
        return "nothing reads it"
    try:
        level = _Level({v}, {})
        level.take(opened.eqns)
        for o, out in enumerate(opened.outvars):
            there = isinstance(out, Var) and out in level.hosted
            if there and o != result:
                return "it is a result on the device, too"
            if not there and o == result:
                return "what replaces it is made as a whole"
    except ReadWhole as found:
        return str(found)
    return ""


def with_hosted_stacks(flat: ClosedJaxpr, arguments: Iterable[int]) -> ClosedJaxpr:
    """`flat` with these arguments, of which `why_whole` says nothing, in host memory."""
    opened = compat.open_jaxpr(flat)
    hosted = {opened.invars[i]: _in_host_memory(opened.invars[i]) for i in arguments}
    if not hosted:
        return flat
    level = _Level(set(hosted), hosted)
    level.take(opened.eqns)
    return compat.close(
        opened.constvars,
        compat.constants(flat),
        [hosted.get(v, v) for v in opened.invars],
        [level.read(a) for a in opened.outvars],
        level.equations,
        flat,
    )


class _Level:
    """The equations of a step, or of the body of a loop in it, with stacks in host memory.

    Attributes:
      hosted: those of its variables that lie there.
      equations: the new ones.
    """

    def __init__(self, hosted: Iterable[Var], env: Mapping[Var, Var]) -> None:
        self.hosted = {*hosted}
        self.equations: list[JaxprEqn] = []
        self._env: dict[Var, Atom] = {**env}
        self._calls = Calls(self.equations.append)
        self._origin: dict[Var, Atom] = {}  # of what went through barriers
        self._written: set[Any] = set()  # stacks with a new slice
        self._slices: dict[tuple, Var] = {}  # (stack, where, sizes) -> on the device

    def read(self, atom: Atom) -> Any:
        """What stands for `atom`."""
        return atom if isinstance(atom, Literal) else self._env.get(atom, atom)

    def take(self, eqns: Sequence[JaxprEqn]) -> None:
        """Emits `eqns`.

        Raises:
          ReadWhole: one of them cannot take a stack in host memory.
        """
        for eqn in eqns:
            name, hosted = eqn.primitive.name, self.hosted.intersection(_variables(eqn.invars))
            if name == "optimization_barrier":
                self._barrier(eqn)
            elif not hosted:
                self.equations.append(eqn.replace(invars=[self.read(a) for a in eqn.invars]))
            elif name == "reshape" and eqn.params["dimensions"] is None:
                self._reshape(eqn)
            elif name == "dynamic_slice":
                self._slice(eqn)
            elif name == "dynamic_update_slice" and hosted == {eqn.invars[0]}:
                self._update(eqn)
            elif name == "scan" and not eqn.effects:
                self._scan(eqn)
            else:
                raise ReadWhole(f"{location_of(eqn)} reads all of it")

    def on_device(self, v: Var, like: JaxprEqn) -> None:
        """Slice `v` is fetched to where the equations to come read it."""
        [self._env[v]] = self._put(self._env.get(v, v), jax.memory.Space.Device, like)

    def _put(self, x: Atom, where: Any, like: JaxprEqn) -> list[Any]:
        return self._calls.bind(lambda x: jax.device_put(x, where), [x], like)

    def _barrier(self, eqn: JaxprEqn) -> None:
        held = []
        pace = not {*self._slices.values()}.isdisjoint(map(self.read, eqn.invars))
        for a, v in zip(eqn.invars, eqn.outvars, strict=True):
            if pace and self.read(a) in self._written:
                there = _in_host_memory(v)
                self._env[v] = there
                self._written.add(there)
                self.hosted.add(v)
                held.append((self.read(a), there))
            elif isinstance(a, Var) and a in self.hosted:
                self.hosted.add(v)
                self._env[v] = self.read(a)
            else:
                held.append((self.read(a), v))
                self._origin[v] = self._origin.get(a, a) if isinstance(a, Var) else a
        if held:
            ins, outs = zip(*held, strict=True)
            self.equations.append(
                compat.new_equation(lax.optimization_barrier_p, ins, outs, {}, eqn)
            )

    def _reshape(self, eqn: JaxprEqn) -> None:
        [made] = eqn.outvars
        there = _in_host_memory(made)
        self.equations.append(eqn.replace(invars=[self.read(eqn.invars[0])], outvars=[there]))
        self._env[made] = there
        self.hosted.add(made)

    def _slice(self, eqn: JaxprEqn) -> None:
        stack, *starts = eqn.invars
        starts = [self._origin.get(a, a) if isinstance(a, Var) else a for a in starts]
        at = tuple(str(a) if isinstance(a, Literal) else self.read(a) for a in starts)
        key = self.read(stack), at, eqn.params["slice_sizes"]
        [v] = eqn.outvars
        if key not in self._slices:
            there = _in_host_memory(v)
            invars = [self.read(a) for a in (stack, *starts)]
            self.equations.append(eqn.replace(invars=invars, outvars=[there]))
            [self._slices[key]] = self._put(there, jax.memory.Space.Device, eqn)
        self._env[v] = self._slices[key]

    def _update(self, eqn: JaxprEqn) -> None:
        stack, x, *starts = map(self.read, eqn.invars)
        read = {part for (of, *_), part in self._slices.items() if of is stack}
        if not read <= self._leading_to(x):  # behind these, or XLA would copy the stack
            x, *_ = self._calls.fence([x, *read], eqn)
        [there] = self._put(x, jax.memory.Space.Host, eqn)
        made = _in_host_memory(eqn.outvars[0])
        self.equations.append(eqn.replace(invars=[stack, there, *starts], outvars=[made]))
        self._env[eqn.outvars[0]] = made
        self._written.add(made)
        self.hosted.add(eqn.outvars[0])

    def _leading_to(self, x: Atom) -> set[Atom]:
        """What `x` is made of, and itself."""
        found = {x}
        for eqn in reversed(self.equations):
            if not found.isdisjoint(eqn.outvars):
                found.update(_variables(eqn.invars))
        return found

    def _scan(self, eqn: JaxprEqn) -> None:
        consts, carry = compat.scan_counts(eqn)
        closed = eqn.params["jaxpr"]
        body = compat.open_jaxpr(closed)
        given = [p for p, a in enumerate(eqn.invars) if isinstance(a, Var) and a in self.hosted]
        if any(p < consts for p in given):
            raise ReadWhole(f"{location_of(eqn)} reads all of it in each iteration")
        env = {body.invars[p]: _in_host_memory(body.invars[p]) for p in given}
        carried = [p for p in given if p < consts + carry]
        inner = _Level({body.invars[p] for p in carried}, env)
        for p in given:
            if p >= consts + carry:
                inner.on_device(body.invars[p], eqn)
        eqns, outs = paced(body.eqns, body.outvars, {body.invars[p] for p in carried})
        inner.take(eqns)
        there = {n for n, a in enumerate(outs) if isinstance(a, Var) and a in inner.hosted}
        if there != {p - consts for p in carried}:
            raise ReadWhole(f"{location_of(eqn)} makes all of it in each iteration")
        made = [_in_host_memory(v) if n in there else v for n, v in enumerate(eqn.outvars)]
        new = compat.close(
            body.constvars,
            compat.constants(closed),
            [env.get(v, v) for v in body.invars],
            [inner.read(a) for a in outs],
            inner.equations,
            closed,
        )
        invars = [self.read(a) for a in eqn.invars]
        # in an unrolled loop XLA would take slices of slices, and by the host's processor
        params = {**eqn.params, "jaxpr": new, "unroll": 1}
        self.equations.append(eqn.replace(invars=invars, outvars=made, params=params))
        for n in there:
            self._env[eqn.outvars[n]] = made[n]
            self.hosted.add(eqn.outvars[n])


def _variables(atoms: Sequence[Atom]) -> set[Var]:
    return {a for a in atoms if isinstance(a, Var)}


def _in_host_memory(v: Var) -> Var:
    return compat.new_var(compat.in_host_memory(v.aval))
