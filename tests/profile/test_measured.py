"""The machine, and the way from a file or the device to `jit` and the command line."""

import dataclasses
import itertools
import json
import logging
import math
import re
import types

import jax
import jax.numpy as jnp
import pytest

import vmem_jax
from vmem_jax import cli
from vmem_jax.capture import capture
from vmem_jax.core.cards import CARDS
from vmem_jax.core.costs import Source
from vmem_jax.profile import link as link_module
from vmem_jax.profile import machine as machine_module
from vmem_jax.profile import measured as measured_module
from vmem_jax.profile import timing as timing_module
from vmem_jax.profile.link import link_rates
from vmem_jax.profile.machine import Sizes, measure
from vmem_jax.profile.measured import known_costs, measured_costs, measured_machine
from vmem_jax.profile.steps import distinct_parts
from vmem_jax.profile.store import Measured, Store, identity

TINY = Sizes(16, (1, 8, 4), 1 << 12)


@pytest.fixture
def device():
    return jax.devices("cpu")[0]


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.setenv("VMEM_JAX_CACHE", str(tmp_path))
    monkeypatch.setitem(machine_module.SIZES, "cpu", TINY)
    monkeypatch.setattr(timing_module, "_LOOP_SECONDS", 1e-4)
    monkeypatch.setattr(timing_module, "_PROGRAM_SECONDS", 2e-5)


def train(w, x):
    loss = lambda w: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))
    return w - 0.1 * jax.grad(loss)(w)


SHAPES = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 2


def captured():
    return capture(jax.jit(train).trace(*SHAPES).jaxpr, platform="cpu")


def kept(device):
    return Store(identity(device)).load()


def test_a_measured_machine_is_complete(device):
    seen = []
    machine = measure(device, on_progress=lambda *a: seen.append(a))
    numbers = [*machine.flops.values(), *machine.convolutions.values(), machine.bandwidth]
    numbers += [machine.launch, machine.link_out, machine.link_in, machine.link_both]
    numbers += [machine.pinning, machine.memory]
    assert all(math.isfinite(n) and n > 0 for n in numbers)
    assert {"", "float32", "bfloat16"} <= set(machine.flops)
    assert {"float32", "bfloat16"} <= set(machine.convolutions)
    assert seen[-1][0] == seen[-1][1] == len(seen) - 1


def test_what_cannot_be_measured_keeps_the_shipped_figure(device, monkeypatch, caplog):
    def fails(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no")

    monkeypatch.setattr(machine_module, "link_rates", fails)
    monkeypatch.setattr(machine_module, "_bandwidth", fails)
    with caplog.at_level(logging.WARNING, logger="absl"):
        machine = measure(device)
    shipped = CARDS["cpu"].machine
    assert (machine.bandwidth, machine.link_both) == (shipped.bandwidth, shipped.link_both)
    assert "device memory" in caplog.text and "the link" in caplog.text


def test_the_link_of_a_cpu(device):
    rates = link_rates(device, 1 << 12)
    assert all(r > 0 for r in dataclasses.astuple(rates))


def test_both_directions_by_our_own_calls(device):
    if "cpu" not in link_module._extension_platforms():
        pytest.skip("the native extension is not built here")
    both, pinning = link_module._arena_seconds(device, jnp.ones(1 << 12))
    assert both > 0 and pinning > 0


def test_the_machine_is_measured_once_and_again_on_demand(device, monkeypatch):
    first = measured_machine(device)
    assert kept(device).machine == first
    calls = []
    other = dataclasses.replace(first, bandwidth=1.0)
    monkeypatch.setattr(measured_module, "measure", lambda *a, **k: calls.append(1) or other)
    assert measured_machine(device) == first and not calls
    assert measured_machine(device, refresh=True) == other == kept(device).machine


def are_42_each(costs):
    """Whether every part took 42 s: neighbours together, a heavy step that has none alone."""
    found = distinct_parts(captured(), "cpu")
    together = [steps for steps, _ in found.together]
    among = {s for steps in together for s in steps}
    alone = [(s,) for s, key in enumerate(found.alone) if key and s not in among]
    totals = [sum(costs.seconds[s] for s in steps) for steps in (*together, *alone)]
    return totals == pytest.approx([42.0] * len(totals))


def test_steps_are_timed_once_and_again_on_demand(device, monkeypatch):
    first = measured_costs(captured(), device)
    assert first.reused == 0 and len(kept(device).steps) == first.distinct
    again = measured_costs(captured(), device)
    assert again.reused == again.distinct and again.costs == first.costs
    monkeypatch.setattr("vmem_jax.profile.steps.time_step", lambda *a, **k: 42.0)
    fresh = measured_costs(captured(), device, refresh=True)
    assert fresh.reused == 0 and are_42_each(fresh.costs)
    assert {t.seconds for t in kept(device).steps.values()} == {42.0}


def of_another(**changes):
    return lambda text: json.dumps({**json.loads(text), **changes})


@pytest.mark.parametrize(
    "spoil, says",
    [
        (lambda text: text[:100], "damaged"),
        (lambda text: '{"name": "somebody else\'s"}', "no profile of vmem_jax"),
        (of_another(device="NVIDIA H200"), "another device"),
        (of_another(versions={"jax": "0.1"}), "other versions"),
    ],
    ids=["corrupt", "foreign", "another device", "another version"],
)
def test_a_file_that_cannot_be_trusted_is_said_and_measured_again(device, caplog, spoil, says):
    measured = lambda: measured_costs(captured(), device, machine=CARDS["cpu"].machine)
    measured()
    path = Store(identity(device)).path
    path.write_text(spoil(path.read_text()))
    with caplog.at_level(logging.WARNING, logger="absl"):
        assert known_costs(captured(), device) is None
        assert measured().reused == 0
    assert says in caplog.text
    assert known_costs(captured(), device) is not None


def test_what_was_timed_before_an_interruption_is_kept(device):
    def interrupt(done, total, what):
        if done == 2:
            raise KeyboardInterrupt

    machine = measured_machine(device)
    with pytest.raises(KeyboardInterrupt):
        measured_costs(captured(), device, machine=machine, on_progress=interrupt)
    assert len(kept(device).steps) == 2


def test_a_directory_that_cannot_be_written_is_said(device, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VMEM_JAX_CACHE", str(tmp_path / "file" / "directory"))
    with caplog.at_level(logging.WARNING, logger="absl"):
        assert measured_costs(captured(), device, machine=CARDS["cpu"].machine).measured
    assert "nothing is kept" in caplog.text


# -- jit


def costs_of(step, x):
    return step._entry_for((x, x), {}, None).costs


def test_jit_uses_what_was_measured_and_never_measures_unasked(device, monkeypatch):
    x = jnp.ones((16, 16))
    monkeypatch.setattr("vmem_jax.profile.steps.time_step", None)
    costs = costs_of(vmem_jax.jit(train, budget="1MB"), x)
    assert costs.sources == () and not kept(device).steps
    monkeypatch.setattr("vmem_jax.profile.steps.time_step", lambda *a, **k: 42.0)
    measured_costs(captured(), device)
    costs = costs_of(vmem_jax.jit(train, budget="1MB"), x)
    assert set(costs.sources) == {Source.MEASURED} and are_42_each(costs)


@pytest.mark.parametrize("options", [{"profile": False}, {"machine": CARDS["a100"].machine}])
def test_jit_leaves_it_on_demand(device, monkeypatch, options):
    monkeypatch.setattr("vmem_jax.profile.steps.time_step", lambda *a, **k: 42.0)
    measured_costs(captured(), device)
    assert costs_of(vmem_jax.jit(train, budget="1MB", **options), jnp.ones((16, 16))).sources == ()


def test_jit_measures_on_demand(device):
    step = vmem_jax.jit(train, budget="1MB", profile=True)
    assert set(costs_of(step, jnp.ones((16, 16))).sources) == {Source.MEASURED}
    assert kept(device).steps and kept(device).machine
    assert step(jnp.ones((16, 16)), jnp.ones((16, 16))).shape == (16, 16)


def test_steps_without_a_machine_use_the_shipped_one(device):
    found = measured_costs(captured(), device, machine=CARDS["cpu"].machine)
    assert kept(device).machine is None
    assert known_costs(captured(), device) == found.costs


# -- the command line


def run(capsys, *argv):
    status = cli.main([str(a) for a in argv])
    out, err = capsys.readouterr()
    return status, out, err


def test_profile_of_the_device_alone(capsys, tmp_path):
    status, out, _ = run(capsys, "profile")
    assert status == 0
    assert "TFLOP/s" in out and "device to host" in out and "pinning" in out
    assert f"kept in {tmp_path}" in out


def test_profile_of_a_model(capsys, device, monkeypatch):
    pytest.importorskip("flax")
    model = ("resnet11", "--batch", 2, "--image", 8, "--classes", 3)
    clock = itertools.count(step=1.0)  # a second a step, on any machine
    fake_time = types.SimpleNamespace(monotonic=lambda: next(clock))
    monkeypatch.setattr("vmem_jax.profile.steps.time", fake_time)
    status, out, _ = run(capsys, "profile", *model, "--seconds", 12)
    assert status == 0
    found = re.search(r"(\d+) distinct of \d+ steps, (\d+) measured, 0 scaled.* (\d+) calibr", out)
    distinct, measured, calibrated = map(int, found.groups())
    assert distinct == measured + calibrated and measured == len(kept(device).steps) == 12
    assert "conv_general" in out and "Median error" in out
    status, again, _ = run(capsys, "profile", *model, "--seconds", 0)
    assert status == 0 and f"({measured} known before)" in again


@pytest.mark.parametrize(
    "argv, says",
    [
        (("resnet11",), "needs --batch"),
        (("--batch", 4), "--batch"),
        (("resnet11", "--batch", 2, "--seconds", -1), "0 or more"),
        (("lenet", "--batch", 2), "no model 'lenet'"),
    ],
)
def test_what_is_wrong_is_said(capsys, argv, says):
    pytest.importorskip("flax")
    status, _, err = run(capsys, "profile", *argv)
    assert status == 2 and says in err


def test_the_store_is_what_the_tests_think(device):
    assert kept(device) == Measured()
