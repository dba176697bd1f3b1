"""The measured machine and steps on a GPU. `pytest -m gpu`."""

import jax
import pytest

from vmem_jax.capture import capture
from vmem_jax.core.cards import machine_for
from vmem_jax.models import job
from vmem_jax.profile.machine import measure
from vmem_jax.profile.steps import profile_steps
from vmem_jax.profile.timing import dispatch_seconds

pytestmark = pytest.mark.gpu


@pytest.fixture
def device():
    try:
        return jax.devices("gpu")[0]
    except RuntimeError as error:
        pytest.skip(f"no GPU: {error}")


def test_rates_make_sense(device):
    machine = measure(device)
    assert machine.flops["bfloat16"] > machine.flops["float32"] > machine.flops[""]
    assert machine.bandwidth > machine.link_both >= max(machine.link_out, machine.link_in)
    assert machine.link_both <= 1.01 * (machine.link_out + machine.link_in)
    assert 1e-7 < machine.launch < 1e-4 and machine.pinning > 0


def test_every_step_of_a_model_is_timed(device):
    work = job("alexnet", batch=32, image=64, classes=10)
    found = capture(jax.jit(work.step).trace(work.state_shapes(), work.batch).jaxpr)
    profile = profile_steps(found, machine_for(device.device_kind), device, {}, seconds=300)
    assert profile.measured == profile.distinct and not profile.untimed
    assert all(s > 0 for s in profile.costs.seconds if s) and sum(profile.costs.seconds) < 1


def test_a_device_waits_some_microseconds_between_programs(device):
    assert 0 < dispatch_seconds(device).program < 100e-6
