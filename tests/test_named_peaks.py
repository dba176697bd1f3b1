"""named_peaks: the plan behind a lowest peak that an error named is there for the next process."""

from __future__ import annotations

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vmem_jax
from vmem_jax.api import named_peaks, records
from vmem_jax.profile.kept import VARIABLE, Identity
from vmem_jax.search.search import Search


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    records.forget()
    yield tmp_path / named_peaks.NamedPeaks.folder
    records.forget()


def step(w, x):
    def loss(w):
        y = x
        for _ in range(8):
            y = jnp.tanh(y @ w)
        return jnp.mean(y**2)

    return w - jax.grad(loss)(w)


ARGS = (jax.ShapeDtypeStruct((32, 32), jnp.float32), jax.ShapeDtypeStruct((256, 32), jnp.float32))


def error_at(budget, **options):
    with pytest.raises(vmem_jax.BudgetError) as caught:
        vmem_jax.jit(step, budget=budget, **options).lower(*ARGS).compile()
    return caught.value


def planned_at(budget, monkeypatch):
    """The plans that the record of the search has."""
    given = []
    run = Search.run

    def recording(search, groups):
        given.extend(tried.plan for tried in search.record.all())
        return run(search, groups)

    monkeypatch.setattr(Search, "run", recording)
    made = vmem_jax.jit(step, budget=budget).lower(*ARGS).compile()
    return made, given


def test_another_search_without_the_first_ones_memory_has_the_plan_that_was_named(
    directory, monkeypatch
):
    error = error_at(1)
    records.forget()  # as another process has none
    made, given = planned_at(error.lowest_peak, monkeypatch)
    assert error.lowest_plan.schedule in [plan.schedule for plan in given]
    assert made.plan.schedule == error.lowest_plan.schedule and len(made.attempts) == 1


def fused(w, x):
    """Plain jit keeps none of what is predicted as arrays."""
    for _ in range(6):
        x = x * 0.9 + w
        x = x - 0.1 * x * x
    return x.sum(0)


FUSED = (jax.ShapeDtypeStruct((64,), jnp.float32), jax.ShapeDtypeStruct((512, 64), jnp.float32))


def needs(budget, **options):
    made = vmem_jax.jit(fused, budget=budget, **options).lower(*FUSED).compile()
    return [(attempt.plan.policy, attempt.need) for attempt in made.attempts]


def test_where_plain_jit_has_the_lowest_peak_nothing_else_is_compiled_for_it(directory):
    with pytest.raises(vmem_jax.BudgetError) as caught:
        vmem_jax.jit(fused, budget=1).lower(*FUSED).compile()
    named = caught.value.lowest_peak
    records.forget()
    assert needs(named) == [("keep", named)]


def test_where_a_budget_is_all_that_plain_jit_needs_plain_jit_runs(directory):
    assert [policy for policy, _ in needs(1.0)] == ["keep"]
    records.forget()
    assert "keep" not in [policy for policy, _ in needs(1.0, policy="recompute", sub_batches=4)][:1]


def test_another_process_has_the_same_key(directory):
    error = error_at(1)
    (file,) = directory.glob("*.json")
    (here,) = json.loads(file.read_text())["steps"]
    code = "import test_named_peaks as t; print(t.error_at(1).lowest_peak)"
    root = str(__file__).rsplit("/", 1)[0]
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert int(ran.stdout) == error.lowest_peak
    assert [*json.loads(file.read_text())["steps"]] == [here]


def test_other_options_have_another_key(directory):
    error_at(1)
    error_at(1, policy="recompute")
    error_at(1, sub_batches=2, batch_argnums=1)
    (file,) = directory.glob("*.json")
    assert len(json.loads(file.read_text())["steps"]) == 3


def test_a_budget_that_is_met_keeps_nothing(directory):
    vmem_jax.jit(step, budget=1.0).lower(*ARGS).compile()
    assert not [*directory.glob("*.json")]


def test_the_oldest_step_is_dropped_first(tmp_path):
    error = error_at(1)
    file = named_peaks.NamedPeaks(Identity("a card", {}), tmp_path)
    keys = [str(i) for i in range(named_peaks.MOST + 1)]
    for key in keys:
        file.add({key: (error.lowest_plan, 5)})
    file.add({keys[1]: (error.lowest_plan, 7)})  # named again: now it is the latest one
    assert [*file.load()] == [*keys[2:], keys[1]]
    assert file.load()[keys[1]] == (error.lowest_plan, 7)


@pytest.mark.parametrize("content", ({"steps": {"a": ["{}", 5]}}, {"steps": {"a": 5}}, {}))
def test_a_damaged_file_is_as_none(tmp_path, content):
    file = named_peaks.NamedPeaks(Identity("a card", {}), tmp_path)
    file.path.parent.mkdir(parents=True)
    head = {"format": "vmem_jax lowest peaks", "schema": file.schema}
    file.path.write_text(json.dumps({**head, "device": "a card", "versions": {}, **content}))
    assert file.load() == {}


def test_constants_of_the_step_are_no_arguments_in_an_error():
    """XLA keeps them with the code, so less than they take can be a lowest peak."""
    table = np.linspace(0, 1, 4096, dtype=np.float32)
    scaled = lambda x: jnp.sum(x * table)
    with pytest.raises(vmem_jax.BudgetError) as caught:
        vmem_jax.jit(scaled, budget=100).lower(jax.ShapeDtypeStruct((4096,), jnp.float32)).compile()
    assert 16384 < caught.value.lowest_peak < 2 * 16384
    assert "arguments, outputs and constants alone take 32.0" in str(caught.value)
