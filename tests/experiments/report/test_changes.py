"""The schema says for each key what a change of it affects. The report reads this from the schema, so no key is
forgotten.
"""

import csv
import json
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_args

import pytest

from titan_hydra.core.job.config.field import Changes
from titan_hydra.core.job.config.load import changes_of, kind_of, known_keys
from titan_hydra.core.job.run import records
from titan_hydra.experiments.report import compare
from titan_hydra.experiments.report.cells import ReportCell
from titan_hydra.experiments.runs.rundir import State

PAGE = {  # repeated here, so that a mistake in the schema is noticed
    ("work", "learning"): (
        "model.dim",
        "model.family",
        "model.a_stranger",
        "data.seq_len",
        "data.document_mask",
        "comm.rank",
        "comm.name",
        "debug.balance_experts",
        "objective.name",
        "adapter.name",
        "adapter.rank",
        "adapter.alpha",
    ),
    ("learning",): (
        "train.imports",
        "train.sources",
        "data.path",
        "data.global_batch",
        "data.mixture",
        "optimizer.lr",
        "optimizer.muon_momentum",
        "lr_scheduler.warmup_steps",
        "seed",
        "steps",
        "tokenizer.path",
        "checkpoint.initial_load_path",
        "checkpoint.exclude_from_loading",
        "fault_tolerance.sync_every",
    ),
    ("held-out loss",): ("validation.steps", "data.validation_path", "data.validation_split"),
    ("work",): ("debug.deterministic", "debug.anomaly", "debug.nan_hunt", "debug.trace_activations"),
    (): (
        "parallelism.tp",
        "parallelism.cp_rotate",
        "pp_schedule.name",
        "ac.name",
        "ac.budget",
        "precision.converter",
        "compile.name",
        "data.local_batch",
        "loss.name",
        "model.attention",
        "validation.interval",
        "checkpoint.name",
        "metrics.log_every",
        "comm.init_timeout_seconds",
        "optimizer.masters",
    ),
}


LISTS = {"work": compare.WORK, "learning": compare.LEARNING, "held-out loss": compare.HELD_OUT}


def what_differs(config: dict, key: str) -> set[str]:
    """Return what the report finds different between two validated cells that differ in one key."""
    one, another = ({key: 3}, {key: 7}) if key != "data.mixture" else ({key: {}}, {f"{key}.web.weight": 0.5})
    rest = {name: value for name, value in config.items() if name != key}
    cells = [
        ReportCell(name, Path(name), [], State("done"), rest | own, result={"validation_loss": 1.0})
        for name, own in (("a", one), ("b", another))
    ]
    found = compare.differences(cells, ["a", "b"], set())
    assert len(found) <= 1 and all(f"{key}.".startswith(f"{one.key}.") for one in found), (key, found)
    alike = {name: compare.same(*cells, keys) for name, keys in LISTS.items()}
    assert all(getattr(one, name) is not alike[name] for one in found for name in ("work", "learning"))
    return {name for name in alike if not alike[name]}


@pytest.fixture(scope="module")
def flat(config):
    return records.flat(config)


def test_the_report_asks_the_schema_what_each_key_changes(flat):
    """The test covers every key, including those of all families. A key that changes neither learning nor work makes no
    difference.
    """
    for key, spec in known_keys().items():
        if not is_dataclass(kind_of(key)):
            changes = changes_of(key)[1]
            assert changes in get_args(Changes), key
            assert what_differs(flat, key) == {name for name in LISTS if name in changes}, key
            if not spec.metadata["identity"]:
                assert "learning" not in changes, (
                    f"{key} is not part of the hash, so it must not change what is learned"
                )


def test_a_key_that_says_nothing_changes_what_is_learned():
    assert changes_of("seed") == ("seed", "learning") and changes_of("model.a_stranger.key") == (
        "model",
        "learning and work",
    )
    assert (
        changes_of("data.mixture.web.weight") == ("data.mixture", "learning")
        and changes_of("data.prefetch")[1] == "technique"
    )


@pytest.mark.parametrize(
    ("key", "first", "value"),
    [
        ("objective.name", "language", "another"),
        ("optimizer.muon_momentum", 0.95, 0.9),
        ("data.text_key", "text", "body"),
        ("adapter.rank", 16, 8),
        ("data.path", None, "notes.txt"),
    ],
)
def test_what_is_learned_differs_is_refused_or_said(sweep, capsys, key, first, value):
    sweep.cell("a", {key: first}, losses=[5.0, 4.0], result={"tokens_per_second": 100.0}, swept=False)
    sweep.cell("b", {key: value}, losses=[5.0, 4.0], result={"tokens_per_second": 100.0}, swept=False)
    status, _, err = sweep.report(capsys)
    name = changes_of(key)[0]
    assert (status, err.startswith(f"{name} differs: ")) == (2, True)
    status, out, _ = sweep.report(capsys, "--allow", name)
    assert status == 0 and "losses are not compared" in out and "| yes" not in out


@pytest.mark.parametrize(
    ("key", "values"), [("validation.steps", (3, 7, 9)), ("data.validation_path", ("u", "v", "w"))]
)
def test_other_held_out_samples_are_said_and_nothing_is_refused(sweep, capsys, key, values):
    """Speed and training losses are compared as usual. A cell that was not validated has no held-out loss to compare."""
    for name, value, held_out in zip("abc", values, (4.5, 4.6, None), strict=True):
        sweep.cell(
            name,
            {key: value},
            losses=[5.0, 4.0],
            result={"tokens_per_second": 100.0, "validation_loss": held_out},
            swept=False,
        )
    status, out, err = sweep.report(capsys)
    assert (status, err) == (
        0,
        "",
    ) and f"{key} differs: {values[0]} (a); {values[1]} (b): held-out losses are not compared\n" in out
    assert out.count("  yes\n") == 2, out


@pytest.mark.parametrize(("key", "changes"), [(key, changes) for changes, keys in PAGE.items() for key in keys])
def test_the_report_keeps_what_the_page_promises(flat, key, changes):
    assert what_differs(flat, key) == set(changes)


def test_the_lowest_held_out_loss_has_its_step_and_checkpoint(sweep, capsys):
    """The table shows the lowest loss if it is not the last one; the CSV always has it."""
    for name, losses, best in (("a", (4.0, 3.0, 3.5), "step-00000002"), ("b", (4.0, 3.5, 3.0), None)):
        result = {"tokens_per_second": 100.0, "validation_loss": losses[-1], "best_checkpoint": best}
        directory = sweep.cell(name, losses=[5.0, 4.0], result=result)
        rows = [{"event": "validation", "step": step, "validation_loss": loss} for step, loss in enumerate(losses, 1)]
        (directory / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, out, _ = sweep.report(capsys)
    assert "lowest held out" in out and "3.0000 (step 2, kept)" in out and "(step 3" not in out
    rows = list(csv.DictReader(sweep.report(capsys, "--csv")[1].splitlines()))
    assert [(row["lowest_held_out_loss"], row["lowest_held_out_step"], row["best_checkpoint"]) for row in rows] == [
        ("3.0", "2", "step-00000002"),
        ("3.0", "3", ""),
    ]


def test_each_varied_key_is_a_column_of_the_csv_and_of_the_json(sweep, capsys):
    """A key has the value of the configuration, which is typed; a group has the option that was typed; and what all
    cells share, or what does not belong to the experiment, is no column.
    """
    for number, (option, rate) in enumerate((("fsdp", 1e-3), ("fsdp_tp", 2e-3))):
        directory = sweep.cell(f"c{number}", {"optimizer.lr": rate}, [5.0, 4.0], {"tokens_per_second": 100.0})
        cell = sweep.cells[-1]
        cell["overrides"] += [f"parallelism={option}", "steps=20", f"paths.runs=r{number}", "+model/extra@model=x"]
        cell["overrides"] += ["parallelism.tp=2"] * number
        config = json.loads((directory / "config.json").read_text())
        config["parallelism"]["tp"] = 1 + number
        (directory / "config.json").write_text(json.dumps(config))
    _, out, _ = sweep.report(capsys, "--json")
    document = json.loads(out)
    assert document["varied"] == ["optimizer.lr", "parallelism", "parallelism.tp"]
    assert [[row[key] for key in document["varied"]] for row in document["rows"]] == [
        [1e-3, "fsdp", 1],
        [2e-3, "fsdp_tp", 2],
    ]
    rows = list(csv.DictReader(sweep.report(capsys, "--csv")[1].splitlines()))
    assert [*rows[0]][:4] == ["technique", *document["varied"]]
    assert [[row[key] for key in document["varied"]] for row in rows] == [
        ["0.001", "fsdp", "1"],
        ["0.002", "fsdp_tp", "2"],
    ]
