"""A stand-in for the Job controller, the scheduler and the kubelet, on the objects of api.Store.

It starts the container of each pod as a process of this machine, in its own pid, mount and host-name namespaces, with the
pod's environment, host name and names of the other pods; writes the states of pods and Jobs; sends SIGTERM, and SIGKILL
after the grace period; starts pods again as the Job's failure policy says. Pods have no image, network or user of their own.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import os
import re
import secrets
import signal
import subprocess
import threading
import time
from pathlib import Path

from .api import Store, now

INDEX = "batch.kubernetes.io/job-completion-index"
IMAGE = "registry.site/titan:1"  # the only image that can be pulled
POLL = 0.1


class Container:
    """The process of a pod."""

    def __init__(self, pod: dict, command: list[str], env: dict[str, str], log: Path, hosts: Path) -> None:
        self.log, self.reason, self.asked, self.killed_at, self.killed = log, "", 0.0, None, False
        inside = 'hostname "$0"; mount --bind "$1" /etc/hosts; shift; exec "$@"'
        line = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc"]
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [*line, "sh", "-c", inside, pod["spec"]["hostname"], str(hosts), *command],
                env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd="/", start_new_session=True,
            )  # fmt: skip

    def signal(self, number: int) -> None:
        """Send a signal to the first process of the container, as the kubelet does."""
        parent = self.process.pid
        with contextlib.suppress(OSError, ValueError):
            child = int(Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[0])
            os.kill(child, number)
            self.killed = self.killed or number == signal.SIGKILL

    def ended(self) -> int | None:
        status = self.process.poll()
        if self.killed and status is not None:  # unshare itself then ends with 1
            return 128 + signal.SIGKILL
        return None if status is None else 128 - status if status < 0 else status


class Kubelet(threading.Thread):
    """Controller, scheduler and kubelet of `nodes` nodes with `gpus` GPUs each."""

    def __init__(self, store: Store, home: Path, nodes: int = 4, gpus: int = 4) -> None:
        super().__init__(daemon=True)
        self.store, self.home, self.over = store, home, threading.Event()
        self.gpus = {f"node{number}": gpus for number in range(nodes)}
        self.closed: set[str] = set()  # nodes on which no pod is started
        self.containers: dict[str, Container] = {}  # by the pod's uid
        self.counted: set[str] = set()  # uids of pods whose end the Job controller has seen
        self.began: dict[str, float] = {}  # when each Job was started, by its uid
        self.errors: list[str] = []

    def run(self) -> None:
        while not self.over.wait(POLL):
            try:
                with self.store.lock:
                    for pod in self.store.all("pods"):
                        self.sync_pod(pod)
                    for job in self.store.all("jobs"):
                        self.sync_job(job)
                    for pod in self.store.all("pods"):
                        self.collect(pod)
            except Exception as error:  # a test reads it
                self.errors.append(repr(error))

    def stop(self) -> None:
        self.over.set()
        self.join()
        for container in self.containers.values():
            container.process.kill()
            container.process.wait()

    # --- the Job controller ------------------------------------------------------------------------------------------

    def pods_of(self, job: dict) -> list[dict]:
        uid = job["metadata"]["uid"]
        return [pod for pod in self.store.all("pods") if pod["metadata"]["ownerReferences"][0]["uid"] == uid]

    def sync_job(self, job: dict) -> None:
        spec, status = job["spec"], job.setdefault("status", {})
        pods, kinds = self.pods_of(job), [condition["type"] for condition in status.get("conditions", [])]
        active = [pod for pod in pods if phase(pod) in ("Pending", "Running")]
        if "Failed" in kinds or "Complete" in kinds:
            return
        if "FailureTarget" in kinds:
            if not active:
                first = status["conditions"][0]
                status["conditions"].append({**first, "type": "Failed"})
            return
        for pod in pods:
            if phase(pod) == "Failed" and pod["metadata"]["uid"] not in self.counted:
                self.counted.add(pod["metadata"]["uid"])
                self.apply_policy(job, pod)
        if spec.get("suspend"):
            status.pop("startTime", None)
            for pod in active:
                pod["metadata"].setdefault("deletionTimestamp", now())
            return
        status.setdefault("startTime", now())
        began = self.began.setdefault(job["metadata"]["uid"], time.monotonic())
        if time.monotonic() > began + spec.get("activeDeadlineSeconds", 1e9):
            self.fail(job, "DeadlineExceeded", "Job was active longer than specified deadline")
        if "conditions" in status:
            return
        done = {index_of(pod) for pod in pods if phase(pod) == "Succeeded"}
        if len(done) == spec["completions"]:
            status["conditions"] = [
                {"type": "Complete", "status": "True", "reason": "CompletionsReached", "message": ""}
            ]
            return
        for index in range(spec["completions"]):
            if index not in done and index not in [index_of(pod) for pod in active]:
                self.create_pod(job, index)

    def apply_policy(self, job: dict, pod: dict) -> None:
        """Do what the first matching rule of the failure policy says."""
        status = pod["status"]
        ended = next(iter(status.get("containerStatuses", [])), {}).get("state", {}).get("terminated", {})
        code = ended.get("exitCode")
        met = {one["type"] for one in status.get("conditions", []) if one["status"] == "True"}
        for number, rule in enumerate(job["spec"]["podFailurePolicy"]["rules"]):
            wanted = rule.get("onExitCodes")
            matches = bool(met & {one["type"] for one in rule.get("onPodConditions", [])})
            if wanted and code:
                matches = (code in wanted["values"]) == (wanted["operator"] == "In")
            if matches and rule["action"] == "Ignore":
                return
            if matches and rule["action"] == "FailJob":
                name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
                words = f"Container ranks for pod {name} failed with exit code {code} matching FailJob rule at index {number}"
                self.fail(job, "PodFailurePolicy", words)
                return
        job["status"]["failed"] = job["status"].get("failed", 0) + 1
        if job["status"]["failed"] > job["spec"]["backoffLimit"]:
            self.fail(job, "BackoffLimitExceeded", "Job has reached the specified backoff limit")

    def fail(self, job: dict, reason: str, message: str) -> None:
        condition = {"type": "FailureTarget", "status": "True", "reason": reason, "message": message}
        job["status"].setdefault("conditions", [condition])
        for pod in self.pods_of(job):
            if phase(pod) in ("Pending", "Running"):
                pod["metadata"].setdefault("deletionTimestamp", now())

    def create_pod(self, job: dict, index: int) -> None:
        template, name = job["spec"]["template"], job["metadata"]["name"]
        spec = copy.deepcopy(template["spec"]) | {"hostname": f"{name}-{index}"}
        field = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
        spec["containers"][0]["env"].append({"name": "JOB_COMPLETION_INDEX", "valueFrom": field})
        meta = {
            "name": f"{name}-{index}-{secrets.token_hex(3)[:5]}",
            "namespace": job["metadata"]["namespace"],
            "labels": {**template["metadata"]["labels"], "job-name": name, "batch.kubernetes.io/job-name": name},
            "annotations": {INDEX: str(index)},
            "ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"]}],
        }
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec, "status": {"phase": "Pending"}}
        self.store.put("pods", pod)

    def collect(self, pod: dict) -> None:
        """Remove a pod that was deleted and has ended, and ask the pods of a deleted Job to end."""
        meta = pod["metadata"]
        orphan = meta["ownerReferences"][0]["uid"] not in [job["metadata"]["uid"] for job in self.store.all("jobs")]
        if orphan:
            meta.setdefault("deletionTimestamp", now())
        if (
            "deletionTimestamp" in meta
            and phase(pod) in ("Failed", "Succeeded")
            and (orphan or meta["uid"] in self.counted)
        ):
            self.store.remove("pods", pod)

    # --- the scheduler and the kubelet -------------------------------------------------------------------------------

    def sync_pod(self, pod: dict) -> None:
        uid, meta = pod["metadata"]["uid"], pod["metadata"]
        container = self.containers.get(uid)
        if phase(pod) in ("Failed", "Succeeded"):
            return
        if container is None:
            if "deletionTimestamp" in meta:
                pod["status"] |= {"phase": "Failed", "reason": "Deleted"}
            elif self.schedule(pod):
                self.start_container(pod)
            return
        if "deletionTimestamp" in meta and container.ended() is None:
            if not container.asked:
                container.asked = time.monotonic()
                container.signal(signal.SIGTERM)
            elif time.monotonic() > container.asked + pod["spec"]["terminationGracePeriodSeconds"]:
                container.signal(signal.SIGKILL)
        if (code := container.ended()) is not None and time.monotonic() > (container.killed_at or 0):
            text = container.log.read_text(errors="replace") if code else ""
            ended = {
                "exitCode": code,
                "reason": container.reason or ("Error" if code else "Completed"),
                "finishedAt": now(),
            }
            if text:
                ended["message"] = text[-2048:]
            pod["status"]["containerStatuses"] = [{"name": "ranks", "state": {"terminated": ended}}]
            pod["status"]["phase"] = "Failed" if code else "Succeeded"

    def schedule(self, pod: dict) -> bool:
        """Choose a node for a pod. Return False, and write why, if there is none or its container cannot start."""
        spec, status = pod["spec"], pod["status"]
        claims = [
            one["persistentVolumeClaim"]["claimName"] for one in spec["volumes"] if "persistentVolumeClaim" in one
        ]
        there = [claim["metadata"]["name"] for claim in self.store.all("persistentvolumeclaims")]
        missing = [claim for claim in claims if claim not in there]
        wanted = int(spec["containers"][0]["resources"].get("limits", {}).get("nvidia.com/gpu", 0))
        if "nodeName" not in spec:
            terms = (
                spec.get("affinity", {})
                .get("nodeAffinity", {})
                .get("requiredDuringSchedulingIgnoredDuringExecution", {})
            )
            banned = {
                node for term in terms.get("nodeSelectorTerms", []) for node in term["matchExpressions"][0]["values"]
            }
            free = [node for node, gpus in self.free().items() if gpus >= wanted and node not in banned | self.closed]
            if missing or not free:
                words = f'persistentvolumeclaim "{missing[0]}" not found' if missing else "Insufficient nvidia.com/gpu"
                message = f"0/{len(self.gpus)} nodes are available: {words}."
                waits = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
                status["conditions"] = [waits]
                return False
            spec["nodeName"] = free[0]
            status["conditions"] = [{"type": "PodScheduled", "status": "True"}]
        waits = {}
        if spec["containers"][0]["image"] != IMAGE:
            waits = {
                "reason": "ImagePullBackOff",
                "message": f'Back-off pulling image "{spec["containers"][0]["image"]}"',
            }
        for source in spec["containers"][0].get("envFrom", []):
            if source["secretRef"]["name"] not in [one["metadata"]["name"] for one in self.store.all("secrets")]:
                message = f'secret "{source["secretRef"]["name"]}" not found'
                waits = {"reason": "CreateContainerConfigError", "message": message}
        if waits:
            status["containerStatuses"] = [{"name": "ranks", "state": {"waiting": waits}}]
        return not waits

    def free(self) -> dict[str, int]:
        """Return the GPUs of each node that no pod has."""
        free = dict(self.gpus)
        for pod in self.store.all("pods"):
            if "nodeName" in pod["spec"] and phase(pod) in ("Pending", "Running"):
                limits = pod["spec"]["containers"][0]["resources"].get("limits", {})
                free[pod["spec"]["nodeName"]] -= int(limits.get("nvidia.com/gpu", 0))
        return dict(sorted(free.items(), key=lambda pair: -pair[1]))

    def start_container(self, pod: dict) -> None:
        meta, container = pod["metadata"], pod["spec"]["containers"][0]
        env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        for source in container.get("envFrom", []):
            secret = self.store.objects["secrets", meta["namespace"], source["secretRef"]["name"]]
            env |= {name: base64.b64decode(value).decode() for name, value in secret["data"].items()}
        for variable in container["env"]:
            env[variable["name"]] = variable["value"] if "value" in variable else self.field(pod, variable["valueFrom"])
        command = [expand(word, env) for word in (*container["command"], *container["args"])]
        hosts = self.home / f"{meta['name']}.hosts"
        hosts.write_text("127.0.0.1 localhost\n" + "".join(self.names(pod)))
        log = self.home / f"{meta['name']}.log"
        self.containers[meta["uid"]] = Container(pod, command, env, log, hosts)
        pod["status"] |= {"phase": "Running", "startTime": now()}
        pod["status"]["containerStatuses"] = [{"name": "ranks", "state": {"running": {"startedAt": now()}}}]

    def names(self, pod: dict) -> list[str]:
        """Return a line of /etc/hosts for each pod of the Job: its host name below the Service's, if there is such a one."""
        job = pod["metadata"]["labels"]["job-name"]
        service = pod["spec"]["subdomain"]
        there = service in [one["metadata"]["name"] for one in self.store.all("services")]
        own = pod["spec"]["hostname"]
        lines = [f"127.0.0.{2 + index_of(pod)} {own}\n"]
        return lines + [f"127.0.0.{2 + index} {job}-{index}.{service}\n" for index in range(64) if there]

    def field(self, pod: dict, source: dict) -> str:
        """Return what the downward API gives for a field."""
        path = source["fieldRef"]["fieldPath"]
        if found := re.fullmatch(r"metadata\.annotations\['(.+)'\]", path):
            return pod["metadata"]["annotations"][found[1]]
        group, name = path.split(".")
        return pod[group][name]

    # --- accidents ---------------------------------------------------------------------------------------------------

    def container_of(self, run: str, index: int) -> tuple[dict, Container]:
        """Return the running pod of a run (by its hash) with this index, and its container."""
        with self.store.lock:
            for pod in self.store.all("pods"):
                own = pod["metadata"]["labels"]["titan-hydra/run"] == run and index_of(pod) == index
                if own and phase(pod) == "Running":
                    return pod, self.containers[pod["metadata"]["uid"]]
        raise ValueError(f"no pod {index} of {run} runs")

    def preempt(self, run: str, index: int) -> None:
        """Take a pod away for another of higher priority: it is asked to end, and killed after its grace period."""
        pod, _ = self.container_of(run, index)
        with self.store.lock:
            reason = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": ""}
            pod["status"].setdefault("conditions", []).append(reason)
            pod["metadata"]["deletionTimestamp"] = now()

    def lose(self, run: str, index: int, seconds: float = 3) -> None:
        """Cut the power of a pod's node. The cluster notices it after `seconds`, and gives the pod up."""
        pod, container = self.container_of(run, index)
        container.killed_at = time.monotonic() + seconds
        container.signal(signal.SIGKILL)
        with self.store.lock:
            reason = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager", "message": ""}
            pod["status"].setdefault("conditions", []).append(reason)

    def kill(self, run: str, index: int, reason: str = "") -> None:
        """Kill all processes of a pod, as the kernel does when the pod uses too much memory (reason OOMKilled)."""
        _, container = self.container_of(run, index)
        container.reason = reason
        container.signal(signal.SIGKILL)


def phase(pod: dict) -> str:
    return pod["status"].get("phase", "Pending")


def index_of(pod: dict) -> int:
    return int(pod["metadata"]["annotations"][INDEX])


def expand(word: str, env: dict[str, str]) -> str:
    """Replace $(NAME) by a variable and $$ by $, as the kubelet does in a command."""
    return re.sub(r"\$(\$|\(([-._A-Za-z][-._A-Za-z0-9]*)\))", lambda found: replacement(found, env), word)


def replacement(found: re.Match, env: dict[str, str]) -> str:
    return "$" if found[1] == "$" else env.get(found[2], found[0])
