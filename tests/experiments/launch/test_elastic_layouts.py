"""An elastic job: the layouts that it may take, what is refused, and which of them its batch script takes."""

import os
import subprocess
from dataclasses import replace

import pytest

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config import identity, to_dict
from titan_hydra.core.job.config.load import from_dict
from titan_hydra.core.job.config.relayout import with_layout_of
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.rules.checks import check
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.frozen import load_job
from titan_hydra.experiments.compose.compose import compose_unchecked
from titan_hydra.experiments.launch.executors.slurm.keys import SlurmCluster
from titan_hydra.experiments.launch.layouts import (
    checked_layouts,
    kept_layouts,
    nodes_of,
    with_one_layout,
    write_layouts,
)

from .test_submit import cell, script

LINE = (
    "debug=tiny",
    "precision=fp32",
    "cluster=slurm",
    "cluster.gpus_per_node=2",
    "gpus=16",
    "data.global_batch=48",
    "data.local_batch=1",
    "parallelism=fsdp",
)
WORDS = ("gpus=4 parallelism=fsdp_pp data.local_batch=4", "gpus=12 parallelism=fsdp_tp", "gpus=6")


def job(*overrides):
    return freeze(compose_unchecked(*LINE, *overrides))


def listed(*layouts):
    return f"elastic={[*layouts]}"


def test_layouts_come_by_nodes_and_learn_the_same():
    own = job(listed(*WORDS))
    layouts, faults = checked_layouts(own)
    assert not faults and not check(own)
    assert [(nodes_of(one), one.gpus, one.parallelism.name) for one in layouts] == [
        (8, 16, "fsdp"),
        (6, 12, "fsdp_tp"),
        (3, 6, "fsdp"),
        (2, 4, "fsdp_pp"),
    ]
    for one in layouts:
        assert one.data.global_batch == 48
        assert identity(from_dict(Job, with_layout_of(to_dict(one), to_dict(own)))) == identity(own)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("gpus=3 data.local_batch=2", "elastic=gpus=3 data.local_batch=2: gpus=3: not whole nodes of 2"),
        ("gpus=10", "data.global_batch=48: not a multiple of 10"),
        ("gpus=8 parallelism=fspd", "did you mean fsdp"),
        ("gpus=8 optimizer.lr=1", "is part of the experiment"),
        ("gpus=8 data.global_batch=24", "is part of the experiment"),
        ("gpus=8 checkpoint.interval=3", "checkpoint is no part of a layout"),
        ("gpus=16 parallelism=fsdp_tp", "has 8 nodes too"),
        ("auto", "the planner must know the device"),
    ],
)
def test_a_fault_of_one_layout_is_one_line(words, message):
    _, faults = checked_layouts(job(listed("gpus=12", words)))
    assert len(faults) == 1 and message in str(faults[0]) and str(faults[0]).count("\n") == 0, faults


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("cluster=local", "cluster.gpus_per_node=16"), "elastic"),
        (("fault_tolerance=diloco", "fault_tolerance.replicas=2"), "elastic"),
        (("launch.packed=true",), "launch.packed"),
        (("comm=fake",), "elastic"),
        (("cluster.nodes_min=2",), "cluster.nodes_min"),
    ],
)
def test_what_does_not_go_with_elastic_is_refused(overrides, key):
    given = [line for line in LINE if not (line == "cluster=slurm" and "cluster=local" in overrides)]
    faults = check(freeze(compose_unchecked(*given, *overrides, listed("gpus=8"))))
    assert [fault.key for fault in faults] == [key], faults


@pytest.mark.parametrize("key", SlurmCluster.__dataclass_fields__)
def test_no_key_of_the_cluster_is_left_behind_by_elastic(key):
    """`titan resume` with another layout or more steps goes on with one layout of an elastic run."""
    value = {"nodes_min": "2", "grow_minutes": "1"}.get(key, "")
    own = job(listed("gpus=8"))
    if value:
        setattr(own.cluster, key, int(value))
    assert not check(with_one_layout(own)) and with_one_layout(own).elastic == []


def test_a_wrong_layout_file_is_named(tmp_path):
    own = job(listed(*WORDS))
    directory = tmp_path / f"{own.name}-{identity(own)}"
    directory.mkdir()
    layout.CONFIG.write(directory, to_dict(own))
    write_layouts(directory, checked_layouts(own)[0])
    assert len(kept_layouts(directory)) == 4
    good = layout.LAYOUT.read(directory, 3)
    for wrong in ({"gpus": 7}, {"seed": 5}, {"steps": "x"}, {"data": good["data"] | {"local_batch": 5}}):
        layout.LAYOUT.write(directory, good | wrong, 3)
        layout.CONFIG.write(directory, good | wrong)
        with pytest.raises(ConfigError, match=r"layout_3\.json: .*was changed"):
            kept_layouts(directory)
        if wrong.keys() & {"seed"}:
            with pytest.raises(ConfigError, match=r"layout_3\.json: its hash is"):
                load_job(directory)


def test_growth_without_elastic_is_refused():
    assert [fault.key for fault in check(job("cluster.grow_minutes=5"))] == ["cluster.grow_minutes"]


def test_the_planner_gives_a_layout_for_each_number_of_nodes():
    own = job(
        "model=llama3_8b",
        "debug=off",
        "precision=bf16",
        "data=synthetic",
        "hardware=h100",
        "cluster.gpus_per_node=8",
        "gpus=32",
        "data.global_batch=96",
        "cluster.nodes_min=2",
        listed("auto"),
    )
    layouts, faults = checked_layouts(own)
    assert not faults and [nodes_of(one) for one in layouts] == [4, 3, 2]
    assert all(one.data.global_batch == 96 and not check(one) for one in layouts)


def test_layouts_are_kept_in_the_run_and_former_ones_go(tmp_path):
    own = job(listed(*WORDS))
    directory = tmp_path / f"{own.name}-{identity(own)}"
    directory.mkdir()
    layouts, _ = checked_layouts(own)
    layout.CONFIG.write(directory, to_dict(own))
    write_layouts(directory, layouts)
    assert kept_layouts(directory) == layouts and layout.FIRST_CONFIG.read(directory) == to_dict(own)
    layout.CONFIG.write(directory, to_dict(layouts[1]))
    write_layouts(directory, layouts[:2])
    assert kept_layouts(directory) == layouts[:2] and layout.FIRST_CONFIG.read(directory) == to_dict(own)


def test_the_script_asks_for_a_range_of_nodes_and_takes_the_largest_layout_that_fits(tmp_path):
    line = (
        "gpus=16",
        "data.global_batch=48",
        "data.local_batch=1",
        "cluster.cpus_per_task=3",
        "cluster.grow_minutes=2",
    )
    one = cell(tmp_path, *line, listed("gpus=12", "gpus=4"))
    one = replace(one, layouts=checked_layouts(one.job)[0])
    text = script(one)
    assert {"#SBATCH --nodes=1-4", "#SBATCH --cpus-per-task=12", "#SBATCH --gpus-per-node=4"} <= {*text.splitlines()}
    assert "--ntasks-per-node" not in text.split("# setup")[0] and 'grow "$1" "$3" & watcher=$!' in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    functions = text[text.index("take_layout() {") : text.index("# Asks the ranks to stop")]
    for nodes in (1, 3, 4):
        (tmp_path / f"layout_{nodes}.json").write_text(f"{nodes}\n")
    for given, taken in ((1, "1 4 "), (2, "1 4 --nodelist=a1"), (3, "3 12 "), (4, "4 16 ")):
        hosts = "\n".join(f"a{number}" for number in range(1, given + 1))
        code = (
            f"scontrol() {{ echo '{hosts}'; }}; attempt={tmp_path} job=7 SLURM_JOB_NUM_NODES={given} SLURM_JOB_NODELIST=some\n"
            f'{functions}\ntake_layout 4,3,1 16,12,4 {tmp_path}; echo "$nodes $ranks ${{place[*]}}"'
        )
        done = subprocess.run(["bash", "-c", code], capture_output=True, text=True)
        assert done.stdout.strip("\n") == taken, done
        assert (tmp_path / "config.json").read_text() == f"{taken.split()[0]}\n"
    assert "some: layout of 1 nodes, 4 ranks; idle: a2" in (tmp_path / "job.log").read_text()
    # a full disk is full on every node, and leaves the configuration as it was; a file that this node does not see is its own fault
    for full, status in ((True, 2), (False, 79)):
        if full:
            (tmp_path / ".config").symlink_to("/dev/full")
        else:
            (tmp_path / "layout_4.json").unlink()
        done = subprocess.run(
            ["bash", "-c", f"refuse() {{ echo refused: $1; }}\n{code.replace('; echo', ' || exit; echo')}"],
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout.startswith("refused: ")) == (status, True), done
        assert (tmp_path / "exit").read_text() == f"{status}\n"  # without it, the script would seem to be killed
        assert (tmp_path / "job.log").read_text().endswith(done.stdout)
        assert (tmp_path / "config.json").read_text() == "4\n" and not os.path.lexists(tmp_path / ".config")


@pytest.mark.parametrize(
    ("answer", "stops"),
    [
        ("sbatch: Job 9 to start at $(date +%FT%T) using 4 processors on nodes a3", True),
        ("sbatch: Job 9 to start at $(date -d '+1 hour' +%FT%T) using 4 processors on nodes a3", False),
        ("allocation failure: Invalid account", False),
    ],
)
def test_the_script_looks_for_the_nodes_that_the_next_layout_lacks(tmp_path, answer, stops):
    one = cell(
        tmp_path, "gpus=16", "data.global_batch=48", "data.local_batch=1", "cluster.grow_minutes=2", listed("gpus=4")
    )
    text = script(replace(one, layouts=checked_layouts(one.job)[0]))
    function = text[
        text.index("grow() {") : text.index("# $1 the nodes of each layout, $2 their ranks, $3 run directory, $4")
    ]
    (tmp_path / "attempts/1").mkdir(parents=True)
    code = f"""
        sleep() {{ echo "$1" >>{tmp_path}/slept; [ "$(wc -l <{tmp_path}/slept)" -lt 3 ]; }}
        sbatch() {{ echo "$*" >>{tmp_path}/asked; echo "${{SLURM_JOB_ID-}}" >>{tmp_path}/inherited; echo "{answer}" >&2; }}
        scancel() {{ echo "$*" >>{tmp_path}/stopped; }}
        export SLURM_JOB_NUM_NODES=5 SLURM_JOB_ID=7; nodes=4 job=7 attempt={tmp_path}/attempts/1
        {function}
        grow 8,7,4,1 {tmp_path}
        """
    subprocess.run(["bash", "-c", code], timeout=60, capture_output=True)
    assert (tmp_path / "asked").read_text().splitlines()[0] == f"--test-only --nodes=2 {tmp_path}/sbatch.sh"
    assert (tmp_path / "slept").read_text().splitlines()[0] == "120" and not (
        tmp_path / "inherited"
    ).read_text().strip()
    assert (tmp_path / "stopped").exists() is stops
    if "Invalid" in answer:
        assert "Invalid account" in (tmp_path / "attempts/1/job.log").read_text()


@pytest.mark.parametrize(
    ("before", "nodes", "seconds"),
    [
        ("", 4, "120"),  # the first attempt
        ("480", 4, "480"),  # preempted: it waits as long as before
        ("120 4", 4, "240"),  # it asked to grow from four nodes, and has four again
        ("480 4", 3, "960"),
        ("480 4", 7, "120"),  # it has grown
        ("80000 4", 4, "86400"),
        ("x y", 4, "120"),
    ],
)
def test_growth_remembers_what_it_got(tmp_path, before, nodes, seconds):
    said = grown(tmp_path, before, nodes, f"grow 8,7,4,1 {tmp_path}; echo $? >/dev/null")
    assert (tmp_path / "slept").read_text().splitlines()[0] == seconds
    assert (tmp_path / "attempts/2/growth").read_text() == f"{seconds} {nodes}\n", said
    assert (tmp_path / "stopped").read_text() == "--signal=USR2 7.0\n"


def test_growth_has_a_budget_of_its_own(tmp_path):
    """Of eight requeues one was for growth: with max_requeues=8 the job may be preempted again, and with 1 not grow again."""
    assert grown(tmp_path, "120 4", 4, "growths") == "1"
    assert "requeued" in grown(tmp_path, "120 4", 4, "SLURM_RESTART_COUNT=8 requeue", "cluster.max_requeues=8")
    assert not (tmp_path / "attempts/2/requeues_spent").exists()
    grown(tmp_path, "120 4", 4, "SLURM_RESTART_COUNT=9 requeue", "cluster.max_requeues=8")
    assert (tmp_path / "attempts/2/requeues_spent").exists()
    grown(tmp_path, "120 4", 4, f"grow 8,7,4,1 {tmp_path}", "cluster.max_requeues=1")
    assert not (tmp_path / "slept").exists() and "no more checks" in (tmp_path / "attempts/2/job.log").read_text()
    (tmp_path / "attempts/1/job").write_text("6\n")  # of an earlier submission
    assert grown(tmp_path, "120 4", 4, "growths", owner="6") == "0"


def grown(tmp_path, before: str, nodes: int, code: str, *overrides: str, owner: str = "7") -> str:
    """Run functions of the batch script in job 7's second attempt, whose first kept `before` in `growth`."""
    line = ("gpus=16", "data.global_batch=48", "data.local_batch=1", "cluster.grow_minutes=2", listed("gpus=4"))
    one = cell(tmp_path, *line, *overrides)
    text = script(replace(one, layouts=checked_layouts(one.job)[0]))
    for number in (1, 2):
        attempt = tmp_path / f"attempts/{number}"
        attempt.mkdir(parents=True, exist_ok=True)
        (attempt / "job").write_text(f"{owner if number == 1 else 7}\n")
    (tmp_path / "attempts/1/growth").write_text(f"{before}\n")
    answer = "sbatch: Job 9 to start at $(date +%FT%T) using 4 processors on nodes a3"
    code = f"""
        sleep() {{ [ "$1" = 300 ] || echo "$1" >>{tmp_path}/slept; }}
        sbatch() {{ echo "{answer}" >&2; }}
        scancel() {{ echo "$*" >{tmp_path}/stopped; }}
        scontrol() {{ [ "$1" = show ] && echo JobState=RUNNING || echo "$1"d; }}
        export SLURM_JOB_NUM_NODES={nodes} SLURM_JOB_ID=7; nodes={nodes} job=7 attempt={tmp_path}/attempts/2
        {text[text.index("refuse() {") : text.index("trap : TERM")]}
        {code}
        """
    return subprocess.run(["bash", "-c", code], timeout=60, capture_output=True, text=True).stdout.strip()
