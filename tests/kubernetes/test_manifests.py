"""What is submitted: every manifest is valid for the API of each Kubernetes version from 1.29 to 1.37, by its schemas, and
holds what the configuration says. Nothing here runs kubectl.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from titan_hydra.core.base.errors import ConfigError, Exit
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.rules.checks import check, warnings
from titan_hydra.experiments.compose.compose import compose_job, compose_unchecked
from titan_hydra.experiments.launch.cell import Cell
from titan_hydra.experiments.launch.executors.kubernetes import submit
from titan_hydra.experiments.launch.executors.kubernetes.manifest import (
    LONGEST,
    SERVICE,
    PodShape,
    Submission,
    toleration,
)
from titan_hydra.experiments.runs import rundir

from .kubelet import expand

kubernetes_validate = pytest.importorskip("kubernetes_validate")
VERSIONS = [f"1.{minor}" for minor in range(29, 38)]
BASE = (
    "cluster=kubernetes",
    "cluster.image=registry.site/titan:1",
    "+cluster.volumes={shared: /shared}",
    "paths.runs=/shared/me/runs",
)
JOBS = {
    "the README's 8B line": ("model=llama3_8b", "parallelism=fsdp_tp", "gpus=64"),
    "one pod": ("debug=tiny", "gpus=1"),
    "128 pods": ("model=llama3_8b", "parallelism=fsdp", "gpus=1024"),
    "a queue": (
        "debug=tiny",
        "gpus=16",
        "cluster.queue=gpus.team-a",
        "cluster.namespace=research",
        "cluster.time_minutes=90",
    ),
    "tolerations and nodes": (
        "debug=tiny",
        "gpus=8",
        'cluster.tolerations=["nvidia.com/gpu:NoSchedule", spot, "pool=h100:NoExecute"]',
        "+cluster.node_selector={pool: h100, cloud.google.com/gke-accelerator: nvidia-h100-80gb}",
        "cluster.exclude=[node7.site,node8.site]",
        "cluster.priority_class=high",
        "cluster.service_account=trainer",
        "cluster.image_pull_secrets=[registry]",
    ),
    "volumes, secrets, resources": (
        "debug=tiny",
        "gpus=8",
        "+cluster.volumes={shared: /shared, data: '/data:ro'}",
        "cluster.secrets=[titan,wandb]",
        "+cluster.environment={NCCL_DEBUG: INFO}",
        "+cluster.resources={rdma/ib: 8, ephemeral-storage: 100Gi}",
        "cluster.memory=900Gi",
        "cluster.cpus_per_task=12",
        "cluster.capabilities=[IPC_LOCK]",
        "cluster.user=1000",
        "cluster.group=1000",
        "cluster.setup=['echo $(date) $$ $HOME']",
        "+cluster.pod={hostNetwork: true, dnsPolicy: ClusterFirstWithHostNet, runtimeClassName: nvidia}",
    ),
    "no GPU": ("debug=tiny", "gpus=2", "cluster.gpu_resource=null"),
}


def submission(*overrides: str, attempt: int = 1, token: str = "0123abcd", exclude: tuple[str, ...] = ()) -> Submission:
    job = compose_job(*BASE, *overrides)
    return Submission(job, rundir.directory_of(job), attempt, token, (Path("/shared/me/runs/_code/abc"),), exclude)


@pytest.fixture(scope="module")
def manifests():
    return {name: submission(*overrides) for name, overrides in JOBS.items()}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_valid_for(version, manifests):
    for one in manifests.values():
        kubernetes_validate.validate(yaml.safe_load(one.text), version, strict=True)


def test_a_wrong_field_is_found(manifests):
    """The schemas find a field that does not exist, and a value of another type, in every version."""
    for version in VERSIONS:
        for change in ({"completionmode": "Indexed"}, {"completions": "2"}):
            job = manifests["one pod"].manifest
            job["spec"] |= change
            kubernetes_validate.validate(SERVICE, version, strict=True)
            with pytest.raises(kubernetes_validate.ValidationError):
                kubernetes_validate.validate(job, version, strict=True)


def test_a_pod_takes_a_node(manifests):
    found = {name: one.manifest["spec"] for name, one in manifests.items()}
    pods = {name: (spec["completions"], spec["parallelism"], spec["completionMode"]) for name, spec in found.items()}
    assert pods["the README's 8B line"] == (8, 8, "Indexed") and pods["128 pods"] == (128, 128, "Indexed")
    limits = {
        name: spec["template"]["spec"]["containers"][0]["resources"]["limits"]
        for name, spec in found.items()
        if name != "no GPU"
    }
    assert limits["one pod"] == {"nvidia.com/gpu": "1"} and limits["128 pods"] == {"nvidia.com/gpu": "8"}
    assert limits["volumes, secrets, resources"] == {
        "rdma/ib": "8", "ephemeral-storage": "100Gi", "nvidia.com/gpu": "8", "memory": "900Gi",
    }  # fmt: skip
    assert found["no GPU"]["template"]["spec"]["containers"][0]["resources"] == {}


def outcome(spec: dict, status: int | None, disrupted: bool = False) -> str:
    """Return the action of the first rule of a failure policy that matches the end of a pod."""
    for rule in spec["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes")
        if codes and status and (status in codes["values"]) == (codes["operator"] == "In"):
            return rule["action"]
        if disrupted and "onPodConditions" in rule:
            return rule["action"]
    return "Count"


def test_the_failure_policy_follows_our_exit_statuses(manifests):
    spec = manifests["one pod"].manifest["spec"]
    again = {status: outcome(spec, int(status)) for status in Exit if status}
    assert again == {status: "Ignore" if status == Exit.REQUEUED else "FailJob" for status in Exit if status}
    assert outcome(spec, 143) == "Ignore" and outcome(spec, 137) == "FailJob"
    assert outcome(spec, 137, disrupted=True) == outcome(spec, None, disrupted=True) == "Ignore"
    assert outcome(spec, None) == "Count" and spec["backoffLimit"] == 3 and spec["podReplacementPolicy"] == "Failed"


def test_a_queue_starts_the_job(manifests):
    job = manifests["a queue"].manifest
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus.team-a" and job["spec"]["suspend"] is True
    assert job["metadata"]["namespace"] == "research" and job["spec"]["activeDeadlineSeconds"] == 5400
    assert "suspend" not in manifests["one pod"].manifest["spec"]


def test_no_pod_has_privileges(manifests):
    for one in manifests.values():
        pod = one.manifest["spec"]["template"]["spec"]
        context = pod["containers"][0]["securityContext"]
        assert pod["securityContext"]["runAsNonRoot"] is True and pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert context["allowPrivilegeEscalation"] is False and context["capabilities"]["drop"] == ["ALL"]


def test_secrets_are_named_and_not_written(monkeypatch):
    """No manifest has a secret of the launcher's environment, and a configuration that has one is refused."""
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwxyz0123")
    one = submission("debug=tiny", "gpus=1", "cluster.secrets=[titan]")
    assert "0123456789abcdef0123" not in one.text and "hf_abc" not in one.text
    assert one.manifest["spec"]["template"]["spec"]["containers"][0]["envFrom"] == [{"secretRef": {"name": "titan"}}]
    for bad in (
        "+cluster.environment={WANDB_API_KEY: some-long-value}",
        "cluster.setup=['export X=hf_abcdefghijklmnopqrstuvwxyz0123']",
    ):
        job = freeze(compose_unchecked(*BASE, "debug=tiny", "gpus=1", bad))
        (fault,) = check(job)
        assert fault.key.startswith("cluster.") and "hf_abc" not in str(fault) and "some-long-value" not in str(fault)


@pytest.mark.parametrize(
    ("name", "attempt"),
    [("llama3_8b-fsdp", 1), ("a" * 150, 12345), ("Ähren_Ω.+=", 2), ("8b", 1), ("run,with=all.signs", 3)],
)
def test_names_are_those_of_hosts(name, attempt):
    one = submission("debug=tiny", "gpus=1", f"name='{name}'", attempt=attempt)
    host = f"{one.name}-12345"
    assert len(host) <= 63 and len(one.name) <= LONGEST
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", one.name), one.name
    assert one.name.endswith(f"-{one.labels['titan-hydra/run']}-{attempt}-0123abcd")


def test_two_submissions_never_share_a_name():
    one, again = submission("debug=tiny", "gpus=1"), submission("debug=tiny", "gpus=1", token="89abcdef")
    assert one.name != again.name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("spot", {"key": "spot", "operator": "Exists"}),
        ("gpu:NoSchedule", {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}),
        ("pool=h100", {"key": "pool", "operator": "Equal", "value": "h100"}),
        ("a.b/c=d:NoExecute", {"key": "a.b/c", "operator": "Equal", "value": "d", "effect": "NoExecute"}),
    ],
)
def test_tolerations(text, expected):
    assert toleration(text) == expected


BAD = [
    (["cluster.image=null"], "cluster.image=null: cluster.executor=kubernetes needs it"),
    (["paths.runs=/home/me/runs"], "paths.runs=/home/me/runs: the pods must see it at this path"),
    (["+cluster.volumes={shared: '/shared:ro'}"], "its volume is mounted read-only"),
    (["+cluster.volumes={shared: /shared, Bad_Name: /x}"], "cluster.volumes=Bad_Name: must be a name of lower-case"),
    (["+cluster.volumes={shared: /shared, other: /shared}"], "another volume is mounted there"),
    (["+cluster.volumes={shared: /shared, other: data}"], "is not an absolute path"),
    (["+cluster.environment={A-B: x}"], "cluster.environment=A-B: must be the name of an environment variable"),
    (["+cluster.environment={PYTHONPATH: /x}"], "cluster.environment=PYTHONPATH: the launcher sets it"),
    (["+cluster.resources={memory: 1Gi}"], "cluster.resources=memory: follows from cluster.memory"),
    (["+cluster.resources={nvidia.com/gpu: 1}"], "follows from the layout"),
    (["+cluster.resources={rdma/ib: many}"], "must be a quantity such as 64Gi"),
    (["+cluster.pod={containers: []}"], "cluster.pod=containers: follows from the layout"),
    (["+cluster.pod={host-network: true}"], "not the name of a field"),
    (["+cluster.node_selector={a: 'b c'}"], "cluster.node_selector=a: b c: must be a label's value"),
    (["+cluster.node_selector={-a: b}"], "cluster.node_selector=-a: must be a name such as"),
    (
        ["fault_tolerance=local_sgd", "fault_tolerance.replicas=2"],
        "cluster.executor=kubernetes starts one Job for a run",
    ),
    *[
        ([f"+cluster.pod={{{field}: x}}"], f"cluster.pod={field}: follows from")
        for field in ("serviceAccount", "nodeName", "priority", "hostnameOverride", "resources", "ephemeralContainers")
    ],
    (["cluster.capabilities=[CAP_IPC_LOCK]"], "must be a Linux capability such as IPC_LOCK"),
    (["cluster.memory=8Gi", "cluster.shared_memory=9G"], "cluster.shared_memory=9G: is more than cluster.memory=8Gi"),
    (["cluster.image=Registry.site/Titan:1"], "must be an image"),
    (["cluster.image=-rf"], "must be an image"),
    *[
        ([f"+cluster.volumes={{shared: /shared, other: {path}}}"], f"cluster.volumes=other: {path}: would hide")
        for path in ("/", "/dev/shm", "/etc", "/proc/x", "/var/run/secrets")
    ],
    (["cluster.memory=lots"], "cluster.memory=lots: must be a quantity such as 64Gi"),
    (["cluster.namespace=Research"], "cluster.namespace=Research: must be a name of lower-case letters"),
    (["cluster.tolerations=['a b']"], "must be KEY, KEY=VALUE"),
    (["cluster.user=0"], "cluster.user=0: must be at least 1"),
    (["cluster.gpus_per_node=null"], "cluster.gpus_per_node"),
]


@pytest.mark.parametrize(("overrides", "words"), BAD, ids=[words for _, words in BAD])
def test_bad_keys_are_one_line(overrides, words):
    try:
        faults = [str(fault) for fault in check(freeze(compose_unchecked(*BASE, "debug=tiny", "gpus=8", *overrides)))]
    except ConfigError as error:  # the range of a single key
        faults = str(error).splitlines()
    assert any(words in fault for fault in faults) and all("\n" not in fault for fault in faults), faults


FIELDS = {
    "topologySpreadConstraints": "[{maxSkew: 1, topologyKey: zone, whenUnsatisfiable: DoNotSchedule}]",
    "resourceClaims": "[{name: a, resourceClaimName: b}]",
    "hostAliases": "[{ip: 1.2.3.4, hostnames: [a]}]",
    "schedulingGates": "[{name: x}]",
    "dnsConfig": "{options: [{name: ndots, value: '1'}], searches: [a.b]}",
    "initContainers": "[{name: a, image: b, command: [sh, -c, 'echo $(A) $$'], env: [{name: A, value: '1e3'}]}]",
    "readinessGates": "[]",
    "hostNetwork": "true",
    "runtimeClassName": "nvidia",
}


@pytest.mark.parametrize("field", FIELDS)
def test_pods_take_every_form_of_value(field):
    one = submission("debug=tiny", "gpus=8", f"+cluster.pod={{{field}: {FIELDS[field]}}}")
    assert list(check(one.job)) == [] == faults_of_fields_of(one)
    job = yaml.safe_load(one.text)
    assert job["spec"]["template"]["spec"][field] == yaml.safe_load(FIELDS[field])


def faults_of_fields_of(one: Submission) -> list[str]:
    return [str(fault) for fault in submit.faults_of_fields([Cell(1, [], one.job, one.directory, 1)])]


@pytest.mark.parametrize(
    ("pod", "words"),
    [
        ("{hostNetworkk: true}", "cluster.pod=hostNetworkk: "),
        ("{hostNetworkk: true}", "nearest legal: hostNetwork"),
        ("{hostNetwork: 'yes'}", "hostNetwork: "),
        ("{hostAliases: [{ip: 1.2.3.4, hostname: a}]}", "hostAliases.0: "),
        ("{topologySpreadConstraints: {maxSkew: 1}}", "topologySpreadConstraints: "),
    ],
)
def test_wrong_fields_of_pods_are_found_without_a_server(pod, words):
    (fault,) = faults_of_fields_of(submission("debug=tiny", "gpus=8", f"+cluster.pod={pod}"))
    assert fault.startswith("cluster.pod=") and words in fault and "\n" not in fault, fault


def test_a_secret_in_a_field_of_pods_is_refused():
    token = "hf_abcdefghijklmnopqrstuvwxyz0123"
    fields = f"{{initContainers: [{{name: a, image: b, env: [{{name: X, value: {token}}}]}}]}}"
    faults = check(freeze(compose_unchecked(*BASE, "debug=tiny", "gpus=1", f"+cluster.pod={fields}")))
    assert faults and token not in str(faults[0])


@pytest.mark.parametrize(
    "more",
    [
        "cluster.capabilities=[SYS_ADMIN]",
        "+cluster.pod={hostPID: true}",
        "+cluster.pod={automountServiceAccountToken: true}",
        "+cluster.pod={initContainers: [{name: a, image: b}]}",
    ],
)
def test_rights_beyond_the_restricted_level_give_a_warning(more):
    job = submission("debug=tiny", "gpus=8", more).job
    assert [fault.key for fault in warnings(job)] == [more.removeprefix("+").partition("=")[0]]


@pytest.mark.parametrize("image", ["titan", "a.b:5000/x/y_z:1.0-rc", "Host.site/x@sha256:" + "a" * 64, "[::1]:50/x"])
def test_images(image):
    assert submission("debug=tiny", "gpus=8", f"cluster.image='{image}'").cluster.image == image


def test_the_kubelet_changes_no_value():
    value = "pa$$(HOME) $(A) $B"
    one = submission("debug=tiny", "gpus=8", f"+cluster.environment={{A: '{value}'}}")
    env = {item["name"]: item.get("value") for item in one.container(PodShape(1, 8))["env"]}
    assert expand(env["A"], {"HOME": "x", "A": "y"}) == value


@pytest.mark.parametrize("bash", [True, False])
@pytest.mark.parametrize(
    ("setup", "status", "words"),
    [
        (["export A=1", "[ -f none ] && echo"], 0, "trained"),
        (["if true; then", "false || true", "fi", "echo $(echo on) $$"], 0, "trained"),
        (["source ./vars", "echo $FROM"], {True: 0, False: 2}, {True: "file", False: "cluster.setup: "}),
        ([". ./vars", "echo $FROM"], 0, "file"),
        (["false", "true"], 2, "cluster.setup: "),
        (["source none"], 2, "cluster.setup: "),
        (["nothing_such -x"], 2, "cluster.setup: "),
        (["sh -c 'exit 78'"], 2, "cluster.setup: "),
        (["exit 0"], 2, "cluster.setup: "),
        (["exit 79"], 79, ""),
        (["exit 75"], 75, ""),
    ],
)
def test_a_line_of_setup_that_fails_stops_the_pod(tmp_path, bash, setup, status, words):
    """In bash if the image has it, else in its sh. A pod whose setup works runs its ranks and has their status."""
    one = submission("debug=tiny", "gpus=8", f"cluster.setup={json.dumps(setup)}", "cluster.python=./ranks")
    (tmp_path / "vars").write_text("FROM=file\n")
    (tmp_path / "ranks").write_text('#!/bin/sh\necho trained "$4"\n')
    (tmp_path / "ranks").chmod(0o755)
    (tmp_path / "bin").mkdir()
    for program in ("sh", "cat", *(["bash"] if bash else [])):
        (tmp_path / "bin" / program).symlink_to(shutil.which(program))
    container = one.container(PodShape(1, 8))
    command = [expand(word, {}) for word in (*container["command"], *container["args"])]
    done = subprocess.run(command, cwd=tmp_path, env={"PATH": str(tmp_path / "bin")}, capture_output=True, text=True)
    expected = status[bash] if isinstance(status, dict) else status
    assert done.returncode == expected, done
    assert (words[bash] if isinstance(words, dict) else words) in done.stdout + done.stderr
    assert ("trained" in done.stdout) is (expected == 0)
    assert expected or f"trained {one.directory}" in done.stdout


def test_a_dry_run_prints_manifests_without_kubectl(tmp_path):
    """Cells that differ only in names share one manifest. Nothing is written."""
    line = [
        "debug=tiny",
        "cluster=kubernetes",
        "cluster.image=i",
        f"+cluster.volumes={{s: {tmp_path}}}",
        "launch.mode=dry",
    ]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(root / "launch.py"), "-m", "seed=1,2,3", "gpus=8", *line],
        cwd=tmp_path, env={"PATH": "/nowhere", "PYTHONPATH": ":".join(sys.path), "HOME": str(tmp_path)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("kind: Job") == 1 and "and 2 more cells with other names" in done.stdout
    assert list(tmp_path.iterdir()) == []
