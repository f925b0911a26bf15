"""Test predictions of published measurements: benchmarks/planner/published.yaml, and files in the same format."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import yaml

from titan_hydra.cli import main
from titan_hydra.experiments.plan import time
from titan_hydra.experiments.plan.bands import BANDS, band_of, technique_of
from titan_hydra.experiments.plan.shape import NotPredictable
from titan_hydra.instruments.rates import command_score
from titan_hydra.instruments.rates.published import rows_of, score

PUBLISHED = Path(__file__).parents[3] / "benchmarks/planner/published.yaml"

ROW = {
    "id": "own",
    "source": "here",
    "model": "llama3_8b",
    "hardware": "h100",
    "gpus": 64,
    "tp": 2,
    "dp": 32,
    "dp_kind": "fsdp2",
    "global_batch": 64,
    "seq_len": 8192,
    "precision": "bf16",
    "recompute": "full",
    "compile": "block",
    "tokens_per_second_per_gpu": 9000,
}


def test_a_row_becomes_the_job_that_it_describes():
    found = score(rows_of_one(ROW))
    assert {"gpus=64", "parallelism.dp_shard=32", "parallelism.tp=2", "data.global_batch=64", "data.local_batch=1"} <= {
        *found.overrides
    }
    assert {"ac=full", "compile=block", "precision=bf16", "hardware=h100"} <= {*found.overrides}
    assert found.technique == "dense, tp" and found.speed[0] == 9000 and found.memory is None and found.apart is None
    balanced = score(
        rows_of_one(ROW | {"model": "deepseek_v3_16b", "tp": 1, "ep": 8, "dp": 64, "routing": "forced balance"})
    )
    drifting = score(rows_of_one(ROW | {"model": "deepseek_v3_16b", "tp": 1, "ep": 8, "dp": 64}))
    assert balanced.technique == "experts, ep" and balanced.speed[1] > 1.02 * drifting.speed[1]


def rows_of_one(row: dict) -> dict:
    return {"stack": {}, "shape": None} | row


@pytest.mark.parametrize(
    "source", yaml.safe_load(PUBLISHED.read_text())["sources"], ids=lambda source: source["source"][-40:]
)
def test_the_first_row_of_each_source_is_predicted(source):
    row = next(row for row in rows_of(PUBLISHED) if row["id"] == source["rows"][0]["id"])
    try:
        found = score(row)
    except NotPredictable as error:
        assert "no preset" in str(error)
        return
    assert found.apart or abs(found.deviation) < max(band_of(found.shape.job), 0.25), found.deviation


def test_ranks_of_megatron_gather_no_weights_for_a_microbatch():
    """With ZeRO-1, context-parallel ranks have whole weights, so FSDP's messages take as long for 8 microbatches as for 2."""
    row = rows_of_one(ROW | {"gpus": 8, "tp": 1, "cp": 2, "dp": 4, "dp_kind": "zero1", "micro_batch": 1})
    shapes = [score(row | {"global_batch": 4 * number}).shape for number in (2, 8)]
    few, many = (time.speed(shape.job, shape=shape).parts["FSDP"] for shape in shapes)
    assert many == pytest.approx(few)


def test_rows_that_this_project_measured_are_set_apart():
    """They tune nothing, and no median of what others published has them in it."""
    rows = [
        row
        for row in rows_of(PUBLISHED)
        if row["source"].startswith("titan_hydra") or "benchmarks/gpu" in row["source"]
    ]
    assert len(rows) == 6 and all(row["apart"] == "measured by this project" for row in rows)


def test_a_source_that_gives_both_confirms_how_its_flops_are_counted():
    rows = [row for row in rows_of(PUBLISHED) if row.get("formula") == "nemo" and "tokens_per_second_per_gpu" in row]
    assert len(rows) == 12
    for row in rows:
        from_flops = {name: value for name, value in row.items() if name != "tokens_per_second_per_gpu"}
        assert score(from_flops).speed[0] == pytest.approx(row["tokens_per_second_per_gpu"], rel=2e-3), row["id"]


def test_rows_that_are_wrongly_predicted_to_fit_are_counted():
    one = score(rows_of_one(ROW))
    rooms = [(40.0, 50.0), (75.0, 50.0), (50.0, 90.0)]  # measured, predicted, of 79.1
    assert command_score._fits([replace(one, memory=pair) for pair in rooms]) == [
        "3 rows with measured memory: 1 predicted to fit, but above 92% of the device; 1 predicted not to fit, but ran",
        "",
    ]
    assert command_score._fits([replace(one, memory=None)]) == []


@pytest.mark.long
def test_all_rows_are_predicted_as_the_page_says():
    found = []
    for row in rows_of(PUBLISHED):
        with contextlib.suppress(NotPredictable):
            found.append(score(row))
    counted = [one for one in found if not one.apart]
    dense = [abs(one.error) for one in counted if one.technique.startswith("dense")]
    experts = [abs(one.error) for one in counted if one.technique.startswith("experts")]
    assert len(counted) == 199 and median(dense) < 0.045 and max(dense) < 0.37
    assert median(experts) < 0.17 and max(experts) < 0.51
    memory = sorted(abs(one.memory[1] / one.memory[0] - 1) for one in counted if one.memory)
    assert memory[-1] < 0.12
    inside = [abs(one.deviation) <= band_of(one.shape.job) for one in counted]
    assert sum(inside) >= 0.8 * len(inside)
    assert {technique_of(one.shape.job) for one in counted} <= {*BANDS}, "each technique with rows has a band"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hardware": "gh200"}, "hardware=gh200: has no preset"),
        ({"precision": "nvfp4"}, "precision=nvfp4: is not a format of this trainer"),
        ({"model": "of_another"}, "model=of_another: its shape is not known"),
        ({"global_batch": 33}, "global_batch=33: is no multiple of dp=32"),
        ({"seq_len": None}, "seq_len: is not given"),
    ],
)
def test_a_row_that_cannot_be_predicted_says_why(change, reason):
    row = {key: value for key, value in (rows_of_one(ROW) | change).items() if value is not None or key == "shape"}
    with pytest.raises(NotPredictable) as error:
        score(row)
    assert str(error.value) == reason


def test_the_page_gives_the_left_out_errors_that_the_command_prints():
    page = (Path(__file__).parents[3] / "docs/plan.md").read_text()
    for name, one in json.loads(command_score.LEFT_OUT.read_text()).items():
        line = next(line for line in page.splitlines() if line.startswith(f"| {name} | {one['rows']} |"))
        assert line.endswith(f"| {one['median']:.1%}, {one['worst']:+.1%} | {one['inside']} |")


def test_the_command_reads_a_file_of_rows(tmp_path, capsys):
    file = tmp_path / "rows.yaml"
    file.write_text(yaml.safe_dump([ROW, ROW | {"id": "other", "hardware": "gh200"}]))
    assert main(["rates", "score", str(file)]) == 0
    told = capsys.readouterr().out
    left_out = json.loads(command_score.LEFT_OUT.read_text())
    lines = [line.split() for line in told.splitlines()]
    for name, one in left_out.items():
        assert [*name.split(), str(one["rows"]), f"{one['median']:.1%}", f"{one['worst']:+.1%}"] in [
            line[: len(name.split()) + 3] for line in lines
        ]
    assert "dense" in told and "own: 9,000 tokens/s, predicted" in told and "skipped  other: hardware=gh200" in told
    file.write_text("nonsense")
    assert main(["rates", "score", str(file)]) == 2
    assert "is not a list of rows with an id each" in capsys.readouterr().err
    assert main(["rates", "score", str(tmp_path / "none.yaml")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_rows_run_the_kernels_that_their_software_called():
    """NeMo's launcher of 24.03 switched cuDNN's kernel off; Megatron's other rows have it, also in a ring, whose two
    streams lose no time; gradients of Megatron are summed in bfloat16.
    """
    known = {row["id"]: row for row in rows_of(PUBLISHED)}
    for name, kernel, preset in (
        ("nemo-long-h100-7b-16k", "model.attention=flash", "hardware=h100"),
        ("nemo-24.12-llama3_8b-8", "hardware.flash_tflops=null", "hardware=h100"),
        ("fms-h100-7b", "model.attention=flash", "hardware=h100"),
        ("foundry-h100-mpt7b-s2048-g8-mb6", "hardware=h100_2023", "hardware=h100_2023"),
    ):
        assert {kernel, preset} <= {*score(known[name]).overrides}, name
    ring = score(known["nemo-24.12-llama3_8b-8"]).shape
    rates = [time._attention_rate(replace(ring, transformer_engine=one), time.FITTED) for one in (True, False)]
    assert ring.reduced == 2 and rates[1] == pytest.approx(time.FITTED.ring * rates[0])
