"""What each module may import, read from its syntax tree; private JAX stays in jax_compat.py."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
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
    "plotly",
}

# From the bottom up: a module imports only from its own room and from those above it in this list.
ROOMS = (
    "errors",
    "jax_compat",
    "progress",  # what goes on, on a terminal
    "logs",  # what is logged
    "core",  # Program, Plan, Timeline and what is reckoned from them
    "policy",  # Program, costs, budget -> Plan
    "search",  # the fastest plan that compiles to the budget
    "capture",  # jaxpr -> Program
    "transfer",  # how bytes move
    "devices",  # what devices have
    "profile",  # how long steps take
    "conv",  # convolutions in micro-batches
    "rewrite",  # jaxpr + Plan -> jaxpr
    "report",  # values for people
    "tracing",  # a call of the user's -> traced step
    "compiler",  # traced step + jaxpr -> executable
    "techniques",  # what a plan may do, and the forms of a step that this makes
    "api",  # what users call
    "models",  # networks of the suite
    "cli",
)

# Files of one name in several rooms, which are of one idea there.
SAME_IDEA = {
    "base.py",  # the abstract class of the room
    "bits.py",
    "carried.py",
    "compression.py",
    "convolutions.py",
    "exact.py",
    "layers.py",
    "logits.py",
    "loops.py",
    "machine.py",
    "normalising.py",
    "order.py",
    "row_kernels.py",
    "params.py",  # the constants of the room
    "plan.py",
    "profile.py",
    "recompute.py",
    "pooling.py",
    "summing.py",
    "sub_batches.py",
}

# Packages from elsewhere that a room, or a module, may import; "jax" is numpy's, too.
MAY_IMPORT: dict[str, set[str]] = {
    "core": {"numpy"},  # thousands of places at once
    "policy": set(),
    "policy/transfer_schedule.py": {"numpy"},
    "policy/milp.py": {"scipy"},
    "policy/residuals.py": {"numpy", "scipy"},
    "policy/segment_lengths.py": {"numpy"},
    "policy/workspace_division.py": {"scipy"},
    "search": {"absl"},
    "errors": set(),
    "progress": {"rich"},
    "logs": {"absl"},
    "jax_compat": {"jax"},
    "capture": {"jax", "numpy"},
    "transfer": {"jax", "numpy"},
    "devices": {"jax", "numpy"},
    "profile": {"jax", "numpy", "absl"},
    "conv": {"jax", "numpy", "absl"},
    "rewrite": {"jax", "numpy"},
    "report": {"rich"},
    "report/convolutions.py": {"rich", "matplotlib"},
    "report/page.py": {"plotly"},
    "tracing": {"jax", "numpy"},
    "tracing/flax.py": {"jax", "flax"},
    "tracing/equinox.py": {"jax", "equinox"},
    "compiler": {"jax", "absl"},
    "techniques": {"jax"},
    "techniques/loops.py": {"absl"},
    "api": {"jax", "absl"},
    "models": {"jax", "flax", "optax", "numpy", "sklearn"},
    "cli": {"jax", "rich", "absl", "numpy"},
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


def room_of(path: str) -> str:
    """The room of the module at `path`: "core" of "core/plan.py"."""
    return path.split("/")[0].removesuffix(".py")


def forbidden(path: str, source: str) -> list[str]:
    """The imports of the module at `path` that go upwards, or to packages that it may not import."""
    room = room_of(path)
    packages = MAY_IMPORT.get(path, MAY_IMPORT.get(room, set()))
    broken = []
    for name in imports(source):
        package, *rest = name.split(".")
        if "jax._src" in name and path != "jax_compat.py":
            broken.append(name)
        elif package == "vmem_jax":
            if path == "__init__.py":
                continue  # it only names what users import
            if not rest and room == "cli":
                continue  # it uses what users do
            if not rest or rest[0] not in ROOMS or ROOMS.index(rest[0]) > ROOMS.index(room):
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
        ("search/search.py", "import jax"),
        ("profile/steps.py", "from vmem_jax.rewrite.rewrite import rewrite"),
        ("api/jit.py", "from jax._src import core"),
        ("capture/fuse.py", "import jax._src.core"),
        ("report/explain.py", "import jax"),
    ],
)
def test_meta_the_check_can_fail(path, source):
    assert len(forbidden(path, source)) == 1


def test_every_module_is_in_a_room():
    assert {room_of(path) for path in MODULES} - {"__init__"} == {*ROOMS}


def test_meta_every_rule_is_of_a_module_that_is_there():
    for path in MAY_IMPORT:
        assert path in ROOMS or path in MODULES, path


def test_private_jax_is_nowhere_else():
    checkout = ROOT.parent
    for folder in ("tests", "benchmarks", "examples", "docs", "scripts"):
        for path in (checkout / folder).rglob("*.py"):
            assert not re.search(r"^\s*(from|import) jax\._src", path.read_text(), re.M), path


def test_no_two_modules_of_one_name():
    """Two modules of one name in two rooms are taken for one another. A policy and its technique
    are of one idea, and the package of a room says what it holds."""
    names: dict[str, list[str]] = {}
    for path in MODULES:
        names.setdefault(path.rsplit("/", 1)[-1], []).append(path)
    twice = {n: paths for n, paths in names.items() if len(paths) > 1 and n != "__init__.py"}
    assert {name: paths for name, paths in twice.items() if name not in SAME_IDEA} == {}


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
    assert circles(sources) == set()


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


# Numbers that are no parameters: formats, what was measured of machines, and what solvers need.
NO_PARAMETERS = {
    "core/compression.py": {"BLOCK_NBYTES", "UNIT_NBYTES", "_WIDEST", "_ROUNDING"},
    "core/convolution.py": {"XLA"},
    "core/instructions.py": {"POINTER"},
    "core/list_schedule.py": {"_SCALAR"},
    "core/looped.py": {"IN_FLIGHT", "EXTRA", "_ENDS", "_LEAST"},
    "core/machine.py": {
        "_CACHED",
        "_DEPTHWISE",
        "_DEPTHWISE_START",
        "_ADDED_UP",
        "_PART_OF_PRODUCT",
        "_SUM",
        "_UNALIGNED",
        "_UNALIGNED_PRODUCT",
        "_UNALIGNED_BYTE",
        "_UNALIGNED_PASS",
        "LEAST_BUSY",
        "WRITTEN",
    },
    "core/packing.py": {"ALIGNMENT"},
    "core/cuda_cores.py": {"_DIRECT", "_TRANSFORMED", "_PASSES", "_LEAST_CHANNELS"},
    "core/tensor_cores.py": {
        "_PIXELS",
        "_START",
        "_TAPS",
        "_TILES",
        "_CORES",
        "_VECTOR",
        "_LOADED",
    },
    "core/plan.py": {"FORMAT"},
    "core/tuning.py": {"_HALVINGS"},
    "policy/modnn.py": {"_WORKSPACE"},
    "policy/workspace_division.py": {"_SCALE", "_ROUNDING"},
}


def numbers(source: str) -> set[str]:
    """The names of a module's constants that are numbers, or tuples of numbers."""
    found = set()
    for node in ast.parse(source).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        inner = [*ast.walk(node.value)]
        constants = [one.value for one in inner if isinstance(one, ast.Constant)]
        plain = ast.Constant | ast.Tuple | ast.BinOp | ast.UnaryOp | ast.operator | ast.unaryop
        if all(isinstance(one, plain | ast.expr_context) for one in inner) and all(
            isinstance(value, int | float) for value in constants
        ):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.always
@pytest.mark.parametrize("room", ["core", "policy", "techniques"])
def test_what_can_be_tuned_is_a_documented_parameter(room):
    paths = [path for path in MODULES if path.startswith(f"{room}/")]
    found = {path: numbers((ROOT / path).read_text()) for path in paths}
    expected = {path: names for path, names in NO_PARAMETERS.items() if path in paths}
    assert {path: names for path, names in found.items() if names} == expected
    params = importlib.import_module(f"vmem_jax.{room}.params").PARAMS
    documented = re.findall(r"^  (\w+): \S", inspect.getdoc(params), re.MULTILINE)
    assert documented == [field.name for field in dataclasses.fields(params)]


def test_meta_a_number_is_found():
    source = 'A = 5\nB: float = 1 / 32\nC = (1.0, 2)\nD = "text"\nE = f(1)\nF = -1\nG = [1]'
    assert numbers(source) == {"A", "B", "C", "F"}


def test_plain_import_pulls_in_no_framework():
    import subprocess
    import sys

    code = (
        "import sys, vmem_jax; print([m for m in ('flax', 'equinox', 'optax') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
