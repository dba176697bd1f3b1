"""compression: a captured step that compresses values between its forward and its backward pass.

Each such value gets two equations: it is compressed after its last reader in the forward pass and
decompressed before its first reader in the backward pass, and the backward pass reads the result. The
step is captured again, so for plans a smaller value is idle in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import jax.numpy as jnp

from vmem_jax import jax_compat as compat
from vmem_jax.capture.calls import Calls
from vmem_jax.capture.capture import Captured
from vmem_jax.capture.editor import Editor
from vmem_jax.capture.flatten import flatten
from vmem_jax.capture.primitives import Class, class_of, nbytes
from vmem_jax.core.program import DECOMPRESS, Phase
from vmem_jax.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Var
from vmem_jax.rewrite.compressed_stacks import CompressedStacks
from vmem_jax.transfer.compression import Site, compress, decompress


def compressible(captured: Captured, share: float) -> tuple[int, ...]:
    """The buffers of `captured` that can be compressed: floats that the forward pass makes for the
    backward pass, on one device, and stacks of such. What the forward pass makes of a gradient that
    it takes itself is left out.

    Args:
      share: smaller buffers than this share of all temporaries are omitted.
    """
    program = captured.program
    if captured.shards.device_count > 1 or captured.sub_batches is not None:
        return ()
    resident = program.is_resident
    least = share * sum(b.nbytes for i, b in enumerate(program.buffers) if not resident[i])
    late, found = Editor(captured.flat).late, []
    for b, v in enumerate(captured.variables):
        maker, aval = program.producer[b], cast(Any, v.aval)
        if maker < 0 or resident[b] or program.buffers[b].nbytes < max(least, 1):
            continue
        if not program.buffers[b].movable or not jnp.issubdtype(aval.dtype, jnp.floating):
            continue
        phases = {program.steps[r].phase for r in program.readers[b]}
        is_early = program.steps[maker].equations[-1] not in late
        if is_early and program.steps[maker].phase is Phase.FORWARD and Phase.BACKWARD in phases:
            found.append(b)
    return tuple(found)


def slices_of(captured: Captured, b: int) -> int:
    """The slices of buffer `b` that are compressed each for itself; 1 where it is as a whole. Of a
    loop whose user unrolls it, XLA may reorder the calls of its iterations."""
    eqns = compat.open_jaxpr(captured.flat).eqns
    v = captured.variables[b]
    loops = [e for e in eqns if e.primitive.name == "scan" and v in (*e.invars, *e.outvars)]
    in_order = all(loop.params["unroll"] in (1, False) for loop in loops)
    return captured.program.buffers[b].slices if in_order else 1


def rectified(captured: Captured, buffers: Sequence[int]) -> tuple[int, ...]:
    """The buffers among `buffers` that have zeros from a ReLU or a product with a mask."""
    editor = Editor(captured.flat)
    return tuple(b for b in buffers if _has_zeros(editor, captured.variables[b]))


def _has_zeros(editor: Editor, v: Atom) -> bool:
    eqn = editor.source(v)
    if eqn is None:
        return False
    name, operands = eqn.primitive.name, eqn.invars
    if name == "scan":
        inside = flatten(eqn.params["jaxpr"])
        result = compat.open_jaxpr(inside).outvars[eqn.outvars.index(v)]
        return _has_zeros(Editor(inside), result)
    if name == "optimization_barrier":
        return _has_zeros(editor, operands[eqn.outvars.index(v)])
    if class_of(eqn) is Class.VIEW or name in ("convert_element_type", "min"):
        return any(_has_zeros(editor, a) for a in operands)
    if name in ("max", "select_n", "clamp"):
        return any(editor.constant(a) == 0 for a in operands)
    return name == "mul" and any(_is_mask(editor, a) for a in operands)


def _is_mask(editor: Editor, a: Atom) -> bool:
    eqn = editor.source(a)
    if eqn is None or eqn.primitive.name not in ("convert_element_type", "broadcast_in_dim"):
        return False
    operand = eqn.invars[0]
    return operand.aval.dtype == jnp.bool_ or _is_mask(editor, operand)


def compressed(captured: Captured, sizes: Sequence[tuple[int, int]]) -> Captured:
    """`captured` with each buffer of `sizes` compressed into the given capacity in bytes."""
    sizes = tuple(sorted(sizes))
    return captured.with_compressed(_Compressor(captured, sizes).run(), sizes)


def sites(captured: Captured) -> tuple[Site, ...]:
    """The compressed tensors of `captured`, in the order of their sites."""
    found = {}

    def look(flat: ClosedJaxpr, slots: int) -> None:
        for eqn in compat.open_jaxpr(flat).eqns:
            if eqn.primitive.name == DECOMPRESS:
                [c], [x] = eqn.invars, eqn.outvars
                found[eqn.params["site"]] = Site(nbytes(x.aval), c.aval.size, slots)
            elif eqn.primitive.name == "scan" and eqn.effects:
                look(eqn.params["jaxpr"], eqn.params["length"])

    look(captured.flat, 1)
    return tuple(found[site] for site in sorted(found))


class _Compressor:
    def __init__(self, captured: Captured, sizes: Sequence[tuple[int, int]]) -> None:
        self.captured = captured
        self.editor = Editor(captured.flat)
        self.exists = set(captured.variables)
        self.equations: list[JaxprEqn] = []
        self.calls = Calls(self.equations.append)
        sites = {captured.variables[b]: (site, n) for site, (b, n) in enumerate(sizes)}
        slices = {captured.variables[b]: slices_of(captured, b) for b, _ in sizes}
        self.site = {v: site for v, site in sites.items() if slices[v] == 1}
        self.stacks = CompressedStacks(
            {v: (s, n // slices[v]) for v, (s, n) in sites.items() if slices[v] > 1}
        )
        self.held: dict[Var, Var] = {}  # value -> what it is compressed into
        self.late: dict[Var, Atom] = {}  # value -> what the backward pass reads in its place
        self.behind: dict[int, list[Var]] = {}  # equation -> what is compressed behind it
        for b, _ in sizes:
            if captured.variables[b] not in self.site:
                continue
            self.behind.setdefault(self._last_in_forward(b), []).append(captured.variables[b])

    def run(self) -> ClosedJaxpr:
        opened = compat.open_jaxpr(self.captured.flat)
        for i, eqn in enumerate(self.editor.eqns):
            if i in self.editor.late:
                eqn = eqn.replace(invars=[self._in_backward(a, eqn) for a in eqn.invars])
            self.equations.append(self.stacks.emitted(eqn))
            for v in self.behind.get(i, ()):
                site, capacity = self.site[v]
                call = lambda x, s=site, n=capacity: compress(x, store=0, site=s, capacity=n)
                [self.held[v]] = self.calls.bind(call, [v], eqn)
        return compat.close(
            opened.constvars,
            compat.constants(self.captured.flat),
            opened.invars,
            opened.outvars,
            self.equations,
            self.captured.flat,
        )

    def _last_in_forward(self, b: int) -> int:
        """The last equation of the forward pass that makes or reads buffer `b`."""
        program, late = self.captured.program, self.editor.late
        steps = [program.producer[b], *program.readers[b]]
        ends = [program.steps[s].equations[-1] for s in steps]
        return max(end for end in ends if end not in late)

    def _in_backward(self, atom: Atom, like: JaxprEqn) -> Atom:
        """The variable that replaces `atom` in the backward pass, of which `like` is an equation."""
        if isinstance(atom, Literal):
            return atom
        if atom in self.site and atom not in self.late:
            shape: Any = atom.aval
            site = self.site[atom][0]
            call = lambda c: decompress(c, shape, store=0, site=site)
            [self.late[atom]] = self.calls.bind(call, [self.held[atom]], like)
        if atom in self.late:
            return self.late[atom]
        self.late[atom] = atom
        i = self.editor.producer.get(atom)
        # what is cheap and waits nowhere is computed in the backward pass, too, and from there
        if i is None or i in self.editor.late or atom in self.exists:
            return atom
        eqn = self.editor.eqns[i]
        if class_of(eqn) not in (Class.VIEW, Class.FUSIBLE):
            return atom
        invars = [self._in_backward(a, like) for a in eqn.invars]
        if all(a is b for a, b in zip(invars, eqn.invars, strict=True)):
            return atom
        outs = [compat.new_var(v.aval) for v in eqn.outvars]
        self.equations.append(eqn.replace(invars=invars, outvars=outs))
        self.late.update(zip(eqn.outvars, outs, strict=True))
        return self.late[atom]
