"""Errors in the user's terms: what failed, the two numbers, where, and what to try."""

from __future__ import annotations

import math
import numbers
import re


class VmemError(Exception):
    """Base of every error that vmem_jax raises on purpose."""


class BudgetError(VmemError, ValueError):
    """No plan of the policy fits in the budget. Nothing was run.

    Attributes:
      budget: the budget in bytes.
      lowest_peak: the lowest peak that was reached, in bytes.
      compiled: whether `lowest_peak` is the compiler's figure or a prediction.
      at: the user's layer and source line of that peak.
      lowest_plan: the `Plan` with that peak; None if no plan changes it. If `compiled`, the step runs
        within `lowest_peak` with it as `plan`.
    """

    def __init__(
        self,
        *,
        policy: str,
        budget: int,
        lowest_peak: int,
        at: str,
        holders: str = "",
        compiled: bool = False,
        advice: str = "",
        lowest_plan: object = None,
    ) -> None:
        how = "compiled" if compiled else "predicted"
        lines = [
            f"policy `{policy}` cannot fit this step in {show_nbytes(budget)}: the lowest {how} peak "
            f"is {show_nbytes(lowest_peak)}, at {at}."
        ]
        if holders:
            lines += ["What holds the bytes there:", *(f"  {x}" for x in holders.splitlines())]
        advice = advice or "  1. Ask for a larger `budget`, or take a smaller batch."
        lines += ["What would help:", advice]
        super().__init__("\n".join(lines))
        self.budget = budget
        self.lowest_peak = lowest_peak
        self.compiled = compiled
        self.at = at
        self.lowest_plan = lowest_plan


class TechniqueError(VmemError, ValueError):
    """The step cannot use a technique that the policy needs, or that is the only one in `allow`."""


class SubBatchError(VmemError, ValueError):
    """The batch of the step cannot be split into the requested sub-batches."""


class LayersError(VmemError, ValueError):
    """The step lacks the layers that the policy plans with: convolutions, or a backward pass."""


class PlanError(VmemError, ValueError):
    """The plan was made for another step, or its file is damaged."""


class DifferentiationError(VmemError, TypeError):
    """A budgeted step was put under `grad`, `jvp` or `vmap`."""


class CompileError(VmemError, RuntimeError):
    """XLA could not compile a planned step; the user's own program may well compile.

    Attributes:
      status: XLA's status code, such as "UNIMPLEMENTED" or "RESOURCE_EXHAUSTED"; "" for none.
      message: XLA's full message.
    """

    def __init__(self, *, name: str, message: str) -> None:
        first = message.strip().splitlines()[0] if message.strip() else "it gave no reason"
        status = first.split(":", 1)[0]
        super().__init__(
            f"XLA could not compile `{name}` as it was planned: {first}. The plan is at fault, not "
            "your function. Try another `budget` or `policy`, or name fewer techniques in `allow`."
        )
        self.message = message
        self.status = status if re.fullmatch("[A-Z_]+", status) else ""


class HostMemoryError(VmemError, MemoryError):
    """The host memory for parked tensors cannot be pinned. Nothing was pinned.

    Attributes:
      nbytes: the requested bytes.
      limit_nbytes: the bytes that may still be pinned.
      limit: the name of the limit.
    """

    def __init__(self, *, nbytes: int, limit_nbytes: int, limit: str) -> None:
        super().__init__(
            f"{show_nbytes(nbytes)} of host memory cannot be pinned for parked tensors: at most "
            f"{show_nbytes(limit_nbytes)} more may be, by {limit}. Raise that limit, or plan with a "
            "smaller `host_budget` or less offloading."
        )
        self.nbytes = nbytes
        self.limit_nbytes = limit_nbytes
        self.limit = limit


class WorkspaceError(VmemError, ValueError):
    """No known configuration of a convolution is within its workspace limit.

    Attributes:
      limit: bytes; None for no limit.
      least: the smallest possible workspace in bytes; None if no usable one was timed.
    """

    def __init__(self, *, what: str, limit: int | None, least: int | None) -> None:
        within = "" if limit is None else f" within a workspace of {show_nbytes(limit)}"
        why = (
            "no micro-batches that were timed make up its batch. Profile it first."
            if least is None
            else f"the smallest possible is {show_nbytes(least)}. Allow that much, or profile "
            "smaller micro-batches."
        )
        super().__init__(f"{what} cannot be done{within}: {why}")
        self.limit = limit
        self.least = least


_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def show_nbytes(nbytes: float) -> str:
    """`nbytes` for people, in binary units with two decimals."""
    if abs(nbytes) < 1024:
        return f"{nbytes:.0f} B"
    exponent = min(int(math.log2(abs(nbytes)) // 10), 4)
    return f"{nbytes / 2 ** (10 * exponent):.2f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[exponent]}"


def parse_budget(budget: object) -> int | float | str:
    """Returns a budget as bytes (int), a fraction of the plain peak (float), or `"device"`.

    Args:
      budget: bytes (`int`), `"12GiB"` or `"800MB"`, a fraction in (0, 1] (`float`), or `"device"`.

    Raises:
      ValueError: it is not a size, not positive, not finite, or a fraction above 1.
      TypeError: it is neither a number nor a string.
    """
    forms = "bytes as an int, a size such as '12GiB' or '800MB', a fraction of plain jit's peak such as 0.5, or 'device'"  # noqa: E501
    budget = python_number(budget)
    if isinstance(budget, bool) or not isinstance(budget, int | float | str):
        raise TypeError(f"`budget` must be {forms}. Got {budget!r} ({type(budget).__name__}).")
    if isinstance(budget, str):
        if budget.strip().lower() == "device":
            return "device"
        return _size_of(budget, "budget", forms)
    if isinstance(budget, int):
        if budget <= 0:
            raise ValueError(f"`budget` must be more than 0 bytes. Got {budget}.")
        return budget
    if math.isnan(budget) or math.isinf(budget) or budget <= 0:
        raise ValueError(f"`budget` must be a positive, finite number. Got {budget}.")
    if budget > 1:
        if budget == int(budget) and budget >= 1024:
            return int(budget)
        raise ValueError(
            f"`budget`={budget} is a fraction above 1 of plain jit's peak. For bytes give an int "
            f"or a size such as '{budget}GiB'."
        )
    return budget


def python_number(value: object) -> object:
    """`value` as Python's own int or float, if it is a number of another library, as NumPy's are."""
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def parse_size(size: object, name: str) -> int:
    """Bytes of the argument `name`: an int, or a size such as "64MiB".

    Raises:
      ValueError: it is no size, or not positive.
      TypeError: it is neither an int nor a string.
    """
    forms = "bytes as an int, or a size such as '64MiB' or '64MB'"
    size = python_number(size)
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise TypeError(f"`{name}` must be {forms}. Got {size!r} ({type(size).__name__}).")
    if isinstance(size, str):
        return _size_of(size, name, forms)
    if size <= 0:
        raise ValueError(f"`{name}` must be more than 0 bytes. Got {size}.")
    return size


def _size_of(text: str, name: str, forms: str) -> int:
    stripped = text.strip().replace(" ", "").replace("_", "")
    digits = len(stripped)
    while digits and not (stripped[digits - 1].isdigit() or stripped[digits - 1] == "."):
        digits -= 1
    number, unit = stripped[:digits], stripped[digits:].upper()
    try:
        value = float(number)
    except ValueError:
        raise ValueError(f"`{name}`={text!r} is no size. Give {forms}.") from None
    if unit == "%":
        return_value = value / 100
        raise ValueError(f"`{name}`={text!r}: give the fraction as a float, {return_value}.")
    if unit not in _UNITS:
        raise ValueError(f"`{name}`={text!r} has no unit of {', '.join(_UNITS)}. Give {forms}.")
    nbytes = value * _UNITS[unit]
    if math.isnan(nbytes) or math.isinf(nbytes) or nbytes < 1:
        raise ValueError(f"`{name}`={text!r} must be a finite size of at least one byte.")
    return int(nbytes)
