"""What a key of the configuration changes stands in the schema, and the report asks it there: no key is forgotten."""
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_args

import pytest

from titan_hydra.config.field import Changes
from titan_hydra.config.load import changes_of, kind_of, known_keys
from titan_hydra.report import compare
from titan_hydra.report.cells import ReportCell
from titan_hydra.runs.records import dotted_config
from titan_hydra.runs.rundir import State

PAGE = {  # stated here again, so that a slip in the schema is seen
    ("work", "learning"): (
        "model.dim", "model.family", "model.a_stranger", "data.seq_len", "data.document_mask", "data.image_patches", "comm.rank",
        "comm.name", "debug.balance_experts", "train.objective", "adapter.name", "adapter.rank", "adapter.alpha"),
    ("learning",): (
        "train.beta", "train.clip", "train.imports", "train.sources", "data.train_on", "data.chat_template", "data.path", "data.encoders",
        "data.caption_dropout", "data.validation_path", "data.validation_split", "data.global_batch", "data.mixture", "validation.steps",
        "optimizer.lr", "optimizer.muon_momentum", "lr_scheduler.warmup_steps", "seed", "steps", "tokenizer.path",
        "checkpoint.initial_load_path", "checkpoint.exclude_from_loading", "fault_tolerance.sync_every"),
    ("work",): ("debug.deterministic", "debug.anomaly", "debug.nan_hunt", "debug.trace_activations"),
    (): ("parallelism.tp", "parallelism.cp_rotate", "pp_schedule.name", "ac.name", "ac.budget", "precision.converter", "compile.name",
         "data.local_batch", "loss.name", "model.attention", "validation.interval", "checkpoint.name", "metrics.log_every",
         "comm.init_timeout_seconds", "optimizer.masters"),
}


def what_differs(config: dict, key: str) -> set[str]:
    """Ask the report what two cells that differ in a key have not in common."""
    one, another = ({key: 3}, {key: 7}) if key != "data.mixture" else ({key: {}}, {f"{key}.web.weight": 0.5})
    rest = {name: value for name, value in config.items() if name != key}
    cells = [ReportCell(name, Path(name), [], State("done"), rest | own) for name, own in (("a", one), ("b", another))]
    found = compare.differences(cells, ["a", "b"], set())
    assert len(found) <= 1 and all(f"{key}.".startswith(f"{one.key}.") for one in found), (key, found)
    alike = {"work": compare.same(*cells, compare.WORK), "learning": compare.same(*cells, compare.LEARNING)}
    assert all(getattr(one, name) is not alike[name] for one in found for name in alike)
    return {name for name in alike if not alike[name]}


@pytest.fixture(scope="module")
def flat(config):
    return dotted_config(config)


def test_the_report_asks_the_schema_what_each_key_changes(flat):
    """Every key, those of all families too: none is left out, and what is neither learning nor work is no difference."""
    for key, spec in known_keys().items():
        if not is_dataclass(kind_of(key)):
            changes = changes_of(key)[1]
            assert changes in get_args(Changes), key
            assert what_differs(flat, key) == {name for name in ("learning", "work") if name in changes}, key
            if not spec.metadata["identity"]:
                assert "learning" not in changes, f"{key} is not part of the hash, so it must not change what is learned"


def test_a_key_that_says_nothing_changes_what_is_learned():
    assert changes_of("seed") == ("seed", "learning") and changes_of("model.a_stranger.key") == ("model", "learning and work")
    assert changes_of("data.mixture.web.weight") == ("data.mixture", "learning") and changes_of("data.prefetch")[1] == "technique"


@pytest.mark.parametrize(("key", "value"), [("train.objective", "dpo"), ("train.beta", 0.2), ("data.train_on", "all"), ("adapter.rank", 8),
                                            ("data.chat_template", "chatml"), ("validation.steps", 20)])
def test_what_is_learned_differs_is_refused_or_said(sweep, capsys, key, value):
    sweep.cell("a", losses=[5.0, 4.0], result={"tokens_per_second": 100.0})
    sweep.cell("b", {key: value}, losses=[5.0, 4.0], result={"tokens_per_second": 100.0}, swept=False)
    status, _, err = sweep.report(capsys)
    name = changes_of(key)[0]
    assert (status, err.startswith(f"{name} differs: ")) == (2, True)
    status, out, _ = sweep.report(capsys, "--allow", name)
    assert status == 0 and "losses are not compared" in out and "| yes" not in out


@pytest.mark.parametrize(("key", "changes"), [(key, changes) for changes, keys in PAGE.items() for key in keys])
def test_the_report_keeps_what_the_page_promises(flat, key, changes):
    assert what_differs(flat, key) == set(changes)
