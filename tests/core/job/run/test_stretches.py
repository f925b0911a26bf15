"""The stretches of a run whose layout changed are read from its rows: steps that were lost count once."""

import json

from titan_hydra.core.job.config import to_dict
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.stretches import stretches_of
from titan_hydra.experiments.compose.compose import compose_job


def event(step, name, gpus, **degrees):
    return {"event": "layout", "step": step, "parallelism": name, "gpus": gpus, "local_batch": 2, **degrees}


def write(folder, events, steps):
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in events))
    rows = [
        {"step": step, "loss": 1.0, "tokens_per_second": 100.0 * step, "first_step": step in (1, 11)} for step in steps
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_attempts_in_one_layout_are_one_stretch_and_lost_ones_none(tmp_path):
    events = [
        event(0, "fsdp", 8, dp_shard=8),
        event(4, "fsdp", 8, dp_shard=8),  # requeued in the same layout
        event(10, "fsdp_tp", 6, dp_shard=3, tp=2),  # its node was lost before it had saved anything
        event(10, "fsdp", 4, dp_shard=4),
    ]
    write(tmp_path, events, range(1, 13))
    first, second = stretches_of(tmp_path)
    assert (first.first, first.last, first.gpus, first.rate) == (1, 10, 8, 600.0)
    assert (
        str(second)
        == "steps 11 to 12: parallelism=fsdp on 4 ranks (dp_shard 4), local batch 2, 1,200 tokens/s per device"
    )


def test_a_layout_that_made_no_step_does_not_divide_a_stretch(tmp_path):
    events = [event(0, "fsdp", 8), event(10, "fsdp_tp", 6, tp=2), event(10, "fsdp", 8)]
    write(tmp_path, events, range(1, 13))
    assert [(one.first, one.last) for one in stretches_of(tmp_path)] == [(1, 12)]


def test_the_layout_before_the_first_resume_is_that_of_the_first_configuration(tmp_path):
    job = compose_job("debug=tiny", "gpus=2", "parallelism=tp")
    layout.FIRST_CONFIG.write(tmp_path, to_dict(job))
    write(tmp_path, [event(4, "fsdp", 8, dp_shard=8)], range(1, 13))
    first, second = stretches_of(tmp_path)
    assert (first.first, first.last, second.first) == (1, 4, 5)
    assert first.words == "parallelism=tp on 2 ranks (tp 2), local batch 2"


def test_a_run_that_never_changed_has_none(tmp_path):
    write(tmp_path, [{"event": "checkpoint", "step": 3}], range(1, 5))
    assert stretches_of(tmp_path) == []
