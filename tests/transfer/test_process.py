"""What needs a process of its own: several devices, and the end of an interpreter."""

import pytest
from processes import run_script


def test_four_devices():
    run_script(
        """
        import jax, numpy as np
        from jax.sharding import Mesh, PartitionSpec as P
        from transfer_cases import *

        devices = jax.devices()
        assert len(devices) == 4
        with Arena(layout()) as arena:
            for device in devices:
                arena.pin(device)
            step = jit(parking_step(arena), devices[0])
            expected = jit(plain_step, devices[0])(data(devices[0]))
            with injected(delay_seconds=1e-3, poison=True):
                results = [step(data(device)) for device in devices]
                assert all(same(r, expected) for r in results)
            assert [r.device for r in results] == devices
            assert [arena.counters(d).misses for d in devices] == [LAYERS] * 4

            mesh = Mesh(np.array(devices), ("d",))
            shards = jax.shard_map(
                parking_step(arena), mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False
            )
            with injected(delay_seconds=1e-3, poison=True):
                x = np.tile(np.asarray(data(devices[0])), 4)
                assert same(jit(shards, devices[0])(x), np.tile(expected, 4))
            assert [arena.counters(d).misses for d in devices] == [2 * LAYERS] * 4
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
    )


@pytest.mark.parametrize("waits", [False, True])
def test_interpreter_ends_with_transfers_in_flight(waits):
    """In flight: a copy that lasts an hour; a call that waits for it; buffers that JAX frees."""
    run_script(f"""
        from transfer_cases import *
        import threading
        import time

        device = jax.devices()[0]
        arena = Arena(Layout.of([Parked(1 << 26, 0, 1)]))
        arena.pin(device)
        x = data(device, count=1 << 24)
        ffi.inject(delay_seconds=3600)

        def start(x):
            token = ffi.offload_start(x * 2, ffi.first_token(), arena=arena.id, slot=0)
            return ffi.offload_done(x * 2, token, arena=arena.id, slot=0) if {waits} else token

        run = jit(start, device).lower(x).compile()
        if {waits}:
            threading.Thread(target=run, args=(x,), daemon=True).start()
            while arena.counters(device).parked == 0:
                time.sleep(0.01)
            time.sleep(0.1)  # it waits by now
        else:
            run(x).block_until_ready()
        assert arena.counters(device).parked == 1
        print("end", flush=True)
    """)


def test_interpreter_ends_in_the_middle_of_a_copy():
    run_script("""
        from transfer_cases import *

        device = jax.devices()[0]
        arena = Arena(Layout.of([Parked(1 << 28, 0, 1)]))
        arena.pin(device)
        x = data(device, count=1 << 26)
        run = jit(lambda x: ffi.offload_start(x, ffi.first_token(), arena=arena.id, slot=0), device)
        run(x).block_until_ready()  # the copy out of the argument goes on
    """)
