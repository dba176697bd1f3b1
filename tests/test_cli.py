"""The command line: a whole training, a plan, and what the user reads when something is wrong."""

import json
import re

import pytest

from vmem_jax import Plan, cli
from vmem_jax.cli import info
from vmem_jax.cli.options import budget_of

pytest.importorskip("flax")

TINY = ["--model", "resnet11", "--batch", "16", "--image", "16"]


def run(capsys, *argv):
    """The exit status, and what was written to both streams."""
    status = cli.main([str(a) for a in argv])
    out, err = capsys.readouterr()
    return status, out, err


def test_train_ends_with_both_peaks_and_both_losses(capsys):
    status, out, _ = run(capsys, "train", *TINY, "--steps", 3, "--budget", 0.6)
    last = out.strip().splitlines()[-1]
    found = re.fullmatch(
        r"resnet11, 3 steps of 16 images\. Peak: plain ([\d.]+) MiB, vmem_jax ([\d.]+) MiB "
        r"\((\d+)% of plain\)\. Final loss: plain ([\d.]+), vmem_jax ([\d.]+)\.",
        last,
    )
    assert status == 0 and found, last
    plain_peak, peak, share, plain_loss, loss = map(float, found.groups())
    assert peak <= 0.6 * plain_peak and share <= 60
    assert loss == pytest.approx(plain_loss, rel=1e-2)


def test_train_without_comparison_runs_only_the_budgeted_step(capsys):
    status, out, _ = run(
        capsys, "train", *TINY, "--steps", 1, "--budget", "1GiB", "--no-compare", "--policy", "keep"
    )
    assert status == 0
    assert re.search(r"Final loss: vmem_jax [\d.]+\.$", out.strip())


def test_plan_prints_the_table_and_saves(capsys, tmp_path):
    path = tmp_path / "plan.json"
    status, out, _ = run(
        capsys,
        *("plan", "resnet11", "--batch", 4, "--image", 16, "--classes", 10),
        *("--budget", 0.7, "--save", path, "--trace", tmp_path / "trace.json"),
    )
    assert status == 0
    assert "stage1_block1" in out and "peak: plain jit" in out
    plan = Plan.load(path)
    assert plan.policy == "auto"
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(e.get("cat") == "step" for e in events) == len(plan.order)
    assert {e["args"]["budget"] for e in events if e["name"] == "budget"} == {plan.budget}


def test_plan_sweeps_all_budgets(capsys):
    status, out, _ = run(
        capsys,
        *("plan", "resnet11", "--batch", 8, "--image", 16, "--classes", 10, "--sweep", 3),
    )
    rows = [line.split("│")[1:-1] for line in out.splitlines() if line.startswith("│")]
    assert status == 0 and len(rows) >= 2
    seconds = [float(row[3]) for row in rows]
    assert seconds == sorted(seconds, reverse=True)
    assert rows[0][0].strip() == rows[0][2].strip() and "recompute" in rows[0][5]


def test_info_names_versions_and_devices(capsys):
    status, out, _ = run(capsys, "info")
    assert status == 0
    assert re.search(r"^jax \d", out, re.M)
    assert "device " in out and "auto" in out and "device-less compiler: " in out
    assert re.search(r"^transfers: CPU ", out, re.M)
    assert re.search(r"^times: ", out, re.M) and re.search(r"^report: ", out, re.M)
    assert re.search(r"^faster: ", out, re.M)


@pytest.mark.parametrize(
    "here, says",
    [
        (("cpu", "CPU alone, built without CUDA", 0, False), []),
        (("cpu", "CPU alone, built without CUDA", 0, True), ["jax\\[cuda13\\]"]),
        (("cpu", "none: not built", 0, False), ["extension is missing"]),
        (("gpu", "CPU alone, built without CUDA", 9, True), ["pip install vmem_jax_cuda13"]),
        (("gpu", "CPU and CUDA 13.0, no convolutions", 0, True), ["lacks parts", "profile=True"]),
        (("gpu", "CPU and CUDA 13.0, convolutions by cuDNN", 9, True), []),
    ],
)
def test_info_says_what_would_make_steps_faster(here, says):
    found = info.advice(*here)
    assert len(found) == len(says)
    assert all(map(re.search, says, found))


@pytest.mark.parametrize(
    "argv, says",
    [
        (("train", "--model", "lenet"), "no model 'lenet'"),
        (("train", "--model", "vgg17", "--image", 32), "19 or 16 + 5k"),
        (("train", "--batch", 2000), "1437 images"),
        (("plan", "resnet11", "--batch", 4, "--budget", "1KB"), "cannot fit this step in 1000 B"),
        (("plan", "resnet11", "--batch", 4), "--budget for one plan"),
        (("plan", "resnet11", "--batch", 4, "--sweep", 2, "--budget", 1), "or --sweep"),
        (("plan", "resnet11", "--batch", 4, "--budget", "900TiB"), "but the device has"),
    ],
)
def test_what_is_wrong_is_one_message_and_status_2(capsys, argv, says):
    status, _, err = run(capsys, *argv)
    assert status == 2
    assert err.startswith(f"vmem-jax {argv[0]}: ") and says in err and "Traceback" not in err


def test_an_error_keeps_its_traceback_on_demand():
    with pytest.raises(ValueError, match="no model"):
        cli.main(["--traceback", "train", "--model", "lenet"])


@pytest.mark.parametrize(
    "argv, says",
    [
        (["train", "--budget", "50%"], "give the fraction as a float"),
        (["train", "--steps", "0"], "must be 1 or more"),
        (["train", "--steps", "1", "--epochs", "1"], "not allowed with"),
        ([], "COMMAND"),
    ],
)
def test_options_that_make_no_sense_are_refused(capsys, argv, says):
    with pytest.raises(SystemExit) as raised:
        cli.main(argv)
    assert raised.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, budget",
    [("0.5", 0.5), ("1", 1.0), ("1048576", 1048576), ("800MB", 800_000_000), ("device", "device")],
)
def test_budget_strings(text, budget):
    assert budget_of(text) == budget
    assert type(budget_of(text)) is type(budget)


@pytest.mark.gpu_compile
def test_plan_for_a_card_that_is_not_there(capsys):
    pytest.importorskip("jax_plugins.xla_cuda13")
    status, out, _ = run(
        capsys,
        *("plan", "resnet11", "--batch", 8, "--image", 32, "--classes", 10),
        *("--budget", "1GiB", "--target", "h200"),
    )
    assert status == 0 and "peak: plain jit" in out
