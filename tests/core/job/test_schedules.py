"""The actions of a pipeline schedule that we compute without torch equal torch's own."""

import pytest

from titan_hydra.core.job.schedules import TIME, actions, idle_time, in_flight
from titan_hydra.experiments.compose.compose import compose_job

TORCHS = {
    "looped_bfs": "LoopedBFS",
    "interleaved_1f1b": "Interleaved1F1B",
    "interleaved_zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}
# ranks, stages per rank, microbatches
SIZES = [(2, 2, 4), (4, 2, 8), (4, 3, 8), (8, 2, 16), (4, 2, 4), (2, 4, 2), (16, 2, 32), (4, 2, 3)]


class Stage:
    """The attributes of a stage that torch's schedules read before a step."""

    def __init__(self, index: int, stages: int, ranks: int):
        import torch

        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, stages, ranks, 0
        self.is_first, self.is_last, self.has_backward, self.device = (
            index == 0,
            index == stages - 1,
            True,
            torch.device("cpu"),
        )

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)


def of_torch(name: str, ranks: int, chunks: int, number: int) -> list:
    from torch.distributed.pipelining.schedules import get_schedule_class

    stages = ranks * chunks
    own = [0, stages - 1] if name in ("zbv", "dualpipe_v") else range(0, stages, ranks)
    order = get_schedule_class(TORCHS[name])(
        [Stage(index, stages, ranks) for index in own], number, loss_fn=max
    ).pipeline_order
    steps = [[part for step in order[rank] if step for part in step.sub_actions or (step,)] for rank in range(ranks)]
    return [
        [
            (part.stage_index, part.computation_type.value, part.microbatch_index)
            for part in rank
            if part.computation_type.value in TIME
        ]
        for rank in steps
    ]


@pytest.mark.parametrize("name", TORCHS)
def test_actions_are_torchs(name):
    for ranks, chunks, number in SIZES:
        if (name in ("zbv", "dualpipe_v") and chunks != 2) or (name == "dualpipe_v" and number < 2 * ranks):
            continue
        mine, theirs = actions(name, ranks, chunks, number), of_torch(name, ranks, chunks, number)
        if name == "looped_bfs":  # its backward runs from the last microbatch to the first
            mine, theirs = ([[action[:2] for action in rank] for rank in order] for order in (mine, theirs))
        assert mine == theirs, (name, ranks, chunks, number)


def test_first_and_last_rank_of_1f1b_hold_all_and_one():
    job = compose_job(
        "parallelism=pp",
        "parallelism.pp=4",
        "model.n_layers=8",
        "data.local_batch=8",
        "pp_schedule.microbatches=8",
        "comm=fake",
        "gpus=4",
    )
    assert [in_flight(job, rank, (1,) * 4).most for rank in range(4)] == [4, 3, 2, 1]
    job.pp_schedule.name = "gpipe"
    assert {in_flight(job, rank, (1,) * 4).most for rank in range(4)} == {8}


@pytest.mark.parametrize(
    ("name", "chunks", "idle"), [("1f1b", 1, 0.273), ("interleaved_1f1b", 2, 0.158), ("zbv", 2, 0.059)]
)
def test_idle_time_of_four_ranks_and_eight_microbatches(name, chunks, idle):
    wait, work = idle_time(name, 4, chunks, 8), 3 * 8 * chunks
    assert wait / (wait + work) == pytest.approx(idle, abs=1e-3)
