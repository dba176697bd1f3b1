"""user_step: the step that a command is about: a model of the library, or the user's own."""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import vmem_jax
from vmem_jax.api.pareto import UNLIMITED
from vmem_jax.cli.options import job_of


def add_user_options(parser: argparse.ArgumentParser) -> None:
    """The options of a step of the user's own."""
    parser.add_argument(
        "--args",
        metavar="FILE.py:NAME",
        help="of your own step: its arguments, a tuple of arrays or jax.ShapeDtypeStructs, or a "
        "function that returns it",
    )
    parser.add_argument(
        "--donate",
        nargs="+",
        type=int,
        default=[],
        help="of your own step: the positions of the arguments that it gives up",
    )


def step_of(arguments: argparse.Namespace) -> tuple[str, vmem_jax.BudgetedStep, tuple]:
    """(name, step, its arguments) that a command line names, with its budget and policy.

    Raises:
      ValueError: options are missing, or the step is none.
    """
    budget = arguments.budget or UNLIMITED
    options = {"policy": arguments.policy, "allow": arguments.allow, "density": arguments.density}
    if not is_own(arguments):
        work = job_of(arguments)
        work.step.__name__ = work.name  # which reports and messages say
        step = vmem_jax.jit(work.step, budget=budget, donate_argnums=0, **options)
        return work.name, step, (work.state_shapes(), work.batch)
    fun, args = own_step(arguments)
    if isinstance(fun, vmem_jax.BudgetedStep):
        step = fun.with_budget(arguments.budget) if arguments.budget is not None else fun
    else:
        step = vmem_jax.jit(fun, budget=budget, donate_argnums=arguments.donate, **options)
    return getattr(fun, "__name__", "step"), step, args


def is_own(arguments: argparse.Namespace) -> bool:
    """Whether the command is about the user's own step."""
    own = arguments.model is not None and ":" in arguments.model
    if own and arguments.args is None:
        raise ValueError("your own step needs --args FILE.py:NAME, its arguments.")
    if not own and (arguments.args or arguments.donate):
        raise ValueError("--args and --donate are for your own step, FILE.py:NAME.")
    if not own and arguments.model is not None and arguments.batch is None:
        raise ValueError("a model of the library needs --batch.")
    return own


def own_step(arguments: argparse.Namespace) -> tuple[Callable, tuple]:
    """The user's step and its arguments."""
    fun = named(arguments.model)
    if not callable(fun):
        raise ValueError(f"{arguments.model} is no function, but {type(fun).__name__}.")
    args = named(arguments.args)
    args = args() if callable(args) else args
    return fun, args if isinstance(args, tuple) else (args,)


def named(where: str) -> Any:
    """What "path/to/file.py:name" or "package.module:name" names.

    Raises:
      ValueError: there is no such file, module or name.
    """
    source, _, name = where.rpartition(":")
    if not source or not name:
        raise ValueError(f"{where!r} names nothing. Give FILE.py:NAME, or MODULE:NAME.")
    value: Any = _module(source)
    for part in name.split("."):
        if not hasattr(value, part):
            raise ValueError(f"{source} has no {name!r}.")
        value = getattr(value, part)
    return value


@functools.cache  # the step and its arguments are of one module
def _module(source: str) -> Any:
    if not source.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(source)
    path = Path(source).resolve()
    if not path.is_file():
        raise ValueError(f"there is no file {source}.")
    sys.path.insert(0, str(path.parent))  # as `python FILE.py` has it
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, "a file that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module
