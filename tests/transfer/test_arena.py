"""Arenas: layouts, who owns the memory, how much there may be of it."""

import gc

import jax
import pytest
import transfer_cases
from processes import meanwhile, run_script

from vmem_jax.errors import HostMemoryError
from vmem_jax.transfer import host_memory
from vmem_jax.transfer.arena import Arena, live_arenas
from vmem_jax.transfer.layout import Layout, Parked, Slot

CPU = jax.devices("cpu")[0]
MIB = 1 << 20


def test_layout_packs_what_nests_and_shares_what_does_not_meet():
    layout = Layout.of([Parked(1000, 0, 9), Parked(3, 1, 4, depth=3), Parked(512, 5, 8)])
    assert layout.nbytes == 1024 + 3 * 256
    assert layout.slots == (Slot(0, 1000), Slot(1024, 3, 3), Slot(1024, 512))
    assert [slot.stride for slot in layout.slots] == [1024, 256, 512]


@pytest.mark.parametrize("slot", [Slot(-256, 1), Slot(1, 1), Slot(0, 1, 0), Slot(256, 300)])
def test_layout_that_does_not_fit_is_refused(slot):
    with pytest.raises(ValueError, match="slot 0"):
        Layout((slot,), 512)


def test_arena_is_freed_with_its_owner():
    gc.collect()  # those of tests before this one
    before = live_arenas()
    arena = Arena(transfer_cases.layout())
    arena.pin(CPU)
    assert live_arenas() == before + 1
    del arena
    gc.collect()
    assert live_arenas() == before
    with Arena(transfer_cases.layout()) as arena:
        assert live_arenas() == before + 1
    assert live_arenas() == before
    arena.close()  # again


def test_arena_memory_is_there_only_while_it_is_pinned():
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    with Arena(Layout((Slot(0, 64 * MIB),), 64 * MIB)) as arena:
        assert resident() < before + 8 * MIB
        arena.pin(CPU)
        assert resident() > before + 56 * MIB  # all of it, before the first step
        arena.pin(CPU)  # again
        assert resident() < before + 72 * MIB
    assert resident() < before + 8 * MIB


def test_host_budget():
    with Arena(Layout((Slot(0, 3 * MIB),), 3 * MIB), host_budget=2 * MIB) as arena:
        with pytest.raises(HostMemoryError, match=r"3.00 MiB .* 2.00 MiB .* `host_budget`") as e:
            arena.pin(CPU)
    assert (e.value.nbytes, e.value.limit_nbytes) == (3 * MIB, 2 * MIB)
    with Arena(Layout((Slot(0, 3 * MIB),), 3 * MIB), host_budget=3 * MIB) as arena:
        arena.pin(CPU)


def test_rlimit_memlock():
    run_script("""
        import resource
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
        import jax
        from vmem_jax.errors import HostMemoryError
        from vmem_jax.transfer.arena import Arena
        from vmem_jax.transfer.layout import Layout, Slot

        arena = Arena(Layout((Slot(0, 4 << 20),), 4 << 20))
        try:
            arena.pin(jax.devices()[0], lock_pages=True)
        except HostMemoryError as error:
            assert "4.00 MiB" in str(error) and "1.00 MiB" in str(error), error
            assert "RLIMIT_MEMLOCK" in str(error), error
        else:
            raise SystemExit("pinned more than the limit")
        arena.pin(jax.devices()[0])
        small = Arena(Layout((Slot(0, 1 << 19),), 1 << 19))
        small.pin(jax.devices()[0], lock_pages=True)
        locked = [l for l in open("/proc/self/status") if l.startswith("VmLck")]
        assert int(locked[0].split()[1]) == 512, locked
    """)


def test_memory_that_another_process_has_pinned_is_not_there():
    nbytes = lambda: min(limit.nbytes for limit in host_memory.limits(lock_pages=False))
    held = min(2 << 30, nbytes() // 4)
    holder = f"""
        import sys
        import jax
        from vmem_jax.transfer.arena import Arena
        from vmem_jax.transfer.layout import Layout, Slot

        arena = Arena(Layout((Slot(0, {held}),), {held}))
        arena.pin(jax.devices()[0])
        print("pinned", flush=True)
        sys.stdin.read()
    """
    # What else runs on this machine takes and frees memory meanwhile, so it may be tried again.
    for _ in range(4):
        before = nbytes()
        with meanwhile(holder):
            left = nbytes()
            wanted = (left + held // 2) // 256 * 256  # less than is there without the other process
            with Arena(Layout((Slot(0, wanted),), wanted)) as arena:
                with pytest.raises(
                    HostMemoryError, match=r"available memory|memory limit"
                ) as error:
                    arena.pin(CPU)
            assert error.value.limit_nbytes < wanted == error.value.nbytes
        if before - left > held // 2:
            return
    pytest.fail(f"beside {held} pinned bytes there were {left}, and {before} before")


def test_memory_that_the_system_refuses():
    """Each of several arenas; those before it go on, and it is pinned once there is room."""
    run_script("""
        import resource
        from transfer_cases import *
        from vmem_jax.errors import HostMemoryError

        device, x = jax.devices()[0], data(jax.devices()[0])
        expected = jit(plain_step, device)(x)
        arenas = [Arena(layout()) for _ in range(4)]
        steps = [jit(parking_step(arena), device).lower(x).compile() for arena in arenas]
        with pinned(device):
            pass  # the threads that copy are there now; they need memory of their own
        for refused in range(4):
            limit = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (1, limit[1]))  # less than there is already
            try:
                arenas[refused].pin(device)
            except HostMemoryError as error:
                message = str(error)
            else:
                raise SystemExit(f"arena {refused} was pinned")
            finally:
                resource.setrlimit(resource.RLIMIT_AS, limit)
            assert "384.00 KiB" in message and "mmap: Cannot allocate memory" in message, message
            assert all(same(step(x), expected) for step in steps[:refused])
            try:
                steps[refused](x).block_until_ready()
            except jax.errors.JaxRuntimeError as error:
                assert "not pinned" in str(error), error
            else:
                raise SystemExit("it ran without memory")
            arenas[refused].pin(device)
            assert same(steps[refused](x), expected)
    """)


def test_a_cache_that_the_system_refuses_leaves_the_step_right():
    x = transfer_cases.data(CPU)
    with transfer_cases.pinned(CPU) as arena:
        with pytest.raises(MemoryError, match="mmap"):
            arena.set_cache_capacity(CPU, 1 << 50)
        step = transfer_cases.jit(transfer_cases.parking_step(arena), CPU)
        plain = transfer_cases.jit(transfer_cases.plain_step, CPU)
        assert transfer_cases.same(step(x), plain(x))


def test_limits_are_read(tmp_path, monkeypatch):
    meminfo, own, root = tmp_path / "meminfo", tmp_path / "own", tmp_path / "cgroup"
    group = root / "outer" / "inner"
    group.mkdir(parents=True)
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable:   64 kB\n")
    own.write_text("0::/outer/inner\n")
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("5\n")
    (group.parent / "memory.max").write_text("4000\n")
    (group.parent / "memory.current").write_text("3000\n")
    (group.parent / "memory.stat").write_text("anon 1\ninactive_file 500\n")
    monkeypatch.setattr(host_memory, "_MEMINFO", meminfo)
    monkeypatch.setattr(host_memory, "_OWN_CGROUP", own)
    monkeypatch.setattr(host_memory, "_CGROUP_ROOT", root)
    found = {limit.name: limit.nbytes for limit in host_memory.limits(lock_pages=False)}
    assert found == {
        "the machine's available memory": 64 * 1024,
        f"the memory limit of cgroup {group.parent}": 1500,
    }
    host_memory.check(1500, lock_pages=False)
    with pytest.raises(HostMemoryError, match="cgroup"):
        host_memory.check(1501, lock_pages=False)
    own.write_text("7:cpu,memory:/outer\n")
    v1 = root / "memory" / "outer"
    v1.mkdir(parents=True)
    (v1 / "memory.limit_in_bytes").write_text("700\n")
    (v1 / "memory.usage_in_bytes").write_text("100\n")
    (root / "memory" / "memory.limit_in_bytes").write_text(f"{(1 << 63) - 4096}\n")
    (root / "memory" / "memory.usage_in_bytes").write_text("100\n")
    assert [x.nbytes for x in host_memory.limits(lock_pages=False)] == [64 * 1024, 600]


def test_cache_cannot_change_under_a_run():
    with transfer_cases.pinned(CPU) as arena:
        parks = transfer_cases.only_parking_step(arena)
        transfer_cases.jit(parks, CPU)(transfer_cases.data(CPU)).block_until_ready()
        with pytest.raises(RuntimeError, match="1 tensors are parked"):
            arena.set_cache_capacity(CPU, 0)
    with pytest.raises(ValueError, match="negative"):
        arena.set_cache_capacity(CPU, -1)
