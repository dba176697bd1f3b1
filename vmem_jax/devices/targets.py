"""Compile targets: NVIDIA cards that XLA:GPU can compile for without having one.

XLA's GPU compiler needs only a description of the card, so a CPU machine with JAX's CUDA wheels
(`pip install "vmem_jax[gpu-compile]"`) can compile a step for any card below and read its memory::

    card = target("h200")
    x = jax.ShapeDtypeStruct((1024, 1024), "float32", sharding=card.sharding())
    memory = jax.jit(step).lower(x).compile().memory_analysis()

Nothing is autotuned without a device. A convolution or matrix product whose tuned kernel takes
another workspace can therefore differ from what a process on the card itself compiles; everything
else (fusion, schedule, buffer sizes) is the compiler's own decision from the figures given here.
"""

import contextlib
import dataclasses
import functools
import glob
import importlib
import importlib.util
import os
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.experimental import topologies

from vmem_jax.core.cards import TARGETS, Hardware, hardware_of

_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
_SKIP_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"


def text_proto(card: Hardware) -> str:
    """`card` as the text of XLA's GpuTargetConfigProto."""
    major, minor = card.compute_capability
    extension = "ACCELERATED_FEATURES" if card.accelerated else "NONE"
    return f"""\
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
  device_memory_size: {card.memory_nbytes}
  memory_bandwidth: {card.memory_bandwidth}
  l2_cache_size: {card.l2_cache_nbytes}
  clock_rate_ghz: {card.clock_ghz}
  core_count: {card.core_count}
  fpus_per_core: {card.fpus_per_core}
  threads_per_core_limit: {card.threads_per_core}
  shared_memory_per_core: {card.shared_memory_per_core}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {card.shared_memory_per_block}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
platform_name: "CUDA"
device_description_str: "{card.title}"
"""


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU to compile for, present or not.

    For a card that is not in `TARGETS`, use the description that JAX gives on that card
    (`target_config` of its topology). XLA aborts the process if the description lacks basic figures,
    so start from a complete one.

    Attributes:
      name: short name, such as "h200".
      memory_nbytes: the whole memory of the device, in bytes. A process gets less: the CUDA
        context takes about 0.5 GiB, and JAX by default reserves three quarters of the memory.
      description: the text of XLA's GpuTargetConfigProto.
    """

    name: str
    memory_nbytes: int
    description: str = dataclasses.field(repr=False)

    def device(self) -> jax.Device:
        """The described device: it can be compiled for, not run on. The same object every time."""
        return self.devices(1)[0]

    def devices(self, count: int) -> tuple[jax.Device, ...]:
        """So many of the described device, in one host."""
        return _devices(self.description, count)

    def sharding(self) -> jax.sharding.Sharding:
        """Whole arrays on the described device: the sharding of a step's abstract arguments."""
        return jax.sharding.SingleDeviceSharding(self.device())

    def shardings(
        self, given: Sequence[jax.sharding.Sharding | None]
    ) -> list[jax.sharding.Sharding]:
        """The shardings of a step's arguments on this card instead of on their own devices.

        Args:
          given: a `NamedSharding` over a mesh of any devices, which as many of this card replace;
          all over the same mesh. None, or one device: whole on each of them.

        Raises:
          ValueError: shardings that are not named, or over meshes of several sizes.
        """
        spread = [s for s in given if s is not None and s.num_devices > 1]
        if not spread:
            return [self.sharding()] * len(given)
        unnamed = [s for s in spread if not isinstance(s, jax.sharding.NamedSharding)]
        counts = sorted({s.num_devices for s in spread})
        if unnamed or len(counts) > 1:
            raise ValueError(
                f"a step for {self.name!r} takes arguments with a NamedSharding over one mesh. Got "
                + (f"{unnamed[0]}." if unnamed else f"meshes of {counts} devices.")
            )
        devices = np.array(self.devices(counts[0]), object)

        def here(sharding: jax.sharding.Sharding | None) -> jax.sharding.Sharding:
            like = sharding if isinstance(sharding, jax.sharding.NamedSharding) else spread[0]
            assert isinstance(like, jax.sharding.NamedSharding)
            shape = tuple(like.mesh.shape.values())
            mesh = jax.sharding.Mesh(
                devices.reshape(shape), like.mesh.axis_names, axis_types=like.mesh.axis_types
            )
            spec = like.spec if sharding is like else jax.sharding.PartitionSpec()
            return jax.sharding.NamedSharding(mesh, spec)

        return [here(sharding) for sharding in given]


def target(name: str) -> Target:
    """The named card as a compile target.

    Args:
      name: one of `TARGETS`.

    Raises:
      ValueError: the name is unknown.
      ImportError: JAX's CUDA wheels, which hold XLA's GPU compiler, are not installed.
    """
    hardware = hardware_of(name)
    if hardware is None:
        raise ValueError(f"unknown target {name!r}; known targets: {', '.join(TARGETS)}")
    if _plugin_name() is None:
        raise ImportError(
            f"compiling for {name!r} needs XLA's GPU compiler from JAX's CUDA wheels (no GPU): "
            'pip install "vmem_jax[gpu-compile]"'
        )
    return Target(name, hardware.memory_nbytes, text_proto(hardware))


def _plugin_name() -> str | None:
    """The module of the installed CUDA plugin of JAX, if there is one."""
    for name in _PLUGINS:
        with contextlib.suppress(ModuleNotFoundError):  # no plugin at all
            if importlib.util.find_spec(name) is not None:
                return name
    return None


@functools.cache
def _devices(description: str, count: int) -> tuple[jax.Device, ...]:
    with _no_version_check_without_gpu():
        try:
            return _described_devices(description, count)
        except NotImplementedError:  # the plugin is not registered
            pass
    # JAX looked for plugins earlier in this process and gave up on this one, because its libraries'
    # versions cannot be checked without a driver. Compiling does not need them, and JAX has chosen
    # the backends to run on by then: a late registration changes nothing for those.
    plugin = _plugin_name()
    if plugin is None:
        raise ImportError('no CUDA plugin of JAX found: pip install "vmem_jax[gpu-compile]"')
    jax.devices()
    with _environment(_SKIP_CHECK, "1"):
        importlib.import_module(plugin).initialize()
    return _described_devices(description, count)


def _described_devices(description: str, count: int) -> tuple[jax.Device, ...]:
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=description, topology=f"1x1x{count}"
    )
    return tuple(topology.devices)


@contextlib.contextmanager
def _no_version_check_without_gpu() -> Iterator[None]:
    """Keeps JAX's first look at its plugins quiet on a machine without an NVIDIA driver."""
    if glob.glob("/dev/nvidia*") or os.path.exists("/dev/dxg"):
        yield
    else:
        with _environment(_SKIP_CHECK, "1"):
            yield


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
