"""The extension fits the JAX that runs, or says so."""

import dataclasses
import sys
import types

import jax
import pytest
import transfer_cases
from test_jit import assert_close, batch, params, step

import vmem_jax
from vmem_jax.transfer import extension, ffi
from vmem_jax.transfer.arena import Arena, Counters, Moved
from vmem_jax.transfer.compression import SiteCounters, unusable
from vmem_jax.transfer.layout import Layout, Slot


@pytest.mark.parametrize(
    "built, running, works",
    [
        ((0, 3), (0, 3), True),
        ((0, 3), (0, 5), True),
        ((0, 4), (0, 3), False),
        ((0, 3), (1, 0), False),
        ((1, 0), (0, 9), False),
    ],
)
def test_older_handlers_work_newer_ones_are_refused(built, running, works):
    if works:
        extension.check_version(built, "0.10.2", running)
        return
    with pytest.raises(ImportError, match=r"Upgrade jaxlib, or build vmem_jax again.*pip install"):
        extension.check_version(built, "0.10.2", running)


def test_mismatch_stops_the_import_and_shows_in_info(monkeypatch):
    monkeypatch.setattr(extension, "_running_version", lambda: (0, 1))
    with pytest.raises(ImportError, match=r"built for XLA FFI 0\.\d+ .* has 0\.1"):
        extension.load.__wrapped__()
    assert extension.describe().startswith("none: vmem_jax's transfers were built")


def test_missing_extension_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "vmem_jax._xla_ffi", None)
    with pytest.raises(ImportError, match="pip install"):
        extension._import()
    assert extension.describe().startswith("none: ")


class _Entry:
    """An entry point of a package with CUDA, `version` of it, that loads `module`."""

    def __init__(self, version, module):
        self.dist = types.SimpleNamespace(name="vmem_jax_cuda13", version=version)
        self.load = lambda: module


def test_the_extension_of_a_package_with_cuda_comes_first(monkeypatch):
    own = extension.load()
    theirs = types.ModuleType("vmem_jax_cuda13._xla_ffi")
    vars(theirs).update({name: getattr(own, name) for name in dir(own) if name[:2] != "__"})
    entries = [_Entry("0.2.0", theirs)]
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.2.0")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: entries)
    monkeypatch.setitem(sys.modules, "vmem_jax._xla_ffi", None)  # not imported at all
    assert extension._import() is theirs
    assert extension.describe().endswith(", from vmem_jax_cuda13")
    entries[0] = _Entry("0.1.0", theirs)
    with pytest.raises(ImportError, match=r"pip install vmem_jax_cuda13==\d+\.\d+\.\d+$"):
        extension._import()
    assert extension.describe().startswith("none: vmem_jax_cuda13 0.1.0 is no part of vmem_jax ")


def test_steps_run_without_the_extension_and_say_so_where_it_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "vmem_jax._xla_ffi", None)
    monkeypatch.setattr(extension, "load", extension.load.__wrapped__)
    short = params()[:4], batch()
    expected = jax.jit(step)(*short)
    assert_close(vmem_jax.jit(step, budget=0.8)(*short), expected)
    with pytest.raises(ValueError, match=r'"offload" is not used: .*not built here.*pip install'):
        vmem_jax.jit(step, budget=0.8, allow=("order", "offload"))(*short)


def test_built_for_cuda_without_a_gpu():
    """The module loads where no driver is; the CPU's handlers work; CUDA's say what is missing."""
    module = extension.load()
    if module.CUDA_VERSION is None:
        pytest.skip("the extension was built without CUDA")
    if any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("there is a GPU")
    assert extension.describe().startswith("CPU and CUDA ")
    with Arena(transfer_cases.layout()) as arena:
        with pytest.raises(RuntimeError, match=r"cuda\w+\(.*\): .*(driver|device)"):
            module.arena_pin(arena.id, "CUDA", 0, False)
    transfer_cases.values_come_back(jax.devices("cpu")[0])


def test_structs_have_the_fields_of_the_dataclasses_that_are_made_of_them():
    module = extension.load()
    pairs = [(module.Counters, Counters), (module.Span, Moved), (module.SiteCounters, SiteCounters)]
    for native, cls in pairs:
        bound = {name for name in dir(native) if not name.startswith("_")}
        assert bound == {field.name for field in dataclasses.fields(cls)}


def test_nothing_fails_where_an_arena_is_freed():
    module = extension.load()
    with transfer_cases.pinned(jax.devices("cpu")[0]):
        before = module.teardown_failures()
    assert module.teardown_failures() == before == (0, "")


def test_built_for_the_oldest_supported_jaxlib():
    """Or a wheel built here would not run there. An installation without isolation may differ."""
    module = extension.load()
    assert module.FFI_API_VERSION <= extension._running_version()
    if module.JAXLIB_VERSION == "0.10.2":
        assert module.FFI_API_VERSION == (0, 3)


def test_transfers_of_every_platform_are_the_same():
    module = extension.load()
    targets = module.targets()
    names = {"offload_start", "offload_done", "fetch_start", "fetch_done"}
    compression = {"compress", "decompress"}
    assert set(targets) <= {"cpu", "CUDA"} and set(targets["cpu"]) == names | compression
    assert ("CUDA" in targets) == (module.CUDA_VERSION is not None)
    if "CUDA" in targets:
        convolution = set() if module.CUDNN_BUILT is None else {"micro_conv"}
        assert set(targets["CUDA"]) - compression == names | convolution
        assert set(targets["CUDA"]) & compression in (compression, set())  # set(): without nvcc
        assert (not set(targets["CUDA"]) & compression) == bool(unusable("gpu"))
    assert unusable("cpu") == ""


def test_calls_survive_where_nothing_reads_them():
    """XLA would merge equal calls, and remove those whose results nobody needs."""
    with Arena(Layout((Slot(0, 32, 2),), 512)) as arena:

        def step(x):
            for _ in range(2):
                ffi.offload_start(x, ffi.first_token(), arena=arena.id, slot=0)
            return x

        text = jax.jit(step).lower(jax.ShapeDtypeStruct((8,), "float32")).compile().as_text()
    assert text.count('custom_call_target="vmem_jax_offload_start"') == 2
