"""Test that torch accepts every pipeline layout that the rules accept, and properties of stages that the acceptance
matrix does not check.
"""

import copy

import pytest
import torch
from torch import nn

from titan_hydra.core import models
from titan_hydra.core.job.batches import microbatch_objection, microbatches
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.registry import PIPELINE_SCHEDULES
from titan_hydra.core.job.pipeline import blocks_of_stages, modules_of_stages, splits_backward, stages_of_ranks
from titan_hydra.core.job.rules.checks import check
from titan_hydra.core.parallel import stages
from titan_hydra.core.parallel.gradients import gradient_norm
from titan_hydra.core.parallel.pipeline import Stage, build_schedule, hidden_state
from titan_hydra.core.train.fake import fake_step, fake_world
from titan_hydra.experiments.compose.compose import CONF, compose_job

PIPELINE = ("parallelism=pp", "precision=fp32", "data=synthetic", "data.local_batch=16")


def job_with(schedule, pp=2, **values):
    """Return a pipelined job that has not been checked."""
    job = compose_job(*PIPELINE, "gpus=2", "model.n_layers=8")
    job.gpus = job.parallelism.pp = pp
    job.pp_schedule.name = schedule
    job.pp_schedule.stages_per_rank = {"gpipe": 1, "1f1b": 1}.get(schedule, 2)
    for key, value in values.items():
        setattr(job.pp_schedule, key, value)
    return job


@pytest.mark.parametrize(
    ("layers", "stages", "blocks"),
    [
        (126, 16, [7, *[8] * 14, 7]),  # Llama 3 405B, split as in the paper
        (32, 4, [7, 9, 9, 7]),
        (8, 8, [1] * 8),
        (5, 4, [1, 2, 1, 1]),
        (7, 2, [4, 3]),
    ],
)
def test_blocks_are_balanced_with_embedding_and_head(layers, stages, blocks):
    job = job_with("1f1b", pp=stages)
    job.model.n_layers = layers
    assert blocks_of_stages(job) == blocks
    weights = [count + (stage in (0, stages - 1)) for stage, count in enumerate(blocks)]
    assert max(weights) - min(weights) <= 1 or min(blocks) == 1


def test_a_split_by_names_or_by_number_is_what_was_asked_for():
    by_names = job_with("1f1b", pp=4, split=["layers.1", "layers.6", "norm"])
    assert modules_of_stages(by_names)[0] == ["tok_embeddings", "layers.0"]
    assert modules_of_stages(by_names)[3] == ["norm", "output"]
    by_number = job_with("1f1b", pp=4, layers_per_stage=2)
    by_number.model.n_layers = 7
    assert blocks_of_stages(by_number) == [2, 2, 2, 1]
    for job in (by_names, by_number, job_with("zbv", pp=3)):
        assert [name for names in modules_of_stages(job) for name in names] == family_of(job.model).modules(job.model)


def test_stages_lie_in_a_loop_or_in_a_v():
    assert stages_of_ranks(job_with("interleaved_1f1b", pp=3)) == [[0, 3], [1, 4], [2, 5]]
    assert stages_of_ranks(job_with("zbv", pp=3)) == [[0, 5], [1, 4], [2, 3]]
    by_file = job_with("csv", stages_per_rank=1, csv=f"{CONF}/pp_schedule/zb_h1.csv")
    assert stages_of_ranks(by_file) == [[0], [1]] and splits_backward(by_file) and microbatches(by_file) == 8


@pytest.mark.parametrize("schedule", [name for name in PIPELINE_SCHEDULES if name != "csv"])
def test_torch_takes_the_microbatches_that_the_rule_takes(world, schedule):
    for pp in (2, 3, 4):
        job = job_with(schedule, pp=pp)
        mesh = world(job.parallelism)
        for number in range(1, 13):
            job.pp_schedule.microbatches = job.data.local_batch = number
            first = torch.empty(1)
            parts = [
                Stage(nn.Linear(1, 1), stage, mesh, job, torch.device("cpu"), first, dict)
                for stage in stages_of_ranks(job)[0]
            ]
            if microbatch_objection(job, number) is None:
                build_schedule(parts, job, lambda output, labels: output.sum())
            else:
                with pytest.raises(ValueError, match="microbatches"):
                    build_schedule(parts, job, lambda output, labels: output.sum())


@pytest.mark.parametrize(
    ("schedule", "batch", "number"),
    [
        ("1f1b", 16, 4),
        ("1f1b", 6, 3),
        ("gpipe", 1, 1),
        ("zbv", 8, 8),
        ("interleaved_1f1b", 12, 6),
        ("1f1b", 7, 7),
        ("1f1b", 1, 1),
    ],
)
def test_microbatches_are_up_to_twice_the_stages(schedule, batch, number):
    job = job_with(schedule)
    job.data.local_batch = batch
    assert microbatches(job) == number


def test_stages_hold_every_parameter_once_under_its_own_name(world):
    for schedule, pp in (("1f1b", 4), ("zbv", 2), ("looped_bfs", 4)):
        job, names = job_with(schedule, pp=pp), []
        with torch.device("meta"):
            model = models.build(job.model, job.data.seq_len)
        for rank in range(pp):
            parts = stages.split(copy.deepcopy(model), world(job.parallelism, rank), job)
            shell = stages.whole(parts)
            names += [name for name, _ in shell.named_parameters()]
            own = [parameter for part in parts for parameter in part.parameters()]
            assert {id(parameter) for parameter in own} == {id(parameter) for parameter in shell.parameters()}
        assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_the_schedule_leaves_gradients_as_the_loss_made_them(world):
    """The loss is already divided by the tokens of the global batch. torch would also divide by the number of
    microbatches; losses with AdamW would not show this error.
    """
    job = job_with("1f1b")
    stage = Stage(nn.Linear(1, 1), 0, world(job.parallelism), job, torch.device("cpu"), torch.empty(1), dict)
    assert build_schedule([stage], job, lambda output, labels: output.sum()).scale_grads is False


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_rank_receives_for_microbatches_in_flight_alone(schedule, monkeypatch):
    """torch would allocate all microbatches at once: 40 GiB for 128 of them (70B, TP 4, PP 8)."""
    assert received_at_once(schedule, 6, monkeypatch) == received_at_once(schedule, 18, monkeypatch) <= 4 + 2


def received_at_once(schedule, number, monkeypatch):
    """Return the largest number of received tensors that rank 1 of two holds in a step of `number` microbatches."""
    stages, counts, receive = set(), [], Stage.get_fwd_recv_ops

    def count(stage, microbatch):
        operations = receive(stage, microbatch)
        stages.add(stage)
        received = [
            one
            for stage in stages
            for of in (stage.args_recv_info, stage.grad_recv_info)
            for ones in of.values()
            for one in ones
        ]
        counts.append(sum(one.buffer is not None and not one.buffer.is_meta for one in received))
        return operations

    monkeypatch.setattr(Stage, "get_fwd_recv_ops", count)
    small = (
        "model=llama3_debug",
        "model.dim=32",
        "model.n_heads=2",
        "model.n_kv_heads=2",
        "model.vocab_size=64",
        "data.seq_len=16",
    )
    sizes = (
        "gpus=2",
        f"data.local_batch={number}",
        f"data.global_batch={number}",
        f"pp_schedule.microbatches={number}",
    )
    job = compose_job(
        "parallelism=pp", "data=synthetic", f"pp_schedule={schedule}", *small, *sizes, "comm=fake", "comm.rank=1"
    )
    with fake_world(job):
        fake_step(job)
    monkeypatch.undo()
    return max(counts)


def test_what_goes_between_stages_takes_a_gradient_back(world):
    job = job_with("1f1b", microbatches=8)
    hidden = hidden_state(job)
    assert hidden.requires_grad and hidden.shape == (2, job.data.seq_len, job.model.dim)


def test_the_norm_of_all_stages_survives_huge_and_infinite_gradients(world):
    mesh = world(job_with("1f1b").parallelism)
    for value in (1e30, float("inf")):
        weight = nn.Parameter(torch.zeros(1))
        weight.grad = torch.tensor([value])
        assert gradient_norm([weight], mesh.pipeline) == torch.tensor(value)


GOOD = ["0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"]
BROKEN = [
    (GOOD[:1], "for 1 rank,"),
    ([GOOD[0], "1F0,1Q0"], "1Q0"),
    ([GOOD[0], GOOD[1].replace("1", "2")], "every stage from 0 to 1"),
    ([GOOD[0], "1F0,1B0,1F1"], "must run B"),
    ([GOOD[0], "1F0,1B0,1B0,1F1,1B1"], "twice"),
    ([GOOD[0], "1F0,1B0"], "forward of every"),
    ([GOOD[0], "1F1,1B1,1F0,1B0"], "in the order of the microbatches"),
    (["0F0,0B0,0F1,0B1", "1F0,1F1,1B0,1B1"], "0B0 waits for ever"),
    ([GOOD[0], "1F0,1W0,1I0,1F1,1B1"], "waits for ever"),
]


@pytest.mark.parametrize(("lines", "text"), BROKEN)
def test_a_schedule_file_that_could_not_run_is_refused(tmp_path, lines, text):
    path = tmp_path / "schedule.csv"
    path.write_text("\n".join(lines))
    faults = check(job_with("csv", stages_per_rank=1, csv=str(path)))
    assert [fault.key for fault in faults] == ["pp_schedule.csv"] and text in str(faults[0]), faults


def test_a_schedule_file_that_can_run_passes(tmp_path):
    path = tmp_path / "schedule.csv"
    path.write_text("\n".join(GOOD))
    job = job_with("csv", stages_per_rank=1, csv=str(path))
    assert check(job) == [] and microbatches(job) == 2
    path = tmp_path / "v.csv"
    path.write_text("0F0,3F0,3B0,0B0\n1F0,2F0,2I0,2W0,1B0\n".replace("2I0,2W0", "(2I0;2W0)OVERLAP_F_B"))
    assert check(job_with("csv", stages_per_rank=2, csv=str(path))) == []
