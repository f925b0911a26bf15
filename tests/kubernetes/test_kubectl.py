"""The real kubectl against the stand-in for the API server: what is created, what is asked, and what its errors lead to. No
rank runs: all nodes are closed.
"""

import json
import subprocess

import pytest

from titan_hydra import cli
from titan_hydra.core.base.errors import Exit, Kind
from titan_hydra.core.job.config.registry import executor_named
from titan_hydra.core.job.run import layout
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.experiments.launch import dispatch
from titan_hydra.experiments.launch.executors.kubernetes import kubectl, states, submit
from titan_hydra.experiments.runs import rundir, view
from titan_hydra.experiments.runs.find import RunCell

from .api import Refusal
from .conftest import jobs, wait_for
from .kubelet import IMAGE


def no_kubectl(site, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))


def no_context(site, monkeypatch, tmp_path):
    site.configure({})


def forbidden(site, monkeypatch, tmp_path):
    site.store.forbidden = {("POST", "jobs")}


def down(site, monkeypatch, tmp_path):
    site.store.down = True


def nothing(site, monkeypatch, tmp_path):
    pass


@pytest.mark.parametrize(
    ("trouble", "overrides", "words"),
    [
        (no_kubectl, (), "cluster.executor=kubernetes: there is no kubectl on this machine"),
        (no_context, (), "its configuration has no current context"),
        (nothing, ("cluster.context=prod",), "its configuration has no context prod; there are fake"),
        (
            forbidden,
            (),
            "cluster.executor=kubernetes: namespace research, context fake: you may not create jobs (",
        ),
        (
            nothing,
            ("cluster.namespace=other",),
            'cluster.namespace=other: kubectl: (NotFound): namespaces "other" not found\n',
        ),
        (down, (), "cluster.executor=kubernetes: namespace research, context fake: kubectl: "),
        (nothing, ("cluster.max_parallel=2",), "cluster.max_parallel=2: Kubernetes has no such limit"),
        (nothing, ("launch.packed=true",), "launch.packed=true: cells of Kubernetes are Jobs of their own"),
    ],
)
def test_what_prevents_a_submission_is_one_line(closed, cell, monkeypatch, tmp_path, capsys, trouble, overrides, words):
    one = cell(*overrides)
    trouble(closed, monkeypatch, tmp_path)
    assert dispatch.begin([one]) == Exit.CONFIG
    said = capsys.readouterr()
    assert (
        words in said.err
        and "STDIN" not in said.err
        and "--validate" not in said.err
        and said.err.count("\n") == 1
        and said.out == ""
    ), said
    assert not one.runs.exists() and jobs(closed) == []


def test_a_job_and_its_service(closed, cell, capsys):
    one = cell()
    assert dispatch.begin([one]) == Exit.DONE
    (job,), (service,) = closed.store.all("jobs"), closed.store.all("services")
    owner = layout.CLAIM.read(layout.ATTEMPT.of(one.directory, 1))
    assert owner["job_id"] == job["metadata"]["name"]
    assert (owner["cluster"], owner["namespace"], owner["executor"]) == ("fake", "research", "kubernetes")
    pod = job["spec"]["template"]
    assert service["metadata"]["name"] == pod["spec"]["subdomain"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert "1 queued" in capsys.readouterr().out
    assert dispatch.begin([one]) == Exit.DONE and len(jobs(closed)) == 1  # the same line again
    (row,), _ = view.look([RunCell("one", one.directory)])
    assert list(executor_named("kubernetes").cancel([row], False)) == []
    wait_for(lambda: not closed.store.all("pods"))
    assert jobs(closed) == []
    state = rundir.state(one.directory)
    assert (state.kind, state.refused) == ("interrupted", "")
    assert dispatch.begin([one]) == Exit.DONE
    assert jobs(closed)[0].split("-")[-2] == "2"  # its second attempt


@pytest.mark.parametrize(
    ("overrides", "opened", "reason"),
    [
        ((), False, "0 of 2 pods run; Unschedulable: 0/4 nodes are available: Insufficient nvidia.com/gpu."),
        (("cluster.image=registry.site/none:2",), True, "ImagePullBackOff: Back-off pulling image"),
        (("cluster.secrets=[none]",), True, 'CreateContainerConfigError: secret "none" not found'),
        (("cluster.queue=gpus",), True, "waits in queue gpus"),
    ],
)
def test_why_a_run_waits(closed, cell, capsys, overrides, opened, reason):
    one = cell(*overrides)
    if opened:
        closed.kubelet.closed = set()
    assert dispatch.begin([one]) == Exit.DONE
    wait_for(lambda: "queue" in reason or len(closed.store.all("pods")) == 2)
    wait_for(lambda: reason in (rundir.state(one.directory).job.why or ""))
    assert rundir.state(one.directory).kind == "queued"
    assert cli.main(["status", "--runs", str(one.runs)]) == 0
    out = capsys.readouterr().out
    assert reason[:60] in " ".join(out.split()) and "soon" not in out and "expected" not in out


def test_nothing_is_started_while_the_server_is_down(closed, cell, capsys):
    one = cell()
    dispatch.begin([one])
    closed.store.down = True
    assert rundir.state(one.directory).kind == "unknown"
    assert cli.main(["status", "--runs", str(one.runs)]) == 0
    assert "kubernetes does not answer" in capsys.readouterr().out
    dispatch.go([one], None)
    closed.store.down = False
    assert rundir.state(one.directory).kind == "queued" and len(jobs(closed)) == 1


def test_a_lost_answer_submits_once(closed, cell, capsys):
    """The server has created the Service and the Job, and its answers are lost."""
    one = cell()
    closed.store.lose_replies = True
    dispatch.go([one], None)
    closed.store.lose_replies = False
    kinds = rundir.state(one.directory).kind, len(jobs(closed)), len(closed.store.all("services"))
    dispatch.go([one], None)
    assert len(jobs(closed)) == 1 and rundir.state(one.directory).kind == "queued", (kinds, capsys.readouterr())


KILLED = """
import os, sys
sys.path.insert(0, {root!r})
from titan_hydra.experiments.launch.executors.kubernetes import kubectl
call = kubectl.Namespace.call
def killed(self, *arguments, **more):
    if {what!r} not in more.get("text", "") or "--dry-run=server" in arguments:
        return call(self, *arguments, **more)
    if not {before}:
        call(self, *arguments, **more)
    os.kill(os.getpid(), 9)
kubectl.Namespace.call = killed
from titan_hydra.experiments.launch.main import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("what", "before", "attempts"),
    [("kind: Job", True, 2), ("kind: Job", False, 1), ('"kind": "Service"', True, 1), ('"kind": "Service"', False, 1)],
)
def test_a_submission_killed_half_way(site, desk, what, before, attempts):
    """Killed before the Service or the Job exists, or after it exists and before this is recorded: the same line leaves one
    Job.
    """
    site.kubelet.closed = set(site.kubelet.gpus)
    line = desk.line("gpus=2", "cluster.gpus_per_node=1")
    killed = desk.python("-c", KILLED.format(root=str(desk.ROOT), what=what, before=before), *line)
    assert killed.returncode == -9, killed.stderr
    again = desk.run(*line)
    assert again.returncode == 0 and "1 queued" in again.stdout, again.stdout + again.stderr
    (job,), (run,) = jobs(site), desk.cells()
    assert job.split("-")[-2] == str(attempts)
    assert json.loads((run / f"attempts/{attempts}/attempt.json").read_text())["job_id"] == job


def test_a_job_that_somebody_deletes(closed, cell, capsys):
    one = cell()
    dispatch.begin([one])
    subprocess.run(["kubectl", "delete", "job", *jobs(closed)], check=True, capture_output=True)
    wait_for(lambda: not closed.store.all("pods"))
    state = rundir.state(one.directory)
    assert (state.kind, state.refused) == ("interrupted", "its Job was deleted, and not by titan stop")
    assert cli.main(["status", "--runs", str(one.runs)]) == 0
    assert "not by titan stop" in capsys.readouterr().out
    assert cli.main(["resume", "--only", "interrupted", "--runs", str(one.runs)]) == 0
    assert len(jobs(closed)) == 1


def test_a_refused_job_is_not_submitted(closed, cell, capsys):
    """`titan resume` submits without the checks of launch.py."""
    one = cell()
    closed.store.forbidden = {("POST", "jobs")}
    assert dispatch.go([one], None) == Exit.BUG
    state = rundir.state(one.directory)
    assert state.kind == "not submitted" and "(Forbidden)" in state.refused
    closed.store.forbidden = set()
    assert dispatch.go([one], None) == Exit.DONE and len(jobs(closed)) == 1


def test_texts_like_numbers_stay_texts(closed, cell, monkeypatch):
    """kubectl's parser takes 76832e12 for a number, and the server refuses a label that is no text."""
    monkeypatch.setattr(submit, "new_token", lambda: "76832e12")
    one = cell("+cluster.environment={A: y, B: '1e3', C: 'on', D: '0x10', E: '1_000'}")
    assert dispatch.begin([one]) == Exit.DONE
    (job,) = closed.store.all("jobs")
    env = {item["name"]: item.get("value") for item in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert (job["metadata"]["labels"]["titan-hydra/token"], env["A"], env["B"], env["C"]) == (
        "76832e12",
        "y",
        "1e3",
        "on",
    )


def test_one_call_creates_many_jobs(closed, cell, monkeypatch):
    """If the server refuses some of them, the others are submitted, and the refused ones are not lost."""
    call, calls = kubectl.Namespace.call, []
    monkeypatch.setattr(
        kubectl.Namespace,
        "call",
        lambda self, *words, **more: (
            calls.append(more.get("text", "").count("kind: Job")) or call(self, *words, **more)
        ),
    )
    put = closed.store.put

    def full(plural, item):
        if plural == "jobs" and len(jobs(closed)) == 2:
            raise Refusal(403, "Forbidden", f'jobs "{item["metadata"]["name"]}" is forbidden: exceeded quota: team')
        return put(plural, item)

    monkeypatch.setattr(closed.store, "put", full)
    cells = [cell(f"seed={seed}") for seed in (1, 2, 3, 4)]
    assert dispatch.go(cells, None) == Exit.BUG and list(filter(None, calls)) == [4]
    states = rundir.states([one.directory for one in cells])
    assert [state.kind for state in states] == ["queued", "queued", "not submitted", "not submitted"]
    assert all(state.refused.count("exceeded quota") == 1 for state in states[2:])
    monkeypatch.setattr(closed.store, "put", put)
    assert dispatch.go(cells, None) == Exit.DONE and list(filter(None, calls)) == [4, 2] and len(jobs(closed)) == 4
    assert not any("PATCH" in request for request in closed.store.requests) and len(closed.store.all("services")) == 1


def test_one_question_for_all_runs(closed, cell):
    cells = [cell(f"seed={seed}") for seed in (1, 2, 3)]
    assert dispatch.begin(cells) == Exit.DONE
    closed.store.requests.clear()
    found = rundir.states([one.directory for one in cells])
    assert [state.kind for state in found] == ["queued"] * 3
    assert sum("jobs" in request for request in closed.store.requests) == 1


NODE = {
    "metadata": {"labels": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}},
    "spec": {"taints": [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]},
    "status": {"allocatable": {"nvidia.com/gpu": "8", "cpu": "95500m", "memory": "1056703700Ki"}},
}


def test_cluster_init_writes_an_option(closed, tmp_path, capsys):
    for number in range(2):
        node = json.loads(json.dumps(NODE))
        closed.store.put("nodes", {**node, "metadata": {**node["metadata"], "name": f"gpu{number}"}})
    line = [
        "cluster",
        "init",
        "mysite",
        "--executor",
        "kubernetes",
        "--image",
        IMAGE,
        "--folder",
        f"{tmp_path}/cluster",
    ]
    assert cli.main(line) == 0
    out = capsys.readouterr().out
    assert (
        out.splitlines()[2].startswith("# fake, namespace research: 2 nodes of 8 NVIDIA-H100-80GB-HBM3 GPUs")
        and "there are shared, data" in out
    ), out
    volume = f"+cluster.volumes={{shared: {tmp_path}}}"
    job = compose_job("cluster=mysite", "debug=tiny", "gpus=16", volume, f"paths.runs={tmp_path}", config_dir=tmp_path)
    cluster = job.cluster
    assert (cluster.gpus_per_node, cluster.cpus_per_task, cluster.memory) == (8, 10, "906Gi")
    assert cluster.tolerations == ["nvidia.com/gpu=present:NoSchedule"] and job.hardware.name == "h100"
    closed.store.forbidden = {("GET", "nodes")}
    assert cli.main([*line, "--force"]) == 2
    assert "or copy conf/cluster/kubernetes.yaml by hand" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pod", "kind", "words"),
    [
        ({"exit_status": 137, "reason": "OOMKilled"}, Kind.OUT_OF_MEMORY, "used more than its memory"),
        ({"exit_status": 137}, Kind.KILLED, "was killed by signal 9"),
        (
            {"exit_status": 127, "message": "sh: python3.11: not found"},
            Kind.UNKNOWN,
            "status 127: sh: python3.11: not found",
        ),
        ({"exit_status": 2, "message": "a: no such file"}, Kind.CONFIG, "ended with status 2: a: no such file"),
        ({"exit_status": 79, "message": "its file system is not mounted"}, Kind.NODE, "its file system is not mounted"),
        (
            {"reason": "UnexpectedAdmissionError", "message": "no device"},
            Kind.NODE,
            "failed (UnexpectedAdmissionError)",
        ),
    ],
)
def test_how_a_pod_ended_names_the_failure(tmp_path, pod, kind, words):
    """Without records of ranks, the Job's end and its pods name the class and the reason."""
    blank = {"name": "a-0-xyz", "index": 0, "phase": "Failed", "node": "n1", "exit_status": None, "reason": ""}
    end = {
        "state": "Failed",
        "reason": "PodFailurePolicy",
        "message": "",
        "pods": [blank | {"message": "", "disrupted": ""} | pod],
    }
    failure = states.cause(tmp_path, end)
    assert failure.kind == kind and words in failure.line, failure
    deadline = states.cause(tmp_path, end | {"reason": "DeadlineExceeded"})
    assert deadline.kind == Kind.TIME_LIMIT
    assert states.cause(tmp_path, {"state": "Complete", "reason": "", "message": "", "pods": []}) is None


def test_errors_after_which_the_job_may_exist():
    """Only a refusal is certain; whatever a proxy or a broken connection says is not."""
    for words in (
        "Unable to connect to the server: EOF",
        "context deadline exceeded",
        "connection refused",
        "http2: client connection lost",
        "(InternalError): etcdserver: leader changed",
        '(InternalError): an error on the server ("<html>502 Bad Gateway</html>") has prevented the request',
        "invalid character '<' looking for beginning of value",
        "(Timeout): the server was unable to return a response in the time allotted",
    ):
        assert kubectl.KubectlError(words).uncertain
    for words in (
        "(Forbidden): jobs is forbidden",
        '(AlreadyExists): jobs.batch "a" already exists',
        "(Invalid): Job is invalid",
        "You must be logged in to the server (Unauthorized)",
        'kubectl: context "fake" does not exist',
    ):
        assert not kubectl.KubectlError(words).uncertain
