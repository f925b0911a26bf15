"""An elastic job: the layouts that it may take, what is refused, and which of them its batch script takes."""

import subprocess
from dataclasses import replace

import pytest

from titan_hydra.base.errors import ConfigError
from titan_hydra.config import identity, to_dict
from titan_hydra.config.compose import compose_unchecked
from titan_hydra.config.load import from_dict
from titan_hydra.config.relayout import with_layout_of
from titan_hydra.config.rules.checks import check
from titan_hydra.config.schema import Job
from titan_hydra.job.freeze import freeze
from titan_hydra.launch.executors.slurm.keys import SlurmCluster
from titan_hydra.launch.layouts import checked_layouts, kept_layouts, nodes_of, with_one_layout, write_layouts
from titan_hydra.launch.worker import load_job
from titan_hydra.runs import layout

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
    """`titan resume` and `titan extend` go on with one layout of an elastic run."""
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
        with pytest.raises(ConfigError, match=r"layout_3\.json: was changed"):
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
    code = f"""
        sleep() {{ echo "$1" >>{tmp_path}/slept; [ "$(wc -l <{tmp_path}/slept)" -lt 3 ]; }}
        sbatch() {{ echo "$*" >>{tmp_path}/asked; echo "${{SLURM_JOB_ID-}}" >>{tmp_path}/inherited; echo "{answer}" >&2; }}
        scancel() {{ echo "$*" >>{tmp_path}/stopped; }}
        export SLURM_JOB_NUM_NODES=5 SLURM_JOB_ID=7; nodes=4 job=7 attempt={tmp_path}
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
        assert "Invalid account" in (tmp_path / "job.log").read_text()
