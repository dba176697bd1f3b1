"""option_checks: checks of the options of policies, where a policy is made."""

from __future__ import annotations

import math
from collections.abc import Collection


def check_flag(name: str, value: object) -> None:
    """Raises TypeError unless option `name` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False. Got {value!r} ({type(value).__name__}).")


def check_choice(name: str, value: object, known: Collection[str]) -> None:
    """Raises ValueError unless option `name` is one of `known`."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"`{name}`={value!r}; there is {', '.join(known)}.")


def check_number(name: str, value: object, least: float, most: float = math.inf) -> None:
    """Checks that option `name` is a number from `least` to `most`; a whole one if `least` is.

    Raises:
      TypeError: it is no number, or no whole one.
      ValueError: it is out of range.
    """
    whole = isinstance(least, int)
    wanted = f"{'a whole number' if whole else 'a number'} from {least}"
    wanted += "" if math.isinf(most) else f" to {most}"
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise TypeError(f"`{name}` must be {wanted}. Got {value!r} ({type(value).__name__}).")
    if not least <= value <= most:
        raise ValueError(f"`{name}` must be {wanted}. Got {value!r}.")


def check_numbers(name: str, values: object, least: float, most: float = math.inf) -> None:
    """Checks that option `name` is a tuple of such numbers as `check_number` wants."""
    if not isinstance(values, tuple):
        raise TypeError(f"`{name}` must be a tuple of numbers. Got {values!r}.")
    for value in values:
        check_number(name, value, least, most)
