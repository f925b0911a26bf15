"""An attempt knows its cluster: what is started, cancelled and printed when kubectl leads to another cluster, when the user may
not ask, and when a Job is missing although its ranks write. The real kubectl, and no rank runs.
"""

import pytest

from titan_hydra import cli
from titan_hydra.core.base.errors import Exit
from titan_hydra.core.job.run import layout
from titan_hydra.experiments.launch import dispatch
from titan_hydra.experiments.runs import rundir

from . import api
from .conftest import Site, jobs, wait_for


@pytest.fixture
def other(closed, tmp_path):
    """Return another cluster, whose configuration of kubectl has a context of the same name."""
    (tmp_path / "other").mkdir()
    site = Site(tmp_path / "other")
    site.kubelet.closed = set(site.kubelet.gpus)
    yield site
    site.close()


def writes(run, *, ended: bool = False) -> None:
    """Write what a rank of attempt 1 writes."""
    layout.RANK.write(layout.ATTEMPT.of(run, 1), {"host": "a", "pid": 1, **({"exit_status": 75} if ended else {})}, 0)


def printed(capsys, *words: str) -> str:
    cli.main([*words])
    said = capsys.readouterr()
    return " ".join((said.out + said.err).split())


@pytest.mark.parametrize(
    "unreadable", [(), ("kube-system",), ("kube-system", "research")], ids=["uid", "own uid", "server"]
)
def test_another_cluster_of_the_same_name_starts_and_cancels_nothing(
    closed, other, cell, monkeypatch, capsys, unreadable
):
    for site in (closed, other):
        for name in unreadable:
            site.store.objects.pop(("namespaces", "", name))
    one = cell()
    assert dispatch.begin([one]) == Exit.DONE
    writes(one.directory, ended=True)
    monkeypatch.setenv("KUBECONFIG", str(other.config))
    state = rundir.state(one.directory)
    assert (state.kind, state.host) == ("unknown", f"cluster fake ({closed.address})")
    assert "ended" not in layout.CLAIM.read(layout.ATTEMPT.of(one.directory, 1))
    capsys.readouterr()
    assert closed.address in printed(capsys, "status", "--runs", str(one.runs))
    assert "cancel it there" in printed(capsys, "stop", "-y", "--runs", str(one.runs))
    assert dispatch.go([one], None) == Exit.DONE
    assert "nothing was started" in capsys.readouterr().out
    assert f"on the cluster fake ({closed.address})" in printed(capsys, "resume", str(one.directory))
    assert jobs(other) == [] and len(jobs(closed)) == 1 and not layout.ATTEMPT.of(one.directory, 2).exists()
    monkeypatch.setenv("KUBECONFIG", str(closed.config))
    assert rundir.state(one.directory).kind == "queued"


def test_the_same_cluster_behind_another_address(closed, cell, monkeypatch):
    one = cell()
    assert dispatch.begin([one]) == Exit.DONE
    closed.address = closed.address.replace("127.0.0.1", "localhost")
    closed.configure({"fake": "research"})
    closed.store.remove("jobs", closed.store.all("jobs")[0])
    assert rundir.state(one.directory).kind == "interrupted"


def test_a_job_that_is_not_listed_while_its_ranks_write_is_not_gone(closed, cell, capsys):
    """As with a restored etcd, or labels that somebody has edited."""
    one = cell()
    assert dispatch.begin([one]) == Exit.DONE
    writes(one.directory)
    wait_for(lambda: len(closed.store.all("pods")) == 2)
    closed.kubelet.stop()
    for item in (*closed.store.all("jobs"), *closed.store.all("pods")):
        item["metadata"]["labels"].clear()
    assert rundir.state(one.directory).kind == "running"
    assert "ended" not in layout.CLAIM.read(layout.ATTEMPT.of(one.directory, 1))
    assert dispatch.go([one], None) == Exit.DONE and len(jobs(closed)) == 1
    writes(one.directory, ended=True)
    assert rundir.state(one.directory).kind == "interrupted"


def test_who_may_not_list_pods_sees_jobs_and_cancels(closed, cell, capsys):
    one = cell()
    assert dispatch.begin([one]) == Exit.DONE
    closed.store.forbidden = {("GET", "pods")}
    state = rundir.state(one.directory)
    assert state.kind == "queued" and state.job.id == jobs(closed)[0]
    assert "cancelled 1 cell" in printed(capsys, "stop", "-y", "--runs", str(one.runs))
    assert jobs(closed) == []


def test_reasons_are_printed_and_cancel_tries(closed, cell, capsys):
    one = cell()
    assert dispatch.begin([one]) == Exit.DONE
    closed.store.forbidden = {("GET", "pods"), ("GET", "jobs")}
    assert rundir.state(one.directory).kind == "unknown"
    capsys.readouterr()
    assert "(Forbidden)" in printed(capsys, "status", "--runs", str(one.runs))
    dispatch.go([one], None)
    assert "(Forbidden)" in capsys.readouterr().out and len(jobs(closed)) == 1
    attempt = layout.ATTEMPT.of(one.directory, 1)
    closed.store.forbidden |= {("DELETE", "jobs")}
    assert "(Forbidden)" in printed(capsys, "stop", "-y", "--runs", str(one.runs))
    assert len(jobs(closed)) == 1 and not layout.CANCELLED.of(attempt).exists()
    closed.store.forbidden = {("GET", "pods")}
    printed(capsys, "stop", "-y", "--runs", str(one.runs))
    assert jobs(closed) == [] and layout.CANCELLED.of(attempt).exists()


PAGE = b"HTTP/1.1 %s\r\nContent-Type: text/html\r\nContent-Length: 26\r\nConnection: close\r\n\r\n<html>please log in</html>"


def answers(monkeypatch, site, act) -> None:
    """Let each request of the API server run `act(handler)` instead; if that returns False, the request is answered."""
    plain = api.Handler.handle_request

    def instead(self) -> None:
        if act(self) is False:
            plain(self)

    for method in ("GET", "POST", "PATCH", "DELETE"):
        monkeypatch.setattr(api.Handler, f"do_{method}", instead)


def page(status: bytes):
    def act(handler) -> None:
        handler.close_connection = True
        handler.wfile.write(PAGE % status)

    return act


def failing(*paths: str):
    """Answer 500 to requests whose path has one of these words."""
    return lambda handler: (
        page(b"500 Internal Server Error")(handler) if any(word in handler.path for word in paths) else False
    )


@pytest.mark.parametrize(
    "act",
    [
        page(b"200 OK"),
        page(b"401 Unauthorized"),
        page(b"403 Forbidden"),
        page(b"404 Not Found"),
        page(b"502 Bad Gateway"),
        failing("jobs"),
        failing("namespaces/kube-system"),
    ],
    ids=["200", "401", "403", "404", "502", "listing fails", "uid fails"],
)
def test_no_answer_ends_an_attempt(closed, cell, monkeypatch, capsys, act):
    """A proxy's page, an error of the server or an expired login says nothing about a Job, even if it is gone."""
    one = cell()
    assert dispatch.begin([one]) == Exit.DONE
    closed.store.remove("jobs", closed.store.all("jobs")[0])
    wait_for(lambda: not closed.store.all("pods"))
    answers(monkeypatch, closed, act)
    state = rundir.state(one.directory)
    assert state.kind == "unknown" and state.refused
    assert "ended" not in layout.CLAIM.read(layout.ATTEMPT.of(one.directory, 1))
    writes(one.directory)
    assert rundir.state(one.directory).kind == "running"
    dispatch.go([one], None)
    assert jobs(closed) == [] and not layout.ATTEMPT.of(one.directory, 2).exists()


@pytest.mark.parametrize("configuration", ["gone", "no context", "other namespace", "damaged"])
def test_a_configuration_that_changes_under_an_attempt(closed, cell, configuration):
    one = cell()
    assert dispatch.begin([one]) == Exit.DONE
    if configuration == "gone":
        closed.config.unlink()
    elif configuration == "damaged":
        closed.config.write_text("{")
    else:
        closed.configure({"fake": "default"} if configuration == "other namespace" else {"another": "research"})
    state = rundir.state(one.directory)
    assert state.kind == ("queued" if configuration == "other namespace" else "unknown"), state
    assert "ended" not in layout.CLAIM.read(layout.ATTEMPT.of(one.directory, 1))


def test_a_namespace_that_was_created_again(closed, cell):
    """Its Jobs are gone with it. If only its own uid could be read, it may also be that of another cluster."""
    cells = [cell(), cell("seed=2")]
    assert dispatch.begin(cells[:1]) == Exit.DONE
    system = closed.store.objects.pop(("namespaces", "", "kube-system"))
    assert dispatch.begin(cells[1:]) == Exit.DONE
    closed.store.objects["namespaces", "", "kube-system"] = system
    for job in closed.store.all("jobs"):
        closed.store.remove("jobs", job)
    wait_for(lambda: not closed.store.all("pods"))
    closed.store.objects["namespaces", "", "research"]["metadata"]["uid"] = "new"
    first, second = rundir.states([one.directory for one in cells])
    assert first.kind == "interrupted" and second.kind == "unknown"
    assert closed.address in second.host
