"""With --json a command prints one JSON document on stdout, and nothing else there."""

import json
import math

import pytest

from titan_hydra.core.base.text import to_json


@pytest.fixture(scope="module")
def two_runs(launcher_of_module):
    """Return a folder with a sweep of two finished runs."""
    done = launcher_of_module.run("-m", *launcher_of_module.TINY, "cluster=inline", "name=tiny", "seed=1,2")
    assert done.returncode == 0, done.stderr
    return launcher_of_module


def document(launcher, *words, status=0):
    """Run a command as its own process, and return what it printed on stdout as JSON."""
    done = launcher.python("-m", "titan_hydra.cli", *words)
    assert done.returncode == status, done.stdout + done.stderr
    return json.loads(done.stdout)


def refuse_constant(name):
    raise ValueError(f"{name} is not JSON")


def test_numbers_that_are_not_finite_are_null_and_keys_keep_their_order():
    text = to_json({"z": math.nan, "a": [math.inf, 1.5, (-math.inf,)], "b": {"c": 1}})
    assert json.loads(text, parse_constant=refuse_constant) == {"z": None, "a": [None, 1.5, [None]], "b": {"c": 1}}
    assert [*json.loads(text)] == ["z", "a", "b"]


def test_status_report_and_compare_print_one_document(two_runs):
    first, second = document(two_runs, "status", "--json")["cells"]
    assert {first["state"], second["state"]} == {"done"}
    (sweep,) = document(two_runs, "status", "--all", "--json")
    assert sweep["states"] == {"done": 2} and sweep["started"] > 0
    report = document(two_runs, "report", "--json", "--plots", "-o", "figures")
    assert [row["baseline"] for row in report["rows"]] == [True, False] and report["rows"][1]["mean_loss"] > 0
    assert list((two_runs.folder / "figures").glob("*.svg"))
    over = document(two_runs, "report", "--json", "--over", "seed")
    assert over["over"] == "seed" and over["rows"][0]["runs"] == 2
    found = document(two_runs, "compare", first["hash"], second["hash"], "--json")
    assert [(row["key"], row["a"], row["b"], row["changes"]) for row in found["configuration"]] == [
        ("seed", 1, 2, "learning"),
        ("sweep.cell", "seed=1", "seed=2", "nothing"),
    ]
    assert (
        found["loss"]["first_beyond_tolerance"] == 1
        and not found["loss"]["same_bits"]
        and found["steps"]["number"] == 5
    )
    assert document(two_runs, "compare", first["hash"], first["hash"], "--json")["loss"]["same_bits"]


def test_plan_prints_one_document(two_runs):
    words = ("plan", "model=llama3_8b", "hardware=h100", "--json")
    assert document(two_runs, *words, "gpus=8", "--plot", "plots")[0]["fits"] == "yes"
    assert list((two_runs.folder / "plots").glob("*.svg"))
    assert document(two_runs, *words, "--gpus", "8,16", "--plot", "plots")[1]["gpus"] == 16
    assert document(two_runs, *words, "gpus=8", "--cell", "data.local_batch=64", status=2)["fits"] == "no"
    assert "rules" in document(two_runs, *words, "gpus=8", "--why", "parallelism=fsdp_tp")
    (two_runs.folder / "conf").mkdir()  # else --into writes into the package
    fit = document(two_runs, "rates", "calibrate", "hardware=cpu", "--json", "--into", "ours", "--from", "seed=1")
    assert fit["runs"][0]["step_seconds"] > 0 and (two_runs.folder / "conf/hardware/ours.yaml").is_file()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("status", "-f", "--json"), "--json: prints one document, and --follow goes on"),
        (("report", "--csv", "--json"), "--json: prints one document, and --csv another"),
    ],
)
def test_what_has_no_single_document_is_refused_in_one_line(two_runs, words, reason):
    done = two_runs.python("-m", "titan_hydra.cli", *words)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(reason) and done.stderr.count("\n") == 1


def test_verify_prints_one_document(two_runs):
    assert document(two_runs, "verify", "--list", "--ranks", "1", "--json")[0]["ranks"] == 1
    found = document(two_runs, "verify", "model=qwen3_debug", "--only", "single, accumulation 4", "--json")
    for case in found["cases"]:
        assert case["passed"] and case["loss"]["difference"] <= case["loss"]["bound"] and found["versions"]["torch"]
