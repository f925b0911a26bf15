"""Each rank runs where SLURM has placed its task: on the task's cores, and with the task's GPUs. The options of srun that
bind tasks, in cluster.srun and cluster.sbatch, hold for each rank. So srun starts each rank, and no process of ours does.
"""

import os
import re

import pytest

from .conftest import desk, running

# A module of train.imports; a rank imports it before torch, and this one ends there, so that the drill costs little.
PLACE = """
import os
if "SLURM_JOB_ID" in os.environ:
    print("cores", *sorted(os.sched_getaffinity(0)), "GPUs", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
    os._exit(0)
"""
# an srun before SLURM 22.05, which takes the cores of a task from SLURM_CPUS_PER_TASK too
OLD_SRUN = """#!/bin/bash
[ -z "${SLURM_CPUS_PER_TASK-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
exec srun "$@"
"""
OLD = "cluster.setup=['srun() { bash old_srun \"$@\"; }']"
ALL = " ".join(map(str, sorted(os.sched_getaffinity(0))))
PER_TASK = "+cluster.sbatch={gpus-per-node: null, gpus-per-task: 1}"
LINES = {  # the overrides of a run of four ranks on two nodes, and the place of each rank on its node
    "as SLURM places them": ((), ("cores 0 GPUs 0,1", "cores 1 GPUs 0,1")),
    "cores of their own": (("cluster.cpus_per_task=1",), ("cores 0 GPUs 0,1", "cores 1 GPUs 0,1")),
    "not bound": (("cluster.srun=['--cpu-bind=none']",), (f"cores {ALL} GPUs 0,1",) * 2),
    "cores by number": (("cluster.srun=['--cpu-bind=map_cpu:1,0']",), ("cores 1 GPUs 0,1", "cores 0 GPUs 0,1")),
    "GPUs by number": (("cluster.srun=['--gpu-bind=map_gpu:1,0']",), ("cores 0 GPUs 1", "cores 1 GPUs 0")),
    "GPUs of their own": ((PER_TASK,), ("cores 0 GPUs 0", "cores 1 GPUs 1")),
    "elastic": (("elastic=['gpus=2']",), ("cores 0 GPUs 0,1", "cores 1 GPUs 0,1")),
    "elastic, before SLURM 22.05": (("elastic=['gpus=2']", OLD), ("cores 0 GPUs 0,1", "cores 1 GPUs 0,1")),
    "before SLURM 22.05": (("cluster.cpus_per_task=1", OLD), ("cores 0 GPUs 0,1", "cores 1 GPUs 0,1")),
}


@pytest.fixture(scope="module")
def submit(tmp_path_factory):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    with (
        running(binding="affinity", nodes=2, gpus=2) as cluster,
        desk(cluster, tmp_path_factory.mktemp("places")) as user,
    ):
        (user.folder / "place.py").write_text(PLACE)
        (user.folder / "old_srun").write_text(OLD_SRUN)
        with cluster.closed():
            for number, (overrides, _) in enumerate(LINES.values()):
                line = ("gpus=4", "parallelism=fsdp", "cluster.gpus_per_node=2", "train.imports=[place]")
                user.submit(*line, f"seed={number}", *overrides)
        user.settle()
        yield user


@pytest.mark.parametrize("line", LINES)
def test_a_rank_has_the_place_of_its_task(submit, line):
    run, places = submit.cell(f"seed={[*LINES].index(line)}"), LINES[line][1]
    for rank in range(4):
        log = (run / f"attempts/1/rank_{rank}.log").read_text()
        assert re.findall("cores .*", log) == [places[rank % 2]], (rank, log, submit.story())
