"""The native extension: loaded at first use, checked against the JAX that runs, registered once."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import importlib
import importlib.metadata
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jax

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

PREFIX = "vmem_jax_"
"""Of every custom call target."""

PLUGINS = "vmem_jax.extension"
"""The group of entry points in which a package with CUDA names its build of the extension."""

_HEADER = "xla/ffi/api/c_api.h"


@functools.cache
def load() -> Any:
    """The extension module, its targets registered for every platform that it has.

    Raises:
      ImportError: it was not built, for a newer jaxlib than the one that runs, or for another
        version of vmem_jax.
    """
    module = _import()
    check_version(module.FFI_API_VERSION, module.JAXLIB_VERSION, _running_version())
    for platform, targets in module.targets().items():
        for name, handler in targets.items():
            jax.ffi.register_ffi_target(PREFIX + name, handler, platform=platform)
    # Registered after JAX's own, hence called before them: the copies end while the buffers that
    # they work on are still there.
    atexit.register(module.stop)
    return module


def describe() -> str:
    """What the extension can do here, in one line, or why there is none."""
    try:
        module = _import()
        check_version(module.FFI_API_VERSION, module.JAXLIB_VERSION, _running_version())
    except ImportError as error:
        return f"none: {error}"
    cuda = module.CUDA_VERSION
    where = "CPU alone, built without CUDA" if cuda is None else f"CPU and CUDA {_dotted(cuda)}"
    if cuda is not None:
        without = "no convolutions, built without cuDNN"
        where += f", {without if module.CUDNN_BUILT is None else 'convolutions by cuDNN'}"
        if "compress" not in module.targets()["CUDA"]:
            where += ", no compression, built without nvcc"
    where += f" (XLA FFI {_dotted(module.FFI_API_VERSION)})"
    package = module.__name__.partition(".")[0]
    return where if package == "vmem_jax" else f"{where}, from {package}"


def check_version(built: tuple[int, int], jaxlib: str, running: tuple[int, int]) -> None:
    """Checks that handlers built for XLA FFI `built`, with headers of `jaxlib`, work in `running`.

    XLA takes handlers of its own and of older minor versions. A newer one would not fail here but
    take the whole backend down, with an error that does not name us.

    Raises:
      ImportError: they do not.
    """
    if built[0] == running[0] and built[1] <= running[1]:
        return
    import jaxlib as running_jaxlib

    raise ImportError(
        f"vmem_jax's transfers were built for XLA FFI {_dotted(built)} (jaxlib {jaxlib}), but "
        f"jaxlib {running_jaxlib.__version__}, which runs, has {_dotted(running)}. Upgrade jaxlib, "
        "or build vmem_jax again for this one: pip install --force-reinstall --no-deps vmem_jax"
    )


def handler_device(device: jax.Device) -> tuple[str, int]:
    """`device` as the handlers see it: the platform, and the ordinal within this process."""
    if device.platform == "cpu":
        return "cpu", device.local_hardware_id if device.local_hardware_id is not None else 0
    if device.platform in ("gpu", "cuda"):
        return "CUDA", device.local_hardware_id
    raise ValueError(f"there are no transfers for platform {device.platform!r} ({device}).")


def as_dataclass(cls: type[T], struct: Any) -> T:
    """A `cls` whose fields are the attributes of those names of `struct`, one of the extension's."""
    return cls(**{field.name: getattr(struct, field.name) for field in dataclasses.fields(cls)})


def _import() -> Any:
    """The extension of a package with CUDA, where one is installed, else our own.

    Only one of them is imported: both define the same types. That of a package can do all that our
    own can, so it comes first, also where there is no GPU.
    """
    for plugin in importlib.metadata.entry_points(group=PLUGINS):
        own = importlib.metadata.version("vmem_jax")  # there is one: the package depends on it
        if plugin.dist is not None and plugin.dist.version != own:
            name, version = plugin.dist.name, plugin.dist.version
            raise ImportError(
                f"{name} {version} is no part of vmem_jax {own}, which is installed. Install the "
                f"same version of both: pip install {name}=={own}"
            )
        return plugin.load()
    try:
        return importlib.import_module("vmem_jax._xla_ffi")
    except ModuleNotFoundError as error:
        raise ImportError(
            "vmem_jax's native extension is not built here. Install the package, which builds it "
            "(`pip install .` in the source tree), rather than import it from the source tree."
        ) from error


def _running_version() -> tuple[int, int]:
    text = (Path(jax.ffi.include_dir()) / _HEADER).read_text()
    found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", text))
    return int(found["MAJOR"]), int(found["MINOR"])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
