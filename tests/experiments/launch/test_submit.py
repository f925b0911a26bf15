"""Test what is submitted to SLURM, without a SLURM: shapes and order of arrays, refusals and limits of a site,
manifests, and states that are read from a simulated queue. test_sbatch.py tests the batch script.
"""

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest

from titan_hydra.core.job.run import code as run_code
from titan_hydra.core.job.run import layout
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.experiments.launch.attach import Interrupts
from titan_hydra.experiments.launch.cell import Cell
from titan_hydra.experiments.launch.dispatch import gpu_hours
from titan_hydra.experiments.launch.executors.slurm import limits, squeue, submit
from titan_hydra.experiments.launch.executors.slurm.cancel import ranges
from titan_hydra.experiments.launch.executors.slurm.squeue import SlurmJob
from titan_hydra.experiments.launch.executors.slurm.submit import JobShape
from titan_hydra.experiments.runs import manifest, rundir
from titan_hydra.experiments.runs.queue import Queue

SLURM = ("debug=tiny", "precision=fp32", "cluster=slurm", "cluster.gpus_per_node=4", "cluster.time_minutes=30")


def cell(tmp_path, *overrides: str, number: int = 1) -> Cell:
    job = compose_job(*SLURM, f"paths.runs={tmp_path}/runs", *overrides)
    return Cell(number, list(overrides), job, rundir.directory_of(job), number)


def script(*cells: Cell) -> str:
    ((_, text),) = submit.scripts(list(cells))
    return text


def test_cells_of_one_shape_go_into_one_array(tmp_path):
    cells = [cell(tmp_path, f"gpus={ranks}", f"seed={seed}") for seed in range(3) for ranks in (1, 4, 8, 16)]
    arrays = submit.arrays_of(cells, packed=False, limit=2)
    assert [(array.shape, len(array.cells)) for array in arrays] == [
        (JobShape(nodes, ranks, 30), count) for nodes, ranks in ((1, 1), (1, 4), (2, 4), (4, 4)) for count in (2, 1)
    ]
    (packed,) = submit.arrays_of(cells, packed=True, limit=2)
    assert packed.shape == JobShape(4, 4, 30 * 12)


def test_cells_keep_their_own_cluster_settings(tmp_path):
    cells = [
        cell(
            tmp_path, f"seed={seed}", f"+cluster.environment.NCCL_ALGO={algorithm}", f"cluster.max_requeues={requeues}"
        )
        for seed, (algorithm, requeues) in enumerate((("Ring", 0), ("Tree", 0), ("Ring", 0), ("Ring", 5)))
    ]
    texts = [(len(array.cells), text) for array, text in submit.scripts(cells)]
    assert [count for count, _ in texts] == [2, 1, 1]
    for (_, text), (algorithm, requeues) in zip(texts, (("Ring", 0), ("Tree", 0), ("Ring", 5)), strict=True):
        assert f"export NCCL_ALGO={algorithm}" in text and f"-ge {requeues} ]" in text


@pytest.mark.parametrize(
    ("line", "key"),
    [
        (("launch.packed=true", "cluster.partition=main,urgent"), "launch.packed"),
        (("cluster=slurm,local",), "cluster.executor"),
        (("launch.wait=true,false",), "launch.wait"),
        (("launch.packed=true,false",), "launch.packed"),
    ],
)
def test_what_holds_for_a_whole_line_is_one_value(launcher, line, key):
    refused = launcher.run("-m", *SLURM, "seed=1,2", *line)
    assert refused.returncode == 2 and f"\n{key}=" in f"\n{refused.stderr}", refused.stderr
    # printed where composing takes seconds
    said = [line for line in refused.stderr.splitlines() if not line.startswith("composed ")]
    assert len(said) == 1 and not (launcher.folder / "runs").exists()


def test_what_a_job_may_take_is_known_before(tmp_path):
    cells = [cell(tmp_path, "gpus=4"), cell(tmp_path, "gpus=8")]
    assert gpu_hours(cells) == 4 * 0.5 + 8 * 0.5
    assert gpu_hours([cell(tmp_path, f"gpus={ranks}", "launch.packed=true") for ranks in (4, 8)]) == 3 * 8 * 0.5
    assert gpu_hours([cell(tmp_path, "cluster.time_minutes=null")]) is None


def test_an_array_is_throttled(tmp_path):
    cells = [cell(tmp_path, f"seed={seed}", "cluster.max_parallel=2") for seed in range(5)]
    assert "#SBATCH --array=0-4%2" in script(*cells)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Return a site whose queue accepts at most `site.limit` jobs of a user, and arrays of at most three tasks;
    `site.scripts` are the accepted scripts.
    """
    bin, code = tmp_path / "bin", tmp_path / "code" / "abc"
    bin.mkdir()
    refuse = "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates accounting/QOS policy"
    (bin / "sbatch").write_text(f"""#!/bin/bash
n=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$2"); have=$(cat {bin}/taken-* 2>/dev/null | grep -c .)
echo >>{bin}/calls
if [ $((have + ${{n:-0}} + 1)) -gt $(cat {bin}/limit) ]; then echo '{refuse}' >&2; exit 1; fi
seq 0 "${{n:-0}}" >{bin}/taken-$$; number=$((100 + $(ls {bin}/taken-* | wc -l))); cp "$2" {bin}/script-$number; echo $number
""")
    (bin / "squeue").write_text("#!/bin/sh\n")
    for name in ("sbatch", "squeue"):
        (bin / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin}:{os.environ['PATH']}")
    monkeypatch.setattr(submit, "largest_array", lambda: 3)
    monkeypatch.setattr(run_code, "take_snapshot", lambda *given: code)

    class Site:
        def submit(self, limit: int, *cells: Cell) -> int:
            (bin / "limit").write_text(str(limit))
            (bin / "calls").unlink(missing_ok=True)
            states = rundir.states([one.directory for one in cells])
            start = [(one, state) for one, state in zip(cells, states, strict=True) if one.wants(state)]
            return submit.submit(start, tmp_path / "sweep", tmp_path / "code", Interrupts(), submit.ArrayOrder(states))

        @property
        def scripts(self) -> dict[str, str]:
            return {file.name[7:]: file.read_text() for file in sorted(bin.glob("script-*"))}

        @property
        def calls(self) -> int:
            return len((bin / "calls").read_text())

    return Site()


def test_cells_of_several_arrays_do_not_run_more_at_once_than_of_one(tmp_path, site):
    cells = [
        cell(
            tmp_path,
            f"seed={seed}",
            f"gpus={gpus}",
            "cluster.max_parallel=2",
            "+cluster.sbatch={dependency: 'after:5'}",
        )
        for gpus in (1, 2)
        for seed in range(7)
    ]
    assert site.submit(1000, *cells) == 0
    waits = [re.findall("^#SBATCH --dependency=(.*)", text, re.M) for text in site.scripts.values()]
    assert waits == [["after:5"], *([f"after:5,afterany:{number}"] for number in (101, 102, 103, 104, 105))]
    assert all("--array=0-2%2" in site.scripts[number] for number in ("101", "102", "104", "105"))


def test_arrays_that_max_parallel_has_room_for_run_beside_each_other(tmp_path, site):
    """Four cells may run at once. One cell has 1 device, two cells have 2, three have 4; later one more cell is added
    to the command line.
    """
    cells = [
        cell(tmp_path, f"seed={seed}", f"gpus={gpus}", "data.global_batch=8", "cluster.max_parallel=4")
        for gpus, many in ((1, 1), (2, 2), (4, 3))
        for seed in range(many)
    ]
    assert site.submit(1000, *cells) == 0
    waits = [re.findall("^#SBATCH --dependency=(.*)", text, re.M) for text in site.scripts.values()]
    assert waits == [[], [], ["afterany:101:102"]]
    active = [
        rundir.State("running", job=SlurmJob("101", "RUNNING")),
        *(rundir.State("queued", job=SlurmJob(f"103_{task}", "PENDING")) for task in range(3)),
        rundir.State("done"),
    ]
    waits = [submit.ArrayOrder(active).after(count, limit) for count, limit in ((1, 4), (1, 5), (2, 0))]
    assert waits == ["101:103", "", ""]


def test_a_site_takes_as_many_cells_of_an_array_as_it_allows(tmp_path, site, capsys):
    cells = [cell(tmp_path, f"seed={seed}") for seed in range(6)]
    assert site.submit(5, *cells) == 1
    states = rundir.states([one.directory for one in cells])
    owners = [json.loads((one.directory / "attempts/1/attempt.json").read_text()) for one in cells]
    assert [owner["job_id"] for owner in owners] == ["101_0", "101_1", "101_2", "102_0", "102_1", None]
    assert [f'"token": "{owner["token"]}"' in site.scripts[owner["job_id"].split("_")[0]] for owner in owners[:5]] == [
        True
    ] * 5
    assert len({owner["token"] for owner in owners}) == 3 and site.calls == 4
    said = capsys.readouterr().err
    assert said.startswith("SLURM refused 1 cell: ") and "launch.packed=true" in said
    assert states[5].kind == "not submitted" and "QOSMaxSubmitJobPerUserLimit" in states[5].refused
    assert site.submit(6, cells[5]) == 0
    assert json.loads((cells[5].directory / "attempts/2/attempt.json").read_text())["job_id"] == "103"


def test_cells_of_several_arrays_that_are_refused_alike_are_one_line(tmp_path, site, capsys):
    cells = [cell(tmp_path, f"seed={seed}", f"gpus={gpus}") for gpus in (1, 2) for seed in range(4)]
    assert site.submit(0, *cells) == 1
    said = capsys.readouterr().err
    assert (
        said.count("SLURM refused") == 1
        and said.startswith("SLURM refused 8 cells: ")
        and said.count("launch.packed=true") == 1
    )


def test_a_refusal_is_printed_although_a_later_array_cannot_be_written(tmp_path, site, capsys, monkeypatch):
    cells = [cell(tmp_path, "gpus=1"), cell(tmp_path, "gpus=2")]
    hand_over = submit.hand_over

    def fails_later(array, *rest):
        if array.cells[0] is cells[1]:
            raise OSError("No space left on device")
        return hand_over(array, *rest)

    monkeypatch.setattr(submit, "hand_over", fails_later)
    with pytest.raises(OSError, match="No space left"):
        site.submit(0, *cells)
    assert capsys.readouterr().err.startswith("SLURM refused 1 cell: ")


def test_a_site_that_takes_nothing_is_not_asked_for_each_cell(tmp_path, site, capsys):
    cells = [cell(tmp_path, f"seed={seed}") for seed in range(3)]
    assert site.submit(0, *cells) == 1 and site.calls == 3
    assert capsys.readouterr().err.startswith("SLURM refused 3 cells: ")
    assert [state.kind for state in rundir.states([one.directory for one in cells])] == ["not submitted"] * 3


PARTITIONS = """\
PartitionName=gpu Default=YES QoS=gpu_qos MaxNodes=2 MaxTime=1-00:00:00 State=UP
PartitionName=long Default=NO QoS=N/A MaxNodes=UNLIMITED MaxTime=UNLIMITED State=UP
"""
ACCOUNTS = {
    "user": "lab|lab||normal|12:00:00|\nlab|lab|long|normal||gres/gpu=32\nlab|other||normal|00:20:00|\n",
    "qos": "normal||\ngpu_qos|02:00:00|gres/gpu=6,node=9\nshort|00:15:00|\n",
}


@pytest.mark.parametrize(
    ("overrides", "enforced", "words"),
    [
        ((), "limits", []),
        (
            ("cluster.time_minutes=2000",),
            "none",
            ["cluster.time_minutes=2000: 2,000 minutes, and partition gpu allows 1,440; nearest legal: 1440"],
        ),
        (("cluster.time_minutes=150",), "none", []),
        (
            ("cluster.time_minutes=150",),
            "associations,limits",
            ["cluster.time_minutes=150: 150 minutes, and QOS gpu_qos allows 120; nearest legal: 120"],
        ),
        (
            ("cluster.account=other",),
            "limits",
            [
                "cluster.time_minutes=30: 30 minutes, and your association with account other allows 20; nearest legal: 20"
            ],
        ),
        (
            ("cluster.qos=short", "cluster.partition=long"),
            "safe",
            ["cluster.time_minutes=30: 30 minutes, and QOS short allows 15; nearest legal: 15"],
        ),
        (
            ("gpus=12",),
            "limits",
            [
                "gpus=12: 3 nodes for a job, and partition gpu allows 2",
                "gpus=12: 12 GPUs for a job, and QOS gpu_qos allows 6",
            ],
        ),
        (
            ("gpus=36", "cluster.partition=long"),
            "limits",
            ["gpus=36: 36 GPUs for a job, and your association with account lab allows 32"],
        ),
        (("cluster.time_minutes=2000", "cluster.partition='gpu,long'"), "none", []),
        (("cluster.time_minutes=2000", "cluster.partition=unknown"), "none", []),
    ],
)
def test_jobs_beyond_a_limit_of_the_site_are_refused(tmp_path, monkeypatch, overrides, enforced, words):
    """SLURM would let these jobs wait for ever: PartitionTimeLimit, QOSMaxWallDurationPerJobLimit, ..."""
    answers = {"scontrol": PARTITIONS, **ACCOUNTS}
    monkeypatch.setattr(
        squeue, "call", lambda *command: answers[command[0] if command[0] == "scontrol" else command[4]]
    )
    monkeypatch.setattr(squeue, "setting", {"AccountingStorageEnforce": enforced, "MaxArraySize": "3"}.get)
    cells = [cell(tmp_path, "data.global_batch=72", f"seed={seed}", *overrides) for seed in range(3)]
    found = [str(fault) for fault in limits.faults(submit.planned(cells))]
    assert found == words * 2, found  # once for each of two arrays
    line = ("launch.packed=true", "cluster.time_minutes=600", "cluster.partition=gpu")
    packed = [cell(tmp_path, f"seed={seed}", *line) for seed in range(3)]
    assert [str(fault) for fault in limits.faults(submit.planned(packed))][:1] == [
        "cluster.time_minutes=600: 4 cells in one job take 2,400 minutes, and partition gpu allows 1,440; nearest legal: 360"
    ]


def test_the_same_sweep_has_one_manifest(tmp_path, monkeypatch):
    # not a key of the job
    monkeypatch.setattr(sys, "argv", ["launch.py", "-m", "seed=0,1", "+hydra.job.env_set.DB_PASS=opensesame"])
    cells = [cell(tmp_path, f"seed={seed}") for seed in range(2)]
    first = manifest.folder_of(cells)
    assert manifest.folder_of(cells) == first
    assert manifest.folder_of(cells[:1]) is None
    assert manifest.folder_of([*cells, cell(tmp_path, "seed=2")]) != first
    content = json.loads((first / "manifest.json").read_text())
    assert content["command"][:2] == ["-m", "seed=0,1"] and "opensesame" not in (first / "manifest.json").read_text()
    assert [row["directory"] for row in content["cells"]] == [one.directory.name for one in cells]


@pytest.fixture
def submitted(tmp_path):
    """Return a run that was submitted to SLURM as task 1 of an array, and a function that gives what its state reports."""
    one = cell(tmp_path)
    owner = {
        "executor": "slurm",
        "token": "abcd1234",
        "packed": False,
        "job_id": "77_1",
        "index": 1,
        "user": "me",
        "code": "x",
    }
    attempt = rundir.claim(one.directory, 1, one.job, [], **owner)

    def state(word: str | None, answers: bool = True, **job):
        jobs = {} if word is None else {"77_1": SlurmJob("77_1", word, **job)}
        return rundir.state(one.directory, {"slurm": Queue(jobs, answers)})

    state.attempt = attempt
    return state


def rank_ended(attempt: Path, rank: int, status: int, message: str | None = None) -> None:
    error = message and {
        "type": "ValueError",
        "message": message,
        "traceback": "Traceback",
        "time": time.time(),
        "secondary": False,
    }
    (attempt / f"rank_{rank}.json").write_text(
        json.dumps({"pid": 1, "born": "", "host": "n1", "exit_status": status, "error": error})
    )


@pytest.mark.parametrize(
    ("word", "kind"),
    [("PENDING", "queued"), ("RUNNING", "running"), ("COMPLETING", "running"), ("CANCELLED", "interrupted")],
)
def test_slurm_knows_where_a_run_stands(submitted, word, kind):
    assert submitted(word).kind == kind


def test_a_failed_job_is_its_guilty_ranks(submitted):
    rank_ended(submitted.attempt, 0, 1, "the data is gone")
    state = submitted("FAILED")
    assert (state.kind, state.failure.kind) == ("failed", "bug") and "the data is gone" in state.failure.line
    assert submitted(None, answers=False).kind == "failed", "what SLURM once said is kept"


def test_without_slurm_nothing_is_taken_for_over(submitted):
    assert submitted(None, answers=False).kind == "unknown"
    rank_ended(submitted.attempt, 0, 0)
    assert submitted(None, answers=False).kind == "running", "its files are young"


def test_a_job_whose_submitter_died_is_found_by_its_token(submitted):
    owner = layout.CLAIM.read(submitted.attempt)
    layout.CLAIM.write(submitted.attempt, {**owner, "job_id": None, "born": "dead"})
    assert submitted("PENDING", name="sweep-abcd1234").kind == "queued"
    assert json.loads((submitted.attempt / "attempt.json").read_text())["job_id"] == "77_1"
    layout.CLAIM.write(submitted.attempt, {**owner, "job_id": None, "born": "dead"})
    assert submitted("PENDING", name="sweep-ffffffff").kind == "not submitted"


def test_a_claim_is_one_submitters(tmp_path):
    one = cell(tmp_path)
    owner = {"executor": "slurm", "token": "a", "job_id": None, "user": "me"}
    assert rundir.claim(one.directory, 1, one.job, [], **owner)
    assert rundir.state(one.directory, {"slurm": Queue()}).kind == "queued", (
        "this process is alive and may be at sbatch"
    )
    assert rundir.claim(one.directory, 1, one.job, [], **owner) is None


def without_slurm(launcher) -> None:
    launcher.env["PATH"] = str(Path(sys.executable).parent)


def test_no_slurm_is_one_line(launcher):
    without_slurm(launcher)
    done = launcher.run(*SLURM)
    assert (done.returncode, done.stderr.strip()) == (
        2,
        "cluster.executor=slurm: there is no sbatch on this machine; nearest legal: local",
    )
    assert not (launcher.folder / "runs").exists()


def test_a_dry_run_needs_no_slurm_and_writes_nothing(launcher):
    without_slurm(launcher)
    done = launcher.run("-m", *SLURM, "gpus=4,8", "launch.mode=dry")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("#!/bin/bash") == 2 and not (launcher.folder / "runs").exists()


@pytest.mark.parametrize(
    ("jobs", "shown"),
    [
        (["7"], ["7"]),
        (["7_3"], ["7_3"]),
        (["7_0", "7_2", "7_1", "7_5", "7_5"], ["7_[0-2,5]"]),
        (["9", "8", "11", "10"], ["8-11"]),
        (["7_0", "7_1", "9", "8_4"], ["7_[0-1]", "9", "8_4"]),
    ],
)
def test_cancelled_jobs_are_shown_as_ranges(jobs, shown):
    assert ranges(jobs) == shown
