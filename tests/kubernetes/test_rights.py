"""What the launcher may do in a namespace, and what it needs: the Role of docs/kubernetes.md is enough, and each right that is
lacking is named before anything is created. The real kubectl, and no rank runs.
"""

import re
from pathlib import Path

import pytest
import yaml

from titan_hydra import cli
from titan_hydra.core.base.errors import Exit
from titan_hydra.experiments.launch import dispatch
from titan_hydra.experiments.launch.executors.kubernetes import rights
from titan_hydra.experiments.runs import rundir

from .api import KINDS, METHODS
from .conftest import jobs

REVIEWS = "selfsubjectaccessreviews"
PAGE = Path(__file__).parents[2] / "docs" / "kubernetes.md"


def role() -> set[tuple[str, str]]:
    """Return the pairs (verb, plural) of the Role in docs/kubernetes.md."""
    text = re.search(r"```yaml\n(apiVersion: rbac.*?)```", PAGE.read_text(), re.S)[1]
    (found,) = (item for item in yaml.safe_load_all(text) if item["kind"] == "Role")
    return {(verb, name) for rule in found["rules"] for verb in rule["verbs"] for name in rule["resources"]}


def test_the_role_of_the_page_is_enough(closed, cell, capsys):
    allowed = role() | {("create", REVIEWS)}
    closed.store.forbidden = {(verb, plural) for verb in METHODS for plural in KINDS} - allowed
    assert {(right.verb, right.resource) for right in rights.RIGHTS} <= allowed
    one = cell()
    assert dispatch.begin([one]) == Exit.DONE and rundir.state(one.directory).kind == "queued"
    assert cli.main(["stop", "-y", "--runs", str(one.runs)]) == 0 and jobs(closed) == []
    said = capsys.readouterr()
    assert "warning" not in said.err and "orbidden" not in said.err


@pytest.mark.parametrize(
    ("lacking", "status", "words"),
    [
        ([("list", "jobs")], Exit.CONFIG, "you may not list jobs ("),
        ([("delete", "jobs"), ("create", "jobs")], Exit.CONFIG, "you may not create jobs ("),
        ([("create", "services")], Exit.CONFIG, "(Forbidden): services is forbidden"),
        ([("list", "pods")], Exit.DONE, "warning: namespace research, context fake: you may not list pods"),
        ([("create", REVIEWS)], Exit.DONE, ""),
        ([("create", REVIEWS), ("list", "pods"), ("get", "services")], Exit.DONE, ""),
        ([("create", REVIEWS), ("create", "jobs")], Exit.CONFIG, "(Forbidden): jobs is forbidden"),
    ],
)
def test_a_right_that_is_lacking_is_one_line(closed, cell, capsys, lacking, status, words):
    """Nothing is written. A cluster that does not let users ask for their rights refuses nothing by that."""
    one = cell()
    closed.store.forbidden = set(lacking)
    assert dispatch.begin([one]) == status
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == bool(words)
    assert all(f"{verb} {plural} (" in said for verb, plural in lacking if status and "you may" in words)
    assert one.runs.exists() == (status == Exit.DONE) and len(jobs(closed)) == (status == Exit.DONE)


def test_a_service_that_exists_needs_no_right(closed, cell, capsys):
    assert dispatch.begin([cell()]) == Exit.DONE
    closed.store.forbidden = {("create", "services")}
    assert dispatch.begin([cell("seed=2")]) == Exit.DONE and len(jobs(closed)) == 2
    closed.store.all("services")[0]["spec"]["selector"] = {"app": "theirs"}
    assert dispatch.begin([cell("seed=3")]) == Exit.CONFIG and len(jobs(closed)) == 2
    assert "selects other pods" in capsys.readouterr().err


def test_cells_go_to_the_cluster_that_each_names(closed, cell, monkeypatch, tmp_path):
    """Cells of one line may name several namespaces and contexts."""
    closed.configure({"fake": "research", "second": "default"})
    cells = [cell("cluster.context=fake"), cell("seed=2", "cluster.context=second")]
    cells.append(cell("seed=3", "cluster.namespace=default"))
    assert dispatch.begin(cells) == Exit.DONE
    assert [job["metadata"]["namespace"] for job in closed.store.all("jobs")] == ["research", "default", "default"]
    assert [state.kind for state in rundir.states([one.directory for one in cells])] == ["queued"] * 3
