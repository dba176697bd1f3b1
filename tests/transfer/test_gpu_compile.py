"""What XLA:GPU makes of the four calls, compiled for an H200 that need not be there."""

import re

import jax
import pytest
import transfer_cases as cases

from vmem_jax.prove.targets import target
from vmem_jax.transfer import extension
from vmem_jax.transfer.arena import Arena

pytestmark = pytest.mark.gpu_compile


@pytest.fixture
def compiled():
    """Compiles a step for the card; skips where the CUDA handlers were not built."""
    card = target("h200")  # first, so that JAX misses no driver when it looks for devices
    if "CUDA" not in extension.load().targets():
        pytest.skip("the extension was built without CUDA")
    x = jax.ShapeDtypeStruct((cases.COUNT,), "float32", sharding=card.sharding())
    return lambda step: jax.jit(step).lower(x).compile()


def calls(text):
    return re.findall(r'custom_call_target="vmem_jax_(\w+)"', text)


def temporaries(executable):
    return executable.memory_analysis().temp_size_in_bytes / cases.NBYTES


def test_temporaries_fall_and_the_order_stays(compiled):
    with Arena(cases.layout()) as arena:
        parked = compiled(cases.parking_step(arena))
    assert temporaries(compiled(cases.plain_step)) > cases.LAYERS
    assert temporaries(parked) < 3
    there, back = ["offload_start", "offload_done"], ["fetch_start", "fetch_done"]
    assert calls(parked.as_text()) == there * cases.LAYERS + back * cases.LAYERS


def test_loops_keep_their_calls_and_move_no_buffer(compiled):
    with Arena(cases.STACK) as arena:
        parked = compiled(cases.looping_step(arena))
    text = parked.as_text()
    assert sorted(calls(text)) == ["fetch_done", "fetch_start", "offload_done", "offload_start"]
    [start] = re.findall(r"%(\S+) = f32\S* custom-call.*vmem_jax_fetch_start", text)
    [operand] = re.findall(r"custom-call\(%(\S+)\), custom_call_target=.vmem_jax_fetch_done", text)
    assert "copy" not in operand, (start, operand)
    assert temporaries(parked) < temporaries(compiled(cases.looping_step(None))) - cases.LAYERS / 2
