"""kinds: the phase of each kernel of a step, and what each of its values holds."""

from __future__ import annotations

from collections.abc import Sequence

from vmem_jax import jax_compat as compat
from vmem_jax.capture.kernels import Kernel
from vmem_jax.core.program import Kind, Phase
from vmem_jax.jax_compat import Var


def phases_of(kernels: Sequence[Kernel], eqns: Sequence[compat.JaxprEqn]) -> list[Phase]:
    """Backward: AD says so. Update: neither differentiated nor before any backward kernel."""
    after_backward: set[Var] = set()
    phases = []
    for kernel in kernels:
        stack = compat.name_stack(eqns[kernel.root])
        late = any(v in after_backward for v in kernel.reads)
        if "transpose(" in stack:
            phase = Phase.BACKWARD
        elif late and "jvp(" not in stack:
            phase = Phase.UPDATE
        else:
            phase = Phase.FORWARD
        if late or phase is Phase.BACKWARD:
            after_backward.update(kernel.writes)
        phases.append(phase)
    return phases


def kinds_of(
    kernels: Sequence[Kernel],
    phases: Sequence[Phase],
    index: dict[Var, int],
    arguments: int,
    inputs: int,
    outputs: set[int],
) -> dict[int, Kind]:
    """What every buffer holds, derived from who reads it."""
    read_in: dict[int, set[Phase]] = {}
    kinds: dict[int, Kind] = {}
    for kernel, phase in zip(kernels, phases, strict=True):
        for v in kernel.reads:
            read_in.setdefault(index[v], set()).add(phase)
        for v in kernel.writes:
            made = Kind.ACTIVATION if phase is Phase.FORWARD else Kind.GRADIENT
            kinds[index[v]] = Kind.OUTPUT if index[v] in outputs else made
    for b in range(inputs):
        where = read_in.get(b, set())
        if b >= arguments:
            kinds[b] = Kind.CONSTANT
        elif Phase.UPDATE not in where:
            kinds[b] = Kind.BATCH
        else:
            kinds[b] = Kind.PARAMETER if Phase.FORWARD in where else Kind.OPTIMISER
    return kinds
