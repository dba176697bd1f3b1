"""Fixtures of the search's tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def heap(monkeypatch):
    """Sets what a plan is predicted to need, given as (program, plan) -> bytes."""

    def of(need):
        for module in ("estimate", "attempt"):
            monkeypatch.setattr(f"vmem_jax.search.{module}.predicted_need", need)
        return need

    return of
