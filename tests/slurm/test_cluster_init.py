"""The file that titan cluster init writes works: a cell is submitted with it. A cell that the site's limits would make
wait for ever is refused.
"""

import pytest

from .conftest import desk, running


def test_the_file_it_writes_takes_a_cell_to_its_end(submit):
    site = submit.folder.parent / "site"
    made = submit.python(
        "-m", "titan_hydra.cli", "cluster", "init", "mysite", "--partition", "main", "--folder", str(site / "cluster")
    )
    assert made.returncode == 0, made.stderr
    text = (site / "cluster" / "mysite.yaml").read_text()
    assert (
        "name: mysite\n" in text
        and "partition: main\n" in text
        and "gpus_per_node: 4\n" in text
        and text in made.stdout
    )
    again = submit.python("-m", "titan_hydra.cli", "cluster", "init", "mysite", "--folder", str(site / "cluster"))
    assert (again.returncode, "already exists" in again.stderr) == (2, True)
    options = ("cluster=mysite", "gpus=2", "checkpoint=off", "launch.wait=true")
    result = submit.run("--config-dir", str(site), *submit.TINY, *options)
    assert result.returncode == 0, result.stderr
    assert "1 done" in result.stdout


def test_a_job_beyond_its_partitions_limit_is_refused(submit):
    submit.cluster.call("scontrol", "update", "PartitionName=main", "MaxTime=60")
    try:
        refused = submit.run(*submit.line("gpus=1", "cluster.time_minutes=600"))
    finally:
        submit.cluster.call("scontrol", "update", "PartitionName=main", "MaxTime=INFINITE")
    words = "cluster.time_minutes=600: 600 minutes, and partition main allows 60; nearest legal: 60"
    assert refused.returncode == 2 and refused.stderr.strip() == words and not (submit.folder / "runs").exists(), (
        refused.stderr
    )


@pytest.mark.slow
def test_the_limits_of_a_qos_hold(tmp_path):
    """With real associations: a job beyond the QOS's time or number of devices is refused, cluster init writes the
    QOS's time limit, and the limit on the number of jobs is kept.
    """
    with running(accounting="dbd", enforce="limits") as cluster, desk(cluster, tmp_path / "work") as submit:
        settings = "MaxWall=30", "MaxTRESPerJob=gres/gpu=4", "MaxSubmitJobsPerUser=2"
        cluster.call("sacctmgr", "-i", "add", "qos", "short", *settings)
        cluster.call("sacctmgr", "-i", "modify", "user", "root", "set", "qos=normal,short", "defaultqos=short")
        refused = submit.run(*submit.line("gpus=8", "cluster.time_minutes=600"))
        assert refused.returncode == 2 and refused.stderr.splitlines() == [
            "cluster.time_minutes=600: 600 minutes, and QOS short allows 30; nearest legal: 30",
            "gpus=8: 8 GPUs for a job, and QOS short allows 4",
        ], refused.stderr
        made = submit.python(
            "-m", "titan_hydra.cli", "cluster", "init", "mysite", "--partition", "main", "--folder", str(submit.folder)
        )
        assert "time_minutes: 30\n" in made.stdout, made.stdout + made.stderr
        with cluster.closed():
            done = submit.run(*submit.line("-m", "gpus=1", "seed=1,2,3,4", "cluster.time_minutes=20"))
            assert (
                done.returncode == 1
                and "SLURM refused 2 cells" in done.stderr
                and "QOSMaxSubmitJobPerUserLimit" in done.stderr
            ), done
            assert sorted(cell["state"] for cell in submit.status().values()) == ["not submitted"] * 2 + ["queued"] * 2
            cluster.clear()
