"""Test the batch script: what it requests from SLURM, the environment of its ranks, and how it ends."""

import os
import re
import subprocess

import pytest

from titan_hydra.core.job.config.files import write_json
from titan_hydra.core.job.run import layout
from titan_hydra.experiments.launch.executors.slurm import submit

from .test_submit import cell, script


def test_a_packed_jobs_script_has_time_for_the_repeated_baseline(tmp_path):
    text = script(*(cell(tmp_path, f"seed={seed}", "launch.packed=true") for seed in range(2)))
    assert "#SBATCH --time=90" in text.splitlines()


def test_the_comments_above_the_scripts_functions_are_whole_sentences(tmp_path):
    text = script(cell(tmp_path, "gpus=8")).partition("# command\n")[2]
    blocks = re.findall(r"(?:^# .*\n)+", text, re.M)
    assert len(blocks) > 10
    cut = [block for block in blocks if not block.endswith(".\n") or re.search(r"\$\d [a-z]+\n", block)]
    assert not cut, cut


def test_the_batch_script_says_what_the_site_file_says(tmp_path):
    text = script(
        cell(
            tmp_path,
            "gpus=8",
            "cluster.partition=main",
            "cluster.qos=high",
            "cluster.exclude=[node3,node5]",
            "cluster.setup=[module load cuda]",
            "+cluster.environment.NCCL_DEBUG=INFO now",
            "+cluster.sbatch.exclusive=true",
            "+cluster.sbatch.gpus-per-node=null",
            "cluster.stop_seconds=60",
            "cluster.srun=['--container-image=a b']",
            "cluster.max_requeues=7",
        )
    )
    for line in (
        "#SBATCH --partition=main",
        "#SBATCH --qos=high",
        "#SBATCH --exclude=node3,node5",
        "module load cuda",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
        "export NCCL_DEBUG='INFO now'",
        "#SBATCH --exclusive",
        "#SBATCH --signal=USR2@60",
        "#SBATCH --time=30",
        "#SBATCH --requeue",
    ):
        assert line in text.splitlines(), line
    assert "gpus-per-node" not in text and "None" not in text and "--array" not in text
    assert "'--container-image=a b'" in text and "-ge 7 ]" in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_a_short_limit_leaves_time_to_train_before_the_warning(tmp_path):
    assert "#SBATCH --signal=USR2@120" in script(cell(tmp_path, "cluster.time_minutes=4", "cluster.stop_seconds=3000"))


LOST = "Timed out waiting for job step to complete"


def in_bash(text: str, code: str, **variables: str) -> str:
    """Run the functions of a batch script, and then `code`. Return what `code` prints."""
    functions = text[text.index("refuse() {") : text.index("trap : TERM")]
    done = subprocess.run(
        ["bash", "-c", f"{functions}\n{code}"], env={**os.environ, **variables}, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("records", "srun", "stopped", "status"),
    [
        # a library that one node lacks; srun's status is the largest of the ranks'
        (
            {0: (75, False), 1: (1, False)},
            "75",
            "",
            "1",
        ),
        ({0: (75, False), 1: (2, False)}, "143", "", "2"),
        ({0: (75, False), 1: (None, False)}, "75", "", "1"),  # it ended without a record; srun reports how
        ({0: (75, False), 1: (75, False)}, "75", "", "75"),  # preempted during the start
        ({0: (75, False), 1: (1, True)}, "75", "", "75"),  # the same: rank 1 failed only because it lost rank 0
        ({0: (75, False), 1: (None, False)}, "143", "agreed", "75"),
        ({0: (75, False), 1: (1, False)}, "75", "agreed", "75"),  # all ranks had agreed to stop, and saved
        # srun asked rank 0 to stop, which could not handle the signal
        (
            {0: (75, True), 1: (1, False)},
            "75",
            "blocked",
            "1",
        ),
        # preempted, and rank 0 did not reach the end of the step
        (
            {0: (75, True), 1: (77, True)},
            "77",
            "blocked",
            "75",
        ),
        ({0: (76, False), 1: (75, False)}, "76", "", "76"),
        ({0: (1, True), 1: ("lost", False)}, "1", "", "79"),  # rank 1's node does not answer
        ({0: (76, False), 1: ("lost", False)}, "76", "", "76"),
        ({0: (75, False), 1: ("lost", False)}, "75", "agreed", "75"),
    ],
)
def test_a_rank_that_failed_by_itself_is_no_stop(tmp_path, records, srun, stopped, status):
    """Each tuple has a rank's recorded exit status, and whether its error is only the loss of another rank."""
    run, bin = tmp_path / "a run", tmp_path / "bin"
    attempt = run / "attempts" / "1"
    attempt.mkdir(parents=True)
    bin.mkdir()
    text = script(cell(tmp_path))
    (attempt / "attempt.json").write_text(
        f'{{\n  "token": "{text.split(chr(34) + "token" + chr(34) + ": " + chr(34))[1][:8]}"\n}}\n'
    )
    for rank, (code, secondary) in records.items():
        said = {"exit_status": code, "error": {"secondary": secondary}}
        write_json(attempt / f"rank_{rank}.json", said if isinstance(code, int) else {"pid": 1})
    words = "".join(
        f"echo 'srun: error: {LOST if code == 'lost' else f'node{rank}: task {rank}: Exited with exit code {code or 1}'}' >&2\n"
        for rank, (code, _) in records.items()
    )
    (bin / "srun").write_text(
        f"#!/bin/sh\n{words}{f'echo {stopped} >{chr(39)}{attempt}{chr(39)}/stopped' if stopped else ''}\nexit {srun}\n"
    )
    (bin / "srun").chmod(0o755)
    said = in_bash(text, f"job=7; run_cell 1 2 '{run}' 1; echo $? $lost", PATH=f"{bin}:{os.environ['PATH']}").split()
    assert said == [status, *(["3"] if status == "79" else ["0"])] and (attempt / "exit").read_text() == f"{status}\n"


@pytest.mark.parametrize(
    ("words", "signal", "status"),
    [
        ("", "KILL", "79 3"),  # srun itself was killed: as after the loss of a node, the job is requeued
        ("", "SEGV", "79 3"),
        ("srun: error: node1: task 1: Killed", "KILL", "137 0"),  # a rank was killed, and srun passes this on
    ],
)
def test_a_job_whose_srun_was_killed_goes_on(tmp_path, words, signal, status):
    attempt, bin = tmp_path / "run/attempts/1", tmp_path / "bin"
    attempt.mkdir(parents=True)
    bin.mkdir()
    text = script(cell(tmp_path))
    token = text.split('"token": "')[1][:8]
    (attempt / "attempt.json").write_text(f'{{\n  "token": "{token}"\n}}\n')
    (bin / "srun").write_text(f"#!/bin/sh\necho '{words}' >&2\nkill -{signal} $$\n")
    (bin / "srun").chmod(0o755)
    path = f"{bin}:{os.environ['PATH']}"
    assert in_bash(text, f"job=7; run_cell 1 2 '{tmp_path}/run' 1; echo $? $lost", PATH=path) == status


@pytest.mark.parametrize("file", ["attempt.json", "attempt_copy.json"])
def test_a_requeued_job_passes_on_no_damaged_record(tmp_path, file):
    """The record of the next attempt is intact, whichever byte of the last one has changed. A job's id and token remain."""
    run, text = tmp_path / "run", script(cell(tmp_path))
    token = text.split('"token": "')[1][:8]
    owner = {"pid": 1, "host": "h", "born": None, "started": 0.0, "job_id": "7", "token": token, "user": "me"}
    attempt = layout.ATTEMPT.of(run, 1)
    attempt.mkdir(parents=True)
    layout.CLAIM.write(attempt, owner)
    layout.OWN_JOB.of(attempt).write_text("7\n")
    content = bytearray((attempt / file).read_bytes())
    place = content.index(token.encode())
    for number, at in enumerate((0, content.index(b"job_id"), place - 4, place + 1, len(content) - 3), 2):
        flipped = content[:]
        flipped[at] ^= 2
        (layout.ATTEMPT.of(run, number - 1) / file).write_bytes(flipped)
        said = in_bash(
            text, f"job=7; own_attempt '{run}' 1; echo $? $attempt", SLURM_CLUSTER_NAME="c", SLURM_JOB_USER="me"
        )
        assert said == f"0 {layout.ATTEMPT.of(run, number)}"
        found = layout.CLAIM.read(layout.ATTEMPT.of(run, number))
        assert found["job_id"] == "7" and found["token"] == token and found["cluster"] == "c" and found["user"] == "me"
        assert (found["executor"], found["here"], found["packed"], found["index"]) == ("slurm", False, False, 0)
    refused = in_bash(text, f"job=8; own_attempt '{run}' 1; echo $?")
    assert refused.endswith("\n2") and not layout.ATTEMPT.of(run, number + 1).exists()


def test_the_shell_that_submits_does_not_change_the_job(tmp_path, monkeypatch):
    """sbatch prefers a variable SBATCH_X to the script's own line. Settings that the configuration leaves open remain
    those of the site.
    """
    sent = tmp_path / "sent"
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\nenv >{sent}\necho '5;other'\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    kept = {"SBATCH_ACCOUNT", "SBATCH_QOS", "SLURM_CONF", "SBATCH_MAIL_USER"}
    gone = {
        "SBATCH_PARTITION",
        "SBATCH_TIMELIMIT",
        "SBATCH_MEM_PER_NODE",
        "SBATCH_GPUS_PER_NODE",
        "SBATCH_JOB_NAME",
        "SBATCH_ARRAY_INX",
        "SBATCH_WAIT",
        "SBATCH_NO_REQUEUE",
        "SBATCH_REQUEUE",
        "SBATCH_SIGNAL",
        "SBATCH_OUTPUT",
        "SBATCH_ERROR",
        "SBATCH_EXPORT",
        "SLURM_JOB_ID",
    }
    for name in kept | gone:
        monkeypatch.setenv(name, "1")
    one = cell(tmp_path, "cluster.partition=main", "+cluster.sbatch.mem=0")
    (array,) = submit.arrays_of([one], packed=False, limit=9)
    batch = submit.batch_of(array, tmp_path / "jobs", [[one.directory / "attempts" / "1"]], "name", tmp_path)
    batch.write()
    assert batch.submit_all() == (["5"], "other"), "the cluster that sbatch's flag chose"
    assert {line.split("=")[0] for line in sent.read_text().splitlines()} & (kept | gone) == kept


def test_the_ranks_get_the_environment_of_the_script(tmp_path):
    variables = {"SRUN_EXPORT_ENV": "NONE", "SLURM_EXPORT_ENV": "NONE", "SRUN_CPUS_PER_TASK": "64"}
    for cores, threads in (("null", ""), ("3", "3")):
        text = script(cell(tmp_path, f"cluster.cpus_per_task={cores}"))
        setup = "\n".join(
            line for line in text.split("refuse() {")[0].splitlines() if line.startswith(("export ", "unset "))
        )
        print_all = 'echo "$SLURM_EXPORT_ENV ${SRUN_EXPORT_ENV-} ${SRUN_CPUS_PER_TASK-}"'
        done = subprocess.run(
            ["bash", "-c", f"{setup}\n{print_all}"], env={**os.environ, **variables}, capture_output=True, text=True
        )
        assert done.stdout.split() == ["ALL", *threads]


def test_functions_that_the_shell_exports_do_not_change_the_script(tmp_path):
    attempt = tmp_path / "run" / "attempts" / "1"
    attempt.mkdir(parents=True)
    text = script(cell(tmp_path))
    token = text.split('"token": "')[1][:8]
    write_json(attempt / "attempt.json", {"token": token})
    exported = {f"BASH_FUNC_{name}%%": f'() {{ command {name} --color=always "$@"; }}' for name in ("ls", "grep")}
    code = text[text.index("\nunset -f") : text.index("refuse() {")] if "\nunset -f" in text else ""
    functions = text[text.index("refuse() {") : text.index("trap : TERM")]
    done = subprocess.run(
        ["bash", "-c", f"{code}\n{functions}\njob=7; own_attempt '{tmp_path}/run' 1"],
        env={**os.environ, **exported},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (attempt / "job").read_text() == "7\n"
