"""Budgets as people write them, sizes as people read them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmem_jax import BudgetError, DifferentiationError, PlanError, VmemError
from vmem_jax.errors import parse_budget, show_nbytes


@pytest.mark.parametrize(
    "budget, nbytes",
    [
        (1, 1),
        (12 * 2**30, 12 * 2**30),
        ("12GiB", 12 * 2**30),
        ("12 GiB", 12 * 2**30),
        (" 12gib ", 12 * 2**30),
        ("800MB", 800 * 10**6),
        ("1.5KiB", 1536),
        (".5MiB", 2**19),
        ("2TB", 2 * 10**12),
        ("1TiB", 2**40),
        ("1_000B", 1000),
        ("1e3MB", 10**9),
        (2048.0, 2048),
        (np.int64(2048), 2048),
        (np.float32(0.5), 0.5),
        (np.float64(0.5), 0.5),
        ("device", "device"),
        (" Device ", "device"),
        (0.5, 0.5),
        (1.0, 1.0),
    ],
)
def test_budget(budget, nbytes):
    parsed = parse_budget(budget)
    assert parsed == nbytes and type(parsed) is type(nbytes)


@pytest.mark.parametrize(
    "budget, error, words",
    [
        (0, ValueError, "more than 0 bytes. Got 0"),
        (-5, ValueError, "more than 0 bytes. Got -5"),
        (0.0, ValueError, "positive, finite number. Got 0.0"),
        (-0.5, ValueError, "positive, finite"),
        (math.nan, ValueError, "positive, finite number. Got nan"),
        (math.inf, ValueError, "positive, finite number. Got inf"),
        (-math.inf, ValueError, "positive, finite number. Got -inf"),
        (1.5, ValueError, "fraction above 1.*'1.5GiB'"),
        (True, TypeError, r"Got True \(bool\)"),
        (None, TypeError, r"Got None \(NoneType\)"),
        ([1], TypeError, r"Got \[1\] \(list\)"),
        ("", ValueError, "is no size"),
        ("much", ValueError, "is no size"),
        ("GiB", ValueError, "is no size"),
        ("12", ValueError, "has no unit of B, KB"),
        ("12 parsecs", ValueError, "has no unit of"),
        ("12GiBs", ValueError, "has no unit of"),
        ("50%", ValueError, "fraction as a float, 0.5"),
        ("0GiB", ValueError, "at least one byte"),
        ("0.1B", ValueError, "at least one byte"),
        ("-1GiB", ValueError, "at least one byte"),
        ("1e999GiB", ValueError, "finite size"),
        ("nanGiB", ValueError, "is no size"),
        ("1.2.3GiB", ValueError, "is no size"),
    ],
)
def test_no_budget(budget, error, words):
    with pytest.raises(error, match=words):
        parse_budget(budget)


@pytest.mark.parametrize(
    "nbytes, text",
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (2**20 - 1, "1024.00 KiB"),
        (12 * 2**30, "12.00 GiB"),
        (3 * 2**50, "3072.00 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_show_nbytes(nbytes, text):
    assert show_nbytes(nbytes) == text


@given(st.integers(1024, 2**60))
def test_shown_sizes_are_read_back(nbytes):
    assert parse_budget(show_nbytes(nbytes)) == pytest.approx(nbytes, rel=5.1e-3)


def test_budget_error_says_both_numbers_where_and_what_to_try():
    error = BudgetError(
        policy="auto", budget=2**30, lowest_peak=2**31, at="Net/conv at net.py:3", holders="x 1 GiB"
    )
    expected = (
        "policy `auto` cannot fit this step in 1.00 GiB: the lowest predicted peak is 2.00 GiB, "
        "at Net/conv at net.py:3.\nWhat holds the bytes there:\n  x 1 GiB\n"
        "What would help:\n  1. Ask for a larger `budget`"
    )
    assert str(error).startswith(expected)
    assert (error.budget, error.lowest_peak, error.at) == (2**30, 2**31, "Net/conv at net.py:3")


def test_errors_are_of_the_kind_that_python_users_catch():
    assert issubclass(BudgetError, (VmemError, ValueError))
    assert issubclass(PlanError, ValueError) and issubclass(PlanError, VmemError)
    assert issubclass(DifferentiationError, TypeError)
