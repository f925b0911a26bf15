"""Texts that YAML or Hydra read as something else, and files that are no YAML, are refused with the text, the file and the
line.
"""

import pytest

from titan_hydra.core.job.config.files import CONF
from titan_hydra.experiments.compose.overrides import mistakes
from titan_hydra.experiments.compose.scan import misread, misread_options, takes_text


def test_every_option_of_the_package_is_read_as_it_looks():
    for file in [*CONF.glob("*/*.yaml"), *CONF.glob("sweeps/*.yaml")]:
        assert misread(file, file.parent.name) == [], file


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("account: 012345", 2, '"012345"'),
        ("partition: 1e3", 2, '"1e3"'),
        ("partition: 1.10", 2, '"1.10"'),
        ("partition: yes", 2, '"yes"'),
        ("partition: off", 2, '"off"'),
        ("partition: 1_000", 2, '"1_000"'),
        ("partition: 0x1F", 2, '"0x1F"'),
        ("account: +5", 2, '"+5"'),
        ("sbatch: {begin: 12:30}", 2, '"12:30"'),
        ("sbatch:\n  begin: 0123", 3, '"0123"'),
        ("environment: {DEBUG: true}", 2, '"true"'),
        ("environment: {on: a}", 2, '"on"'),
        ("setup: [a, 1e3]", 2, '"1e3"'),
        ("1: a", 2, '"1"'),
        ("~: a", 2, '"~"'),
        ("sbatch:\n\tmem: 0", 3, "tab"),
        ("partition: a\npartition: b", 3, "duplicate"),
        ("partition: [a", 3, ""),
        ("partition: caf\u00e9", 2, "UTF-8"),
    ],
)
def test_a_text_that_is_read_otherwise_is_refused(tmp_path, text, place, words):
    file = tmp_path / "cluster/mysite.yaml"
    file.parent.mkdir()
    file.write_text(f"defaults: [slurm]\n{text}\n", encoding="latin-1")
    lines = mistakes(["cluster=mysite"], [CONF, tmp_path])
    assert len(lines) == 1 and lines[0].startswith(f"{file}:{place}:") and words in lines[0], lines
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text("# @package _global_\ndefaults:\n  - override /cluster: mysite\n")
    assert misread_options("experiment", "mine", [CONF, tmp_path]) == lines


@pytest.mark.parametrize(
    "text",
    [
        'account: "012345"',
        "account: 12345",
        "account: lab-12e4x",
        "partition: null",
        "nodes_min: 2",
        "time_minutes: 60",
        "sbatch: {mem: 0, nice: null}",
        "partition: True",
    ],
)
def test_what_is_read_as_it_looks_is_taken(tmp_path, text):
    file = tmp_path / "mysite.yaml"
    file.write_text(f"{text}\n")
    assert misread(file, "cluster") == []


@pytest.mark.parametrize("name", ["on", "1", "1e3", "12:30", "007", "null", "~", "1.10", "no", "2024-01-01T00:00:00.5"])
def test_a_cell_has_a_text_for_a_name(tmp_path, name):
    file = tmp_path / "mine.yaml"
    file.write_text(f"# @package _global_\nsweep:\n  cells:\n    {name}: [seed=1]\n")
    lines = misread(file, "sweeps")
    if name.startswith("2024"):
        assert lines == []  # OmegaConf has no dates
    else:
        assert len(lines) == 1 and lines[0].startswith(f"{file}:4: sweep.cells: ") and f'"{name}"' in lines[0]


def test_a_sweep_says_where_its_keys_belong(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("# A sweep of mine.\nsteps: 3\n")
    assert "# @package _global_" in misread(file, "sweeps")[0]
    file = tmp_path / "other.yaml"
    file.write_text("# A sweep of mine.\n# @package _global_\nsteps: 3\n")
    assert misread(file, "sweeps") == []


def test_a_file_that_hydra_does_not_read_is_named(tmp_path):
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster/mysite.yml").touch()
    assert f"rename {tmp_path}/cluster/mysite.yml" in mistakes(["cluster=mysite"], [CONF, tmp_path])[0]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("name=7e21234", 'name="7e21234"'),
        ("name=1e3", 'name="1e3"'),
        ("name=1.10", 'name="1.10"'),
        ("name=true", 'name="true"'),
        ("name=1_000", 'name="1_000"'),
        ("notes=1E234", 'notes="1E234"'),
        ("name=a,1.10", "quotes"),
        ("train.imports=[1e3]", "quotes"),
        ("+cluster.environment={A: yes, B: 1e5}", "quotes"),
        ("+cluster.environment.A=true", "true"),
    ],
)
def test_a_text_of_the_command_line_that_is_a_number_is_refused(override, words):
    lines = mistakes([override])
    assert len(lines) == 1 and words in lines[0], lines


@pytest.mark.parametrize(
    "override",
    [
        "name=12",
        "name=1.5",
        "name='1e3'",
        'name="7e21234"',
        "name=1e3x",
        "name=1,2",
        "name=True",
        "optimizer.lr=1e-3",
        "name=-5",
    ],
)
def test_a_text_that_stays_the_same_is_taken(override):
    assert mistakes([override]) == []


def test_a_key_that_takes_numbers_too_takes_them():
    assert takes_text("name") and takes_text("cluster.account") and takes_text("cluster.environment.A")
    assert not any(map(takes_text, ("optimizer.lr", "steps", "compile.enable", "no.such.key")))
