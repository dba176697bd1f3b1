"""What each module may import, read from its syntax tree; private JAX stays in jax_compat.py."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import vmem_jax

ROOT = Path(vmem_jax.__file__).parent
EDGES = {
    "jax",
    "flax",
    "optax",
    "equinox",
    "numpy",
    "rich",
    "absl",
    "sklearn",
    "scipy",
    "matplotlib",
}

# The most specific prefix of a module's path decides which packages and which of our own modules
# it may import. "" allows every one of our own.
MAY_IMPORT: dict[str, tuple[set[str], set[str]]] = {
    "core/": (set(), {"core", "errors"}),
    "core/heap.py": ({"numpy"}, {"core"}),  # thousands of places at once
    "core/touched.py": ({"numpy"}, {"core"}),  # the same steps a hundred times
    "core/liveness.py": ({"numpy"}, {"core"}),
    "core/simulate.py": ({"numpy"}, {"core"}),
    "policy/": (set(), {"core", "policy", "errors"}),
    "policy/placement.py": ({"numpy"}, {"core", "policy"}),
    "policy/stages.py": ({"scipy"}, {"core"}),
    "policy/workspace_division.py": ({"scipy"}, {"core", "policy", "errors"}),
    "errors.py": (set(), set()),
    "jax_compat.py": ({"jax"}, set()),
    "capture/": ({"jax", "numpy"}, {"core", "capture", "errors", "jax_compat"}),
    "rewrite/": (
        {"jax", "numpy"},
        {"core", "capture", "conv", "rewrite", "transfer", "errors", "jax_compat"},
    ),
    "prove/": ({"jax", "numpy", "absl"}, {"core", "policy", "prove", "errors", "jax_compat"}),
    "profile/": (
        {"jax", "numpy", "absl"},
        {"core", "policy", "capture", "prove", "profile", "transfer", "errors", "jax_compat"},
    ),
    "profile/calibrate.py": (set(), {"core"}),
    "profile/kept.py": ({"absl"}, set()),
    "transfer/": ({"jax", "numpy"}, {"core", "transfer", "errors"}),
    "transfer/compression.py": ({"jax", "numpy"}, {"core", "transfer", "jax_compat"}),
    "conv/layers.py": (set(), {"core", "capture", "conv", "jax_compat"}),
    "conv/database.py": (set(), {"core", "profile"}),
    "conv/profiler.py": ({"absl"}, {"core", "policy", "conv"}),
    "report/": ({"rich"}, {"core", "policy", "report", "errors"}),
    "report/convolutions.py": ({"rich", "matplotlib"}, {"core", "errors"}),
    "arguments.py": ({"jax", "numpy"}, {"jax_compat", "flax", "equinox"}),
    "flax.py": ({"jax", "flax"}, {"arguments"}),
    "equinox.py": ({"jax", "equinox"}, {"arguments"}),
    "models/": ({"jax", "flax", "optax", "numpy", "sklearn"}, {"models"}),
    "stages.py": ({"jax"}, {"core", "entry", "jit", "prove", "rewrite", "transfer"}),
    "entry.py": (
        {"jax"},
        {"batch_arguments", "core", "capture", "policy", "prove", "jax_compat"},
    ),
    "batch_arguments.py": ({"jax"}, {"arguments", "capture"}),
    "compiling.py": ({"jax"}, {"arguments", "entry", "hosted", "prove", "jax_compat"}),
    "splitting.py": (set(), {"capture", "core", "entry", "errors", "prove", "jax_compat"}),
    "hosted.py": ({"jax"}, {"capture", "errors", "jax_compat"}),
    "options.py": (set(), {"errors", "policy", "transfer"}),
    "": (EDGES, {""}),
}


def imports(source: str) -> list[str]:
    """Every module that `source` imports, wherever it does so, as "package.module.name"."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def forbidden(path: str, source: str) -> list[str]:
    """The imports of the module at `path` that the table does not allow."""
    rule = max((p for p in MAY_IMPORT if path.startswith(p)), key=len)
    packages, own = MAY_IMPORT[rule]
    broken = []
    for name in imports(source):
        package, *rest = name.split(".")
        if "jax._src" in name and path != "jax_compat.py":
            broken.append(name)
        elif package == "vmem_jax":
            if "" not in own and (not rest or rest[0] not in own):
                broken.append(name)
        elif package in EDGES and package not in packages:
            broken.append(name)
    return broken


MODULES = sorted(p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES)
def test_module_imports_only_what_it_may(path):
    assert forbidden(path, (ROOT / path).read_text()) == []


@pytest.mark.parametrize(
    "path, source",
    [
        ("core/plan.py", "import jax"),
        ("core/plan.py", "import jax.numpy as jnp"),
        ("core/plan.py", "def late():\n    from jax import lax"),
        ("core/plan.py", "from vmem_jax.policy import Auto"),
        ("core/plan.py", "from vmem_jax import jit"),
        ("policy/auto.py", "from vmem_jax.capture import capture"),
        ("policy/auto.py", "import numpy as np"),
        ("jit.py", "from jax._src import core"),
        ("capture/fuse.py", "import jax._src.core"),
        ("report/explain.py", "import jax"),
    ],
)
def test_meta_the_check_can_fail(path, source):
    assert len(forbidden(path, source)) == 1


def test_meta_every_layer_is_there():
    for prefix in MAY_IMPORT:
        assert any(path.startswith(prefix) for path in MODULES), prefix


KNOWN_CIRCLES = {
    frozenset(("vmem_jax.jit", "vmem_jax.stages")),
    frozenset(("vmem_jax.arguments", "vmem_jax.equinox", "vmem_jax.flax")),
}
"""Modules that import each other today. A circle that is gone is taken out."""


def circles(sources: dict[str, str]) -> set[frozenset[str]]:
    """The sets of modules that lead to each other by imports, deferred ones included.

    Args:
      sources: of each module, by its name.
    """
    reads = {
        name: {
            found
            for imported in imports(source)
            for found in (imported, imported.rpartition(".")[0])
            if found in sources and found != name
        }
        for name, source in sources.items()
    }

    def reached(start: str) -> set[str]:
        found, stack = set[str](), [start]
        while stack:
            for name in reads[stack.pop()] - found:
                found.add(name)
                stack.append(name)
        return found

    behind = {name: reached(name) for name in sources}
    return {
        frozenset(other for other in behind[name] if name in behind[other])
        for name in sources
        if name in behind[name]
    }


def test_no_modules_import_each_other():
    sources = {
        ".".join(("vmem_jax", *Path(path).with_suffix("").parts)): (ROOT / path).read_text()
        for path in MODULES
        if not path.endswith("__init__.py")  # gathers names of its own modules
    }
    assert circles(sources) == KNOWN_CIRCLES


@pytest.mark.parametrize(
    "late",
    [
        "def late():\n    from p import a",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import p.a",
        "from p.a import name",
    ],
)
def test_meta_a_circle_is_found(late):
    sources = {"p.a": "from p import b", "p.b": "import p.c", "p.c": late, "p.d": "import p.a"}
    assert circles(sources) == {frozenset(("p.a", "p.b", "p.c"))}
    assert circles(sources | {"p.c": ""}) == set()


def test_plain_import_pulls_in_no_framework():
    import subprocess
    import sys

    code = (
        "import sys, vmem_jax; print([m for m in ('flax', 'equinox', 'optax') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
