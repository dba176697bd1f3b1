"""compare: real runs beside predicted ones, by hand and on the CPU's twins of the calls."""

from __future__ import annotations

import dataclasses
import json
import types

import jax
import pytest
import transfer_cases as cases
from test_jit import batch, params, step
from test_moves import CHAIN, costs_of
from test_offload import FAST, offloading
from test_trace import ORDER, assert_apart, of, read

from vmem_jax import VmemError, cli
from vmem_jax.core.lanes import Copy
from vmem_jax.core.observation import Kernel, Observation
from vmem_jax.core.plan import Transfer
from vmem_jax.core.simulate import simulate
from vmem_jax.profile import observe as observing
from vmem_jax.profile.observe import observe
from vmem_jax.report.compare import compare
from vmem_jax.transfer.arena import Moved
from vmem_jax.transfer.extension import describe

COSTS = costs_of(CHAIN, link=2.0)
MOVES = (Transfer(2, 3, 4, 14, 15),)
TIMELINE = simulate(CHAIN, ORDER, COSTS, MOVES)

built = pytest.mark.skipif(describe().startswith("none"), reason=f"native extension: {describe()}")


def run(shift=0.0, **changes) -> Observation:
    """A run whose copies overlap for a second, the second half of the second under compute."""
    return dataclasses.replace(
        Observation(
            seconds=20.0 + shift,
            copies={(0, "out"): Copy(2.0 + shift, 6.0 + shift), (0, "into"): Copy(5.0, 8.0)},
            waits={(0, "out"): Copy(4.0, 5.5), (0, "into"): Copy(8.0, 8.25)},
            kernels=(Kernel("a", 0.0, 4.5), Kernel("b", 5.5, 7.0)),
        ),
        **changes,
    )


# -- compare


def test_every_copy_and_stall_has_both_numbers():
    found = compare(CHAIN, TIMELINE, COSTS, [run(), run(0.5), run(9.0)])
    out, into = found.rows
    assert (out.transfer, out.direction, into.direction, out.nbytes) == (0, "out", "into", 10)
    assert (out.predicted, into.predicted) == TIMELINE.copies[0]
    assert (out.real, into.real) == (Copy(2.5, 6.5), Copy(5.0, 8.0))  # medians
    assert (out.real_stall, into.real_stall) == (1.5, 0.25)
    assert out.predicted_stall + into.predicted_stall == pytest.approx(TIMELINE.stalls[0])
    assert out.predicted_stall > 0 and into.predicted_stall > 0
    assert (found.predicted_seconds, found.real_seconds) == (TIMELINE.seconds, 20.5)


def test_overlap_is_reckoned_from_both_recordings():
    found = compare(CHAIN, TIMELINE, COSTS, [run()])
    real = found.real_overlap
    assert (real.out, real.into, real.both, real.copies) == (4.0, 3.0, 1.0, 6.0)
    assert real.hidden == (4.5 - 2.0) + (7.0 - 5.5)
    # without kernels: all that the copies take, the waits left out
    blind = compare(CHAIN, TIMELINE, COSTS, [run(kernels=())]).real_overlap
    assert blind.hidden == 6.0 - 1.5
    predicted = found.predicted_overlap
    stalled = sum(TIMELINE.stalls)
    assert predicted.both == 0 and predicted.out == predicted.into == pytest.approx(5)
    assert predicted.hidden == pytest.approx(predicted.copies - stalled)
    assert "25%" not in found.summary() and "(33% of the shorter)" in found.summary()


def test_lanes_lie_side_by_side():
    found = compare(CHAIN, TIMELINE, COSTS, [run()], budget=77)
    events = found.trace()["traceEvents"]
    names = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert set(names) == {"predicted", "real"}
    copies = [e for e in events if e.get("cat") == "copy"]
    assert sum(e["pid"] == names["real"] for e in copies) == len(copies) / 2 == 2
    assert {e["name"] for e in copies} == {CHAIN.buffers[2].label}


def test_a_run_of_something_else_is_refused():
    with pytest.raises(ValueError, match=r"1 of the plan's 2 copies were not seen.*0 into"):
        compare(CHAIN, TIMELINE, COSTS, [run(copies={(0, "out"): Copy(0, 1)})])


def test_without_transfers_it_says_so():
    timeline = simulate(CHAIN, ORDER, COSTS)
    found = compare(CHAIN, timeline, COSTS, [run(copies={}, waits={})])
    assert "moves nothing" in found.summary() and "predicted overlap" not in found.summary()


# -- observe


@built
def test_what_a_step_did_is_seen():
    budgeted = offloading()
    compiled = budgeted.lower(params(), batch()).compile()
    device, arguments = jax.devices()[0], (params(), batch())
    with cases.injected(delay_seconds=1e-3):
        seen = observe(lambda: budgeted(*arguments), device, compiled.arena, runs=3, warm_up=1)
    assert len(seen.runs) == 3 and seen.notes == ()
    keys = {(i, way) for i in range(len(compiled.plan.transfers)) for way in ("out", "into")}
    for one in seen.runs:
        assert set(one.copies) == set(one.waits) == keys
        assert all(copy.end - copy.begin >= 1e-3 for copy in one.copies.values())
        assert one.kernels[0].begin == 0.0 and one.kernels[-1].end <= one.seconds
        # kernels and copies are on one clock: what is fetched last is read by a later kernel
        assert max(c.end for c in one.copies.values()) <= one.kernels[-1].end
        assert min(c.begin for c in one.copies.values()) >= 0.0
    explanation = budgeted.explain(*arguments)
    found = compare(explanation.program, explanation.timeline, explanation.costs, seen.runs)
    assert len(found.rows) == len(keys) and 0 < found.real_overlap.copies < found.real_seconds
    lanes = read(found.trace())
    assert_apart([e for e in of("copy", lanes["device to host"]) if e["pid"] == 2])


@built
def test_an_arena_of_another_step_is_an_error():
    device = jax.devices()[0]
    double = jax.jit(lambda x: 2 * x)
    with cases.pinned(device) as arena, pytest.raises(VmemError, match="recorded no copy"):
        observe(lambda: double(1.0), device, arena, runs=1)


def test_a_step_that_moves_nothing_is_seen_too():
    plain = jax.jit(step)
    seen = observe(lambda: plain(params(), batch()), jax.devices()[0], None, runs=2)
    assert [set(one.copies) for one in seen.runs] == [set(), set()]
    assert all(one.kernels for one in seen.runs)


def moved(out, nbytes, begin):
    return Moved(False, out, True, 1, 0, nbytes, begin, begin + 1.0)


def test_clocks_are_tied_by_the_copies_that_both_saw():
    kernels = [Kernel("k", 10.0, 11.0)]
    ours = [moved(True, 8, 1.0), moved(True, 16, 2.0), moved(False, 8, 3.0)]
    theirs = [(True, 8, 1.25), (True, 4, 1.5), (True, 16, 2.25), (False, 8, 3.25)]
    found, note = observing._tied(kernels, theirs, ours)
    assert found == [Kernel("k", 9.75, 10.75)]
    assert "the same 3 copies" in note and "shift by 250000 µs" in note


@pytest.mark.parametrize("theirs", [[], [(True, 8, 1.0)], [(True, 16, 1.0), (True, 8, 2.0)]])
def test_copies_that_the_profiler_lacks_are_said(theirs):
    kernels = [Kernel("k", 10.0, 11.0)]
    ours = [moved(True, 8, 1.0), moved(True, 16, 2.0)]
    found, note = observing._tied(kernels, theirs, ours)
    assert found == kernels and f"saw {len(theirs)} copies to the host" in note
    assert "the arena made 2" in note


# -- vmem-jax profile --compare


@built
def test_the_command_prints_both_and_writes_the_lanes(capsys, tmp_path, monkeypatch):
    pytest.importorskip("flax")
    shapes = jax.eval_shape(lambda: (params(), batch()))
    work = types.SimpleNamespace(
        name="dense", step=step, batch=shapes[1], state_shapes=lambda: shapes[0],
        init=lambda key: params(), random_batch=lambda key: batch(),
    )  # fmt: skip
    monkeypatch.setattr("vmem_jax.models.job", lambda *args, **options: work)
    machine = "vmem_jax.cli.profile.measured_machine"
    monkeypatch.setattr(machine, lambda device, **options: FAST)
    path = tmp_path / "trace.json"
    options = ("--batch", 4, "--seconds", 0, "--compare", "--budget", 0.5, "--trace", path)
    status = cli.main(list(map(str, ("profile", "dense", *options, "--allow", "order", "offload"))))
    out = capsys.readouterr().out
    assert status == 0
    assert "transfers, predicted and real" in out and "real overlap: both directions" in out
    events = json.loads(path.read_text())["traceEvents"]
    copies = [e for e in events if e.get("cat") == "copy"]
    assert len({e["pid"] for e in copies}) == 2
    assert out.count(" out ") >= len(copies) / 4 > 0  # half of them are real, half of those go out


@pytest.mark.parametrize(
    "argv, says",
    [
        (["vgg16", "--batch", "4", "--compare"], "--compare needs a model and --budget"),
        (["--budget", "0.5"], "are for --compare"),
        (["--compare", "--budget", "0.5"], "--compare needs a model and --budget"),
        (["--trace", "x.json"], "are for --compare"),
    ],
)
def test_options_that_do_not_go_together(capsys, argv, says):
    assert cli.main(["profile", *argv]) == 2
    assert says in capsys.readouterr().err
