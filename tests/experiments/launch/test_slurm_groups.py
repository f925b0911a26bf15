"""Test replica groups on SLURM, without a SLURM: what is submitted, what is refused, and the state of a run that
consists of several jobs.
"""

import errno
import json
import subprocess
from pathlib import Path

import pytest

from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.run import Run, group_at, homes_of
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.experiments.launch.cell import Cell
from titan_hydra.experiments.launch.executors.slurm import submit
from titan_hydra.experiments.launch.executors.slurm.squeue import SlurmJob
from titan_hydra.experiments.launch.executors.slurm.submit import Array, JobShape
from titan_hydra.experiments.runs import rundir
from titan_hydra.experiments.runs.queue import Queue
from titan_hydra.experiments.runs.view import jobs_of, shown_group

SLURM = (
    "debug=tiny",
    "precision=fp32",
    "cluster=slurm",
    "cluster.gpus_per_node=4",
    "fault_tolerance=diloco",
    "fault_tolerance.replicas=3",
)


def cell(tmp_path, *overrides: str) -> Cell:
    job = compose_job(*SLURM, f"paths.runs={tmp_path}/runs", *overrides)
    return Cell(1, list(overrides), job, rundir.directory_of(job), 1)


def test_each_group_is_a_task_with_nodes_and_a_folder_of_its_own(tmp_path):
    cells = [
        cell(tmp_path, "gpus=8", f"seed={seed}", "cluster.max_parallel=1", "fault_tolerance.max_restarts=2")
        for seed in (1, 2)
    ]
    assert [(one.ranks, one.nodes) for one in cells] == [(24, 6)] * 2
    (array,) = submit.arrays_of(cells, packed=False, limit=6)
    assert array.shape == JobShape(2, 4, None)
    assert len(submit.arrays_of(cells, packed=False, limit=5)) == 2
    attempts = [[home / "attempts" / "1" for home in homes_of(one.directory, 3)] for one in cells]
    batch = submit.batch_of(array, tmp_path / "jobs", attempts, "name", tmp_path)
    batch.write()
    lines = [line.split("\t") for line in (tmp_path / "jobs" / "cells.tsv").read_text().splitlines()]
    assert [line[1:3] + line[4:] for line in lines] == [["2", "8", "1", "2"]] * 6
    assert [line[3] for line in lines[:3]] == [
        str(cells[0].directory),
        *(f"{cells[0].directory}/replicas/{group}" for group in (1, 2)),
    ]
    assert "#SBATCH --array=0-5%3" in batch.text and "#SBATCH --nodes=2" in batch.text
    subprocess.run(["bash", "-n"], input=batch.text, text=True, check=True)


def test_a_group_takes_a_whole_node_by_itself(tmp_path):
    assert compose_job(*SLURM).gpus == 4


@pytest.mark.parametrize(
    ("exits", "restarts"),
    [(["1"], True), (["137", "75", "1"], True), (["1", "1", "1"], False), (["2"], False), (["0"], False), ([], False)],
)
def test_the_script_starts_a_failed_group_again_so_often(tmp_path, exits, restarts):
    """The attempts of this submission, from the second on, ended in these ways; two restarts are allowed."""
    for number, status in enumerate(["1", *exits], start=1):
        (tmp_path / "attempts" / str(number)).mkdir(parents=True)
        (tmp_path / "attempts" / str(number) / "exit").write_text(f"{status}\n")
    one = cell(tmp_path)
    ((_, text),) = submit.scripts([one])
    function = text[text.index("restarts() {") : text.index("trap : TERM")]
    newest = tmp_path / "attempts" / str(len(exits) + 1) if exits else ""
    code = f'{function}\nattempt="{newest}" rc={exits[-1] if exits else 79}\nrestarts {tmp_path} 2 2'
    assert (subprocess.run(["bash", "-c", code]).returncode == 0) is restarts
    assert subprocess.run(["bash", "-c", code[:-1] + "0"]).returncode, "a run without groups"


@pytest.mark.parametrize(
    ("farthest", "restarts"),
    [([5, 5, 5], True), ([5, 5, 5, 5], False), ([5, 5, 5, 9, 9], True), ([5, 9, 12, 20, 30, 40], True)],
)
def test_lost_nodes_end_a_run_only_if_it_makes_no_progress(tmp_path, farthest, restarts):
    """Each attempt lost a node, after the step that it made last; three times in a row are allowed without progress."""
    for number, step in enumerate(farthest, start=1):
        attempt = tmp_path / "attempts" / str(number)
        attempt.mkdir(parents=True)
        (attempt / "exit").write_text("79\n")
        layout.STATUS.write(attempt, {"step": step, "phase": "data", "time": 1.0})
    ((_, text),) = submit.scripts([cell(tmp_path)])
    function = text[text.index("restarts() {") : text.index("trap : TERM")]
    code = f'{function}\nattempt="{tmp_path}/attempts/{len(farthest)}" rc=79 lost=3\nrestarts {tmp_path} 1 0'
    assert (subprocess.run(["bash", "-c", code]).returncode == 0) is restarts


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (("launch.packed=true",), "launch.packed=true: replica groups are jobs of their own"),
        (
            ("fault_tolerance=torchft", "fault_tolerance.lighthouse=node0"),
            "fault_tolerance.lighthouse=node0: must be an address HOST:PORT",
        ),
        (("fault_tolerance.lighthouse=node0:29510",), "fault_tolerance.lighthouse="),
    ],
)
def test_what_groups_on_slurm_refuse(launcher, line, fault):
    refused = launcher.run(*SLURM, "launch.mode=dry", *line)
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1 and fault in refused.stderr, refused.stderr


def test_a_dry_run_shows_the_jobs(launcher):
    done = launcher.run(*SLURM, "launch.mode=dry", "fault_tolerance=torchft", "fault_tolerance.lighthouse=node0:29510")
    assert (
        done.returncode == 0 and "1 cell of 3 replica groups, one job array, 1 node x 4 GPUs a task" in done.stdout
    ), done.stderr
    assert "#SBATCH --array=0-2%3" in done.stdout


def claimed(one: Cell, token: str) -> list[Path]:
    """Claim the attempts of all groups, submitted as array number 7."""
    owner = {"executor": "slurm", "token": token, "packed": False, "job_id": None, "user": "me", "code": ""}
    first = rundir.claim(one.directory, rundir.newest_attempt(one.directory) + 1, one.job, [], **owner)
    attempts = [first, *rundir.claim_groups(one.directory, 3, [], **owner)]
    for index, attempt in enumerate(attempts):
        rundir.note(attempt, index=index, job_id=f"7_{index}")
    return attempts


def queue(*states: str) -> Queue:
    return Queue(
        {f"7_{index}": SlurmJob(f"7_{index}", state, nodes=f"node{index}") for index, state in enumerate(states)}
    )


def test_a_run_is_where_its_groups_are(tmp_path):
    one = cell(tmp_path, "gpus=1")
    attempts = claimed(one, "0a0a0a0a")
    assert [attempt.parents[1] for attempt in attempts] == homes_of(one.directory, 3)
    now = rundir.state(one.directory, {"slurm": queue("PENDING", "RUNNING", "RUNNING")})
    assert (now.kind, now.attempt, now.host) == ("running", 1, "node1,node2")
    assert [group.kind for group in now.groups] == ["queued", "running", "running"]
    assert shown_group(one.directory, now)[0] == one.directory / "replicas" / "1"
    assert [state.job.id for _, _, state in jobs_of(one.directory, now)] == ["7_0", "7_1", "7_2"]
    assert rundir.state(one.directory, {"slurm": queue("PENDING", "COMPLETED", "PENDING")}).kind == "queued"

    (attempts[2] / "rank_0.json").write_text(
        json.dumps(
            {
                "exit_status": 77,
                "error": {"type": "RunError", "message": "late", "traceback": "", "time": 1.0, "secondary": False},
            }
        )
    )
    assert rundir.state(one.directory, {"slurm": queue("RUNNING", "RUNNING", "FAILED")}).kind == "running"
    over = rundir.state(one.directory, {"slurm": queue("CANCELLED", "CANCELLED", "FAILED")})
    assert over.kind == "failed" and over.failure.line == "replica group 2: rank 0: late" and over.failure.status == 77

    again = claimed(one, "0b0b0b0b")
    assert [attempt.name for attempt in again] == ["2", "2", "2"]
    (one.directory / "result.json").write_text('{"status": "done"}')
    done = rundir.state(one.directory, {"slurm": Queue()})
    assert done.kind == "done" and [group.attempt for group in done.groups] == [2, 2, 2]


def test_groups_of_another_submission_do_not_count(tmp_path):
    """The process that submitted these groups died before it had claimed their attempts."""
    one = cell(tmp_path, "gpus=1")
    claimed(one, "0a0a0a0a")
    owner = {
        "executor": "slurm",
        "token": "0b0b0b0b",
        "packed": False,
        "job_id": None,
        "user": "me",
        "code": "",
        "pid": 1,
    }
    rundir.note(rundir.claim(one.directory, 2, one.job, [], **owner), ended=1.0)
    now = rundir.state(one.directory, {"slurm": queue("FAILED", "FAILED", "FAILED")})
    assert (now.kind, now.attempt, now.groups) == ("not submitted", 2, ())


def test_a_ranks_place_follows_from_its_groups_folder(tmp_path):
    home = tmp_path / "run-0a0a0a0a" / "replicas" / "2"
    assert group_at(home) == (home.parents[1], 2) and group_at(home.parents[1]) == (home.parents[1], 0)
    (home / "attempts" / "3").mkdir(parents=True)
    run = Run(home, home / "attempts" / "2", 1, 1, 4, replica=2, submission="0b0b0b0b")
    assert run.home == home.parents[1] and run.newer_attempt == 3
    assert run.meetings == run.home / "meetings" / "0b0b0b0b"
    assert run.record_of(1) == home / "attempts" / "2" / "rank_1.json"


def test_array_is_alike_in_its_number_of_groups(tmp_path):
    arrays = submit.arrays_of(
        [cell(tmp_path, "gpus=4"), cell(tmp_path, "gpus=4", "fault_tolerance.replicas=2")], packed=False, limit=100
    )
    assert [isinstance(array, Array) and len(array.cells) for array in arrays] == [1, 1]


def test_a_disk_that_takes_no_claim_ends_the_submission(tmp_path, monkeypatch):
    tries = []

    def full(path, target):
        tries.append(target)
        if len(tries) > 3:
            raise AssertionError("tried for ever")
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match="no room"):
        rundir.claim_groups(tmp_path / "run", 3, [], token="t")
    assert len(tries) == 1
