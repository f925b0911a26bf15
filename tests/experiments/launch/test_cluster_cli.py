"""Read the output of sinfo at different sites; tests/slurm runs the command on a real SLURM."""

import argparse

import pytest

from titan_hydra import cli
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.files import CONF
from titan_hydra.experiments.compose.compose import compose_unchecked
from titan_hydra.experiments.compose.folders import line_that_sees, option_file
from titan_hydra.experiments.launch.command_cluster import init_site_arguments
from titan_hydra.experiments.launch.executors.slurm.init import (
    choose_partition,
    device_memory,
    file_text,
    gpus_of,
    hardware,
    partitions,
)
from titan_hydra.experiments.launch.executors.slurm.squeue import minutes_of

SITE = """\
cpu*|(null)|40|64|256000|1-00:00:00
gpu|gpu:h100:8(S:0-1),nvme:1|16|96|2063000+|2-00:00:00
gpu|gpu:a100:4|40|64+|515000|2-00:00:00
dev|gpu:h100:8|1|96|2063000|30:00
"""


@pytest.mark.parametrize(
    ("gres", "expected"),
    [
        ("gpu:4", ("", 4)),
        ("gpu", ("", 1)),
        ("gpu:h100:8(S:0-1),nvme:1", ("h100", 8)),
        ("nvme:2,gpu:tesla:2(S:0)", ("tesla", 2)),
        ("gpu:a100_3g.20gb:2,gpu:a100:4", ("a100+a100_3g.20gb", 6)),
        ("(null)", ("", 0)),
        ("gpumem:3", ("", 0)),
        ("mps:400", ("", 0)),
    ],
)
def test_gpus_of_a_node(gres, expected):
    assert gpus_of(gres) == expected


@pytest.mark.parametrize(
    ("limit", "minutes"), [("infinite", None), ("2-01:30:00", 2970), ("4:00:00", 240), ("30:00", 30), ("n/a", None)]
)
def test_time_limits(limit, minutes):
    assert minutes_of(limit) == minutes


@pytest.mark.parametrize(
    ("kind", "gib"), [("h100", 80), ("nvidia_h200", 141), ("a100_80gb", 80), ("a100", None), ("", None)]
)
def test_memory_is_known_only_where_the_name_says_it(kind, gib):
    assert device_memory(kind) == gib


def test_the_default_partition_is_taken_if_it_has_gpus_else_the_one_with_most():
    found = list(partitions(SITE))
    assert [(partition.name, partition.kind) for partition in found] == [
        ("gpu", "h100"),
        ("gpu", "a100"),
        ("dev", "h100"),
    ]
    assert (choose_partition(found, None).kind, choose_partition(found, "dev").name) == ("a100", "dev")
    assert choose_partition(list(partitions(SITE.replace("dev|", "dev*|"))), None).name == "dev"
    for wanted, text in (("cpu", "there are gpu, dev"), (None, "no partition whose nodes have GPUs")):
        with pytest.raises(ConfigError, match=text):
            choose_partition(found if wanted else [], wanted)


def test_the_file_shares_a_node_evenly_among_its_gpus():
    text = file_text(next(partitions(SITE)), "mysite", "alps")
    assert text.startswith(
        "# alps, partition gpu: 16 nodes of 8 h100 GPUs, as sinfo had it; see docs/slurm.md.\nname: mysite\n"
    )
    for line in (
        "gpus_per_node: 8",
        "device_memory_gib: 80",
        "cpus_per_task: 12",
        "sbatch: {mem-per-gpu: 244981M}",
        "time_minutes: 2880",
    ):
        assert f"\n{line}\n" in text


def test_the_file_names_the_hardware_where_it_is_known(tmp_path):
    assert [
        hardware(kind) != ""
        for kind in ("h100", "nvidia_h200", "a100_80gb", "a100", "a100_3g.20gb", "h100+a100", "l4", "")
    ] == [
        True,
        True,
        True,
        False,
        False,
        False,
        False,
        False,
    ]
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "mysite.yaml").write_text(file_text(next(partitions(SITE)), "mysite", "alps"))
    job = compose_unchecked("cluster=mysite", config_dir=tmp_path)
    assert (job.cluster.name, job.hardware.name, job.hardware.bf16_tflops) == ("mysite", "h100", 690)
    assert compose_unchecked("cluster=mysite", "hardware=h200", config_dir=tmp_path).hardware.memory_gib == 139.8


def test_without_slurm_it_is_one_line(launcher):
    launcher.env["PATH"] = str(launcher.folder)
    result = launcher.python("-m", "titan_hydra.cli", "cluster", "init", "mysite")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "sinfo does not answer" in result.stderr and not (CONF / "cluster" / "mysite.yaml").exists()


def test_overrides_may_follow_an_option(tmp_path, capsys):
    line = ["cluster", "check", "nosuch", "--config-dir", str(tmp_path), "precision=fp32"]
    assert cli.main(line) == 2
    assert capsys.readouterr().err.startswith("cluster=nosuch: no such option")
    with pytest.raises(SystemExit):
        cli.main([*line, "--nosuch"])
    assert "unrecognized arguments: --nosuch" in capsys.readouterr().err


@pytest.mark.parametrize("project", [True, False])
def test_options_are_written_where_the_user_stands_and_their_line_finds_them(project, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if project:
        (tmp_path / "launch.py").touch()
        (tmp_path / "conf").mkdir()
    file = option_file("cluster", "mysite")
    assert file.resolve() == tmp_path / "conf/cluster/mysite.yaml"
    expected = ("python launch.py", "") if project else ("titan run", "--config-dir conf ")
    assert line_that_sees(file.parent) == expected
    assert line_that_sees(CONF / "cluster") == (expected[0], "")


def test_cluster_init_writes_nothing_into_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    init_site_arguments(parser)
    assert parser.parse_args([]).folder.resolve() == tmp_path / "conf/cluster"
