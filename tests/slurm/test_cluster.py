"""Test the cluster that all tests of this folder use: nodes, fake GPUs, host names, accidents. If tests of the folder
fail, look at this file first.
"""

import subprocess
import time

from .conftest import running


def test_tasks_see_their_node_and_gpus(cluster):
    seen = cluster.call(
        "srun",
        "--nodes=4",
        "--ntasks-per-node=2",
        "--gpus-per-node=4",
        "bash",
        "-c",
        "echo $(hostname) $SLURM_PROCID $CUDA_VISIBLE_DEVICES $(getent hosts node0 | cut -d' ' -f1)",
    )
    assert sorted(seen.splitlines()) == [f"node{rank // 2} {rank} 0,1,2,3 127.0.0.1" for rank in range(8)]


def test_killed_controller_comes_back_with_its_jobs(cluster, submit):
    job = cluster.call("sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 300")
    submit.wait(lambda: cluster.jobs()[job]["JobState"] == "RUNNING")
    cluster.saved()
    cluster.manage("crash", "slurmctld")
    assert cluster.status().returncode
    cluster.up()
    assert cluster.jobs()[job]["JobState"] == "RUNNING" and cluster.jobs()[job]["Restarts"] == "0"


def test_cluster_goes_down_with_its_owner():
    owner = subprocess.Popen(["sleep", "1000"])
    with running(owner=owner.pid) as other:
        assert other.status().returncode == 0
        owner.kill()
        owner.wait()
        deadline = time.monotonic() + 300
        while "pid" in (out := other.status().stdout):
            assert time.monotonic() < deadline, out
            time.sleep(0.2)
