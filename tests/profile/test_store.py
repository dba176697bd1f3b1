"""The file of what was measured: what it holds comes back; what cannot be trusted is not."""

import dataclasses
import json
import logging
import multiprocessing
import os
import subprocess
import sys

import jax
import pytest

from vmem_jax.core.cards import CARDS
from vmem_jax.core.costs import Source
from vmem_jax.core.machine import Machine
from vmem_jax.profile.calibrate import Timing
from vmem_jax.profile.kept import Identity, cache_directory
from vmem_jax.profile.store import SCHEMA, Measured, Store, identity

HERE = Identity("NVIDIA H200", {"jax": "0.11.2", "driver": "580.159"})
TIMINGS = {
    "a": Timing(1.5e-3, Source.MEASURED, "", "add f32[4]"),
    "b": Timing(0.25, Source.SCALED, "32 of 256", "dot_general f32[256,4]"),
}


@pytest.fixture
def store(tmp_path):
    return Store(HERE, tmp_path)


def distrusted(store, caplog, says):
    """Whether the file counts as absent and the reason is said."""
    with caplog.at_level(logging.WARNING, logger="absl"):
        found = store.load()
    return found == Measured() and says in caplog.text and str(store.path) in caplog.text


def test_what_goes_in_comes_out(store):
    store.add(Measured(CARDS["h200"].machine, TIMINGS))
    assert store.load() == Measured(CARDS["h200"].machine, TIMINGS)


def test_nothing_is_there_at_first_and_nothing_is_said(store, caplog):
    assert store.load() == Measured() and not caplog.text
    assert not store.path.exists()


def test_entries_are_merged_and_the_new_ones_hold(store):
    store.add(Measured(CARDS["h200"].machine, TIMINGS))
    newer = dataclasses.replace(TIMINGS["a"], seconds=2.0)
    store.add(Measured(None, {"a": newer, "c": TIMINGS["b"]}))
    assert store.load() == Measured(
        CARDS["h200"].machine, {"a": newer, "b": TIMINGS["b"], "c": TIMINGS["b"]}
    )


def test_people_can_read_it(store):
    store.add(Measured(CARDS["h200"].machine, TIMINGS))
    content = json.loads(store.path.read_text())
    assert content["device"] == "NVIDIA H200" and content["versions"]["driver"] == "580.159"
    assert content["steps"]["b"]["batch"] == "32 of 256"
    assert store.path.name.startswith("nvidia-h200-")


@pytest.mark.parametrize(
    "text, says",
    [
        ("", "damaged"),
        ('{"format": "vmem_jax profile", "schema"', "damaged"),
        ("\x00\x01", "damaged"),
        ("[1, 2]", "no profile of vmem_jax"),
        ('{"name": "somebody else\'s"}', "no profile of vmem_jax"),
    ],
)
def test_damaged_and_foreign_files(store, caplog, text, says):
    store.path.write_text(text)
    assert distrusted(store, caplog, says)


def test_bytes_that_are_no_text(store, caplog):
    store.path.write_bytes(b"\xff\xfe\x80")
    assert distrusted(store, caplog, "cannot be read")


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda c: c.update(schema=99), "schema 99"),
        (lambda c: c.update(device="NVIDIA A100"), "another device"),
        (lambda c: c["versions"].update(jax="0.1"), "other versions"),
        (lambda c: c.pop("steps"), "damaged"),
        (lambda c: c["steps"]["a"].update(seconds=-1.0), "damaged"),
        (lambda c: c["steps"]["a"].update(seconds=float("nan")), "damaged"),
        (lambda c: c["steps"]["a"].update(seconds="fast"), "damaged"),
        (lambda c: c["steps"]["a"].update(seconds=True), "damaged"),
        (lambda c: c["steps"]["a"].update(source="guessed"), "damaged"),
        (lambda c: c["steps"]["a"].update(source="roofline"), "damaged"),
        (lambda c: c["steps"].update(a=3), "damaged"),
        (lambda c: c["machine"].update(bandwidth=0), "damaged"),
        (lambda c: c["machine"].update(link_delay=-1e-6), "damaged"),
        (lambda c: c["machine"].update(slice_start=-1e-6), "damaged"),
        (lambda c: c["machine"]["flops"].pop(""), "damaged"),
        (lambda c: c["machine"].update(colour="red"), "damaged"),
        (lambda c: c.update(machine=[]), "damaged"),
    ],
)
def test_a_file_that_is_not_what_it_should_be(store, caplog, change, says):
    store.add(Measured(CARDS["h200"].machine, TIMINGS))
    content = json.loads(store.path.read_text())
    change(content)
    store.path.write_text(json.dumps(content))
    assert distrusted(store, caplog, says)
    store.add(Measured(None, {"a": TIMINGS["a"]}))  # measured again
    assert store.load().steps == {"a": TIMINGS["a"]}


@pytest.mark.parametrize(
    "other",
    [
        Identity("NVIDIA H200 NVL", HERE.versions),
        Identity("NVIDIA H200", {**HERE.versions, "jax": "0.12.0"}),
    ],
)
def test_another_device_or_version_is_another_file(store, tmp_path, other):
    store.add(Measured(None, TIMINGS))
    assert Store(other, tmp_path).load() == Measured()


def _write(directory, who, count):
    store = Store(HERE, directory)
    for i in range(count):
        store.add(Measured(None, {f"{who}-{i}": Timing(1.0 + i, Source.MEASURED)}))


def test_writers_at_once_lose_nothing(store, tmp_path):
    context = multiprocessing.get_context("spawn")  # a fork with JAX's threads may hang
    writers = [context.Process(target=_write, args=(tmp_path, w, 8)) for w in range(3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        store.load()  # a reader meanwhile sees whole files only, or it would warn
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert len(store.load().steps) == 24
    assert not list(tmp_path.glob("*.tmp"))


def test_a_reader_during_writes_is_told_of_nothing(store, tmp_path, caplog):
    _write(tmp_path, "before", 1)
    context = multiprocessing.get_context("spawn")  # a fork with JAX's threads may hang
    writer = context.Process(target=_write, args=(tmp_path, "w", 20))
    with caplog.at_level(logging.WARNING, logger="absl"):
        writer.start()
        while writer.is_alive():
            assert store.load().steps
        writer.join()
    assert not caplog.text


def test_a_write_that_fails_leaves_the_old_file(store, monkeypatch):
    store.add(Measured(None, TIMINGS))

    def full(*args):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        store.add(Measured(CARDS["h200"].machine, {}))
    assert store.load() == Measured(None, TIMINGS)
    assert not list(store.path.parent.glob("*.tmp"))


def test_identity_names_processor_and_versions():
    here = identity(jax.devices("cpu")[0])
    assert here.device != "cpu" and "cores" in here.device
    assert here.versions["jax"] == jax.__version__ and here.versions["jaxlib"]
    assert here == identity(jax.devices("cpu")[0])


def test_compiler_flags_make_another_identity(monkeypatch):
    before = identity(jax.devices("cpu")[0]).file_name(SCHEMA)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert identity(jax.devices("cpu")[0]).file_name(SCHEMA) != before


def test_the_directory_is_the_users_unless_said_otherwise(monkeypatch, tmp_path):
    monkeypatch.setenv("VMEM_JAX_CACHE", str(tmp_path))
    assert cache_directory() == tmp_path
    monkeypatch.delenv("VMEM_JAX_CACHE")
    pytest.importorskip("platformdirs")
    assert cache_directory().name == "vmem_jax"


def test_the_module_loads_without_the_file_system():
    code = "import vmem_jax.profile.store, sys; print('platformdirs' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_a_machine_survives_the_trip():
    cpu = CARDS["cpu"].machine
    assert Machine(**json.loads(json.dumps(dataclasses.asdict(cpu)))) == cpu
