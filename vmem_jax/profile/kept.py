"""kept: measurements in a JSON file for each device and set of versions, without JAX.

The files are in the user's cache directory, or in `VMEM_JAX_CACHE`. A file that cannot be trusted
(damaged, foreign, of another device) is logged and treated as absent: everything is measured again.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from absl import logging

VARIABLE = "VMEM_JAX_CACHE"

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Identity:
    """The device and versions for which a measurement is valid.

    Attributes:
      device: the kind of the device; for a CPU the processor and the cores of this process.
      versions: the versions of everything that decides which code runs on it.
    """

    device: str
    versions: Mapping[str, str]

    def file_name(self, schema: int) -> str:
        """Of a file of that schema."""
        text = json.dumps([schema, self.device, sorted(self.versions.items())])
        slug = re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")[:60]
        return f"{slug}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"


def cache_directory() -> Path:
    """`VMEM_JAX_CACHE`, or the user's cache directory by the system's rules."""
    if given := os.environ.get(VARIABLE):
        return Path(given)
    import platformdirs

    return Path(platformdirs.user_cache_dir("vmem_jax"))


class Kept(abc.ABC, Generic[T]):
    """A file that holds one T. Any number of processes may read and write it at once."""

    kind: ClassVar[str]
    """What it is, "profile": its format is "vmem_jax profile"."""
    schema: ClassVar[int]
    """Files of another are not read."""
    folder: ClassVar[str] = ""
    """In the directory: kinds have their own, as their files have the same names."""

    def __init__(self, of: Identity, directory: Path | None = None) -> None:
        """The file of `of` in `directory` (default: `cache_directory()`); touches no file."""
        self.identity = of
        name = of.file_name(self.schema)
        self.path = (directory or cache_directory()) / self.folder / name

    @abc.abstractmethod
    def nothing(self) -> T:
        """The contents of an absent file."""

    @abc.abstractmethod
    def merged(self, old: T, new: T) -> T:
        """The union of both; the new one wins."""

    @abc.abstractmethod
    def to_json(self, value: T) -> dict[str, Any]:
        """The entries of the file that say `value`."""

    @abc.abstractmethod
    def from_json(self, content: dict[str, Any]) -> T:
        """The inverse. What is damaged raises KeyError, TypeError, ValueError or AttributeError."""

    def load(self) -> T:
        """The contents of the file; `nothing()` if there is none that can be trusted."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return self.nothing()
        except (OSError, UnicodeDecodeError) as error:
            return self._distrust(f"cannot be read ({error})")
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            return self._distrust(f"is damaged ({error})")
        if not isinstance(content, dict) or content.get("format") != f"vmem_jax {self.kind}":
            return self._distrust(f"is no {self.kind} of vmem_jax")
        if content.get("schema") != self.schema:
            return self._distrust(f"has schema {content.get('schema')!r}, not {self.schema}")
        if content.get("device") != self.identity.device:
            return self._distrust(
                f"is of another device ({content.get('device')!r}, not {self.identity.device!r})"
            )
        if content.get("versions") != dict(self.identity.versions):
            return self._distrust("is of other versions")
        try:
            return self.from_json(content)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            return self._distrust(f"is damaged ({type(error).__name__}: {error})")

    def keep(self, value: T) -> None:
        """Like `add`, but if the file cannot be written, that is logged and nothing is kept."""
        try:
            self.add(value)
        except OSError as error:
            logging.warning("%s cannot be written, so nothing is kept: %s", self.path, error)

    def add(self, value: T) -> None:
        """Adds `value` to the file. New entries replace old ones; no other entry is lost.

        Raises:
          OSError: the directory cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self.path.with_suffix(".lock")):
            content = {
                "format": f"vmem_jax {self.kind}",
                "schema": self.schema,
                "device": self.identity.device,
                "versions": dict(self.identity.versions),
                **self.to_json(self.merged(self.load(), value)),
            }
            # Readers take no lock: they see the old file or the new one, never a part.
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=self.path.parent, suffix=".tmp", delete=False
            ) as file:
                try:
                    json.dump(content, file, indent=1)
                    file.flush()
                    os.fsync(file.fileno())
                    os.replace(file.name, self.path)
                except BaseException:
                    os.unlink(file.name)
                    raise

    def _distrust(self, why: str) -> T:
        logging.warning("%s %s: it is ignored, and measured again", self.path, why)
        return self.nothing()


def positive(number: Any) -> float:
    """`number`, if it is a positive and finite one, as seconds and rates are."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise TypeError(f"{number!r} is no number")
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{number} is not positive and finite")
    return number


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the lock goes with the process that holds it."""
    with open(path, "w") as file:
        try:
            import fcntl
        except ImportError:  # not a POSIX system: two writers at once may lose the first's entries
            yield
            return
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file gives the lock up
