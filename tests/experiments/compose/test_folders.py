"""Folders of options: --config-dir adds, may stand several times, and leaves the project's own conf/ and
hydra.searchpath alone.
"""

import os

import pytest

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.files import CONF
from titan_hydra.experiments.compose import folders
from titan_hydra.experiments.compose.compose import compose_job, compose_unchecked
from titan_hydra.experiments.compose.overrides import mistakes


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Return a folder with a project and two folders of options, each with an option of its own."""
    for place, option in (("conf", "model/own"), ("a", "cluster/first"), ("b", "optimizer/second")):
        file = tmp_path / place / f"{option}.yaml"
        file.parent.mkdir(parents=True)
        parent = {"model": "llama3_debug", "cluster": "local", "optimizer": "sgd"}[file.parent.name]
        file.write_text(f"defaults: [{parent}]\n")
    (tmp_path / "launch.py").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_form_names_a_folder(project):
    line = "--config-dir a -cd b --config-dir=c -cd=d +hydra.searchpath=[file:///usr,pkg://hydra.conf] seed=1 -m"
    named, others = folders.taken_out(line.split())
    assert named[:5] == ["a", "b", "c", "d", "/usr"] and named[5].endswith("hydra/conf") and others == ["seed=1", "-m"]


def test_folders_add_up_under_titan(project):
    job = compose_unchecked(
        "debug=tiny", "model=own", "cluster=first", "optimizer=second", config_dir=[project / "a", project / "b"]
    )
    assert (job.model.family, job.cluster.executor, job.optimizer.name) == ("llama3", "local", "sgd")
    with pytest.raises(ConfigError, match="cluster=first: no such option"):
        compose_job("model=own", "cluster=first")


@pytest.mark.parametrize(
    ("named", "words"),
    [("nowhere", "no such folder"), ("confs", "did you mean conf"), ("a/cluster", "name the folder above it")],
)
def test_a_folder_that_cannot_be_one_is_refused(project, named, words):
    with pytest.raises(ConfigError) as refused:
        folders.usable_folders([named])
    assert f"--config-dir {named}" in str(refused.value) and words in str(refused.value)


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("3", "list"),
        ("[a]", "list"),
        ("[pkg://no_such_package]", "no such package"),
        ("[file://", "list"),
        ("[file:///nowhere]", "no such folder"),
        ("[file://nowhere]", "no such folder"),
    ],
)
def test_a_search_path_that_is_none_is_refused(value, word):
    with pytest.raises(ConfigError, match=rf"^hydra\.searchpath=.*{word}"):
        folders.taken_out([f"hydra.searchpath={value}"])


def test_each_folder_is_searched_once_and_the_projects_last(project):
    (project / "link").symlink_to("a")
    assert folders.usable_folders(["a", "link", "conf", "b"], folders.project_in(project)) == [
        project / place for place in ("a", "conf", "b")
    ]
    assert folders.project_in(CONF.parent) == []


def test_another_checkouts_launch_py_is_refused(project):
    (project / "conf/config.yaml").touch()
    with pytest.raises(ConfigError) as refused:
        folders.of_script(project / "launch.py")
    assert str(CONF.parent) in str(refused.value) and os.fspath(project) in str(refused.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("hydra/sweeper=optuna", "see search"),
        ("hydra.launcher.partition=x", "cluster"),
        ("hydra.sweep.subdir=x", "paths.runs"),
        ("hydra.job.name=x", "sweep.name"),
        ("hydra.job.env_copy=[A]", "cluster.environment"),
        ("hydra.job.chdir=true", "folder"),
        ("+hydra.job.env_set.FOO=1", "cluster.environment"),
        ("hydra.sweeper.max_batch_size=2", "search"),
        ("+hydra.callbacks.x._target_=a.b", "titan status"),
    ],
)
def test_what_hydra_does_elsewhere_is_refused_by_name(override, words):
    (line,) = mistakes([override])
    assert line.startswith(f"{override}: ") and words in line
