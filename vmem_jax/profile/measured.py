"""measured: rates and costs from the device's file; what it lacks is measured and added."""

from __future__ import annotations

import jax

from vmem_jax.capture.capture import Captured
from vmem_jax.core.cards import machine_for
from vmem_jax.core.costs import Costs, analytic
from vmem_jax.core.machine import Machine
from vmem_jax.profile.calibrate import Timing
from vmem_jax.profile.machine import measure
from vmem_jax.profile.steps import (
    SECONDS,
    Progress,
    StepProfile,
    distinct_parts,
    profile_steps,
)
from vmem_jax.profile.store import Measured, Store, identity
from vmem_jax.progress import doing


def measured_machine(
    device: jax.Device,
    *,
    refresh: bool = False,
    on_progress: Progress = lambda done, total, what: None,
) -> Machine:
    """The rates of `device`: from its file, or measured now (some seconds) and kept there.

    Args:
      refresh: measure everything again.
      on_progress: called with the number of measurements done, their total, and the next one's name.
    """
    store = Store(identity(device))
    machine = None if refresh else store.load().machine
    if machine is None:
        machine = measure(device, on_progress=on_progress)
        store.keep(Measured(machine))
    return machine


def measured_costs(
    captured: Captured,
    device: jax.Device,
    *,
    machine: Machine | None = None,
    seconds: float = SECONDS,
    refresh: bool = False,
    on_progress: Progress = lambda done, total, what: None,
) -> StepProfile:
    """Costs of `captured` on `device`. Steps that the device's file lacks are timed and added to it.

    Args:
      machine: the roofline of steps that are not timed (default: `measured_machine`).
      seconds: seconds after which no further step is timed.
      refresh: time every step again.
      on_progress: as in `profile_steps`.
    """
    machine = machine or measured_machine(device)
    store = Store(identity(device))
    timings: dict[str, Timing] = {} if refresh else dict(store.load().steps)
    before = dict(timings)
    try:
        return profile_steps(
            captured, machine, device, timings, seconds=seconds, on_progress=on_progress
        )
    finally:  # what was timed before an interruption is kept, too
        new = {key: timing for key, timing in timings.items() if key not in before}
        if new:
            store.keep(Measured(steps=new))


def known_costs(captured: Captured, device: jax.Device) -> Costs | None:
    """Costs from the file of `device` alone; None if it has no step of this program."""
    known = Store(identity(device)).load()
    if not known.steps:
        return None
    found = distinct_parts(captured, device.platform)
    if not any(key in known.steps for key in found.parts):
        return None
    machine = known.machine or machine_for(device.device_kind)
    return found.costs(captured.program, machine, known.steps)


def costs_of(
    captured: Captured, device: jax.Device, *, machine: Machine | None, profile: bool | None
) -> Costs:
    """Costs of `captured` on `device`, measured or by the roofline.

    Args:
      machine: the roofline; by default the measured one, or that of the device's name.
      profile: True measures what is not known, None uses what is known, False ignores it.
    """
    if profile:
        with doing("profiling steps"):
            return measured_costs(captured, device, machine=machine).costs
    if profile is None and machine is None and (known := known_costs(captured, device)):
        return known
    return analytic(captured.program, machine or machine_for(device.device_kind))
