"""Start launch.py and titan as a user of a Kubernetes cluster does: with the real kubectl, against stand-ins for the API
server (api.py) and for controller, scheduler and kubelet (kubelet.py). The ranks are real processes that train over gloo.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm.conftest import Submitter
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.experiments.launch.cell import Cell
from titan_hydra.experiments.launch.executors.kubernetes import submit
from titan_hydra.experiments.runs import rundir

from . import api
from .kubelet import IMAGE, Kubelet

GPUS = 4
UNSHARE = ["unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "true"]


class Site:
    """A cluster of stand-ins, and a configuration of kubectl that leads to it."""

    def __init__(self, home: Path) -> None:
        self.home, self.store = home, api.Store()
        self.server = api.serve(self.store)
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.kubelet = Kubelet(self.store, home, gpus=GPUS)
        self.kubelet.start()
        self.config = home / "config"
        self.configure({"fake": "research"})
        for name in ("shared", "data"):
            self.store.put("persistentvolumeclaims", {"metadata": {"name": name, "namespace": "research"}})

    def configure(self, contexts: dict[str, str], current: str | None = None) -> None:
        """Write kubectl's configuration: contexts, and the namespace of each."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "fake", "cluster": {"server": self.address}}],
            "users": [{"name": "me", "user": {}}],
            "contexts": [
                {"name": name, "context": {"cluster": "fake", "user": "me", "namespace": namespace}}
                for name, namespace in contexts.items()
            ],
            "current-context": next(iter(contexts), "") if current is None else current,
        }
        self.config.write_text(json.dumps(config))

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "KUBECONFIG": str(self.config), "OMP_NUM_THREADS": "1", "HOME": str(self.home)}

    def close(self) -> None:
        self.kubelet.stop()
        self.server.shutdown()
        self.server.server_close()


class Desk(Submitter):
    """A user of the cluster, in a folder that the pods see too."""

    def __init__(self, folder: Path, site: Site) -> None:
        super().__init__(folder, site)
        self.env, self.site = site.env, site
        self.SLURM = (
            "cluster=kubernetes",
            f"cluster.gpus_per_node={GPUS}",
            "cluster.stop_seconds=40",
            f"cluster.image={IMAGE}",
            f"cluster.python={sys.executable}",
            f"+cluster.volumes={{shared: {folder.parent}}}",
        )
        self.setup: list[str] = []

    def line(self, *overrides: str) -> list[str]:
        setup = [f"cluster.setup={json.dumps(self.setup)}"] if self.setup else []
        return [*super().line(*overrides), *setup]

    def sabotage(self, code: str) -> None:
        """Run code in every rank, as Launcher.sabotage does. Pods get the path from a line of cluster.setup."""
        super().sabotage(code)
        self.setup = [f"export PYTHONPATH=$PYTHONPATH:{self.env.pop('PYTHONPATH')}"]

    def settle(self, seconds: float = 240) -> None:
        """Wait until no Job runs and no pod is left running."""
        self.wait(lambda: all(map(has_ended, self.site.store.all("jobs"))), seconds)

    def state(self, run: Path) -> dict:
        """Return what `titan status --json` prints of a run."""
        return self.status()[run]

    def story(self) -> str:
        lines = [*self.site.kubelet.errors]
        for plural in ("jobs", "pods"):
            for item in self.site.store.all(plural):
                lines.append(f"{item['metadata']['name']} {json.dumps(item.get('status'))[:600]}")
        logs = [*self.site.home.glob("*.log"), *self.folder.glob("runs/**/attempts/*/*.log")]
        for log in sorted(logs, key=lambda path: path.stat().st_mtime)[-10:]:
            lines += [f"--- {log}", *log.read_text(errors="replace").splitlines()[-12:]]
        return "\n".join(lines)


def has_ended(job: dict) -> bool:
    """Whether a Job is complete, or has failed and its last pod has ended."""
    return {"Failed", "Complete"} & {one["type"] for one in job["status"].get("conditions", [])} != set()


def missing_programs() -> str | None:
    """Return what this machine lacks for these tests."""
    if not shutil.which("kubectl"):
        return "no kubectl: apt-get install --no-install-recommends kubernetes-client"
    if importlib.util.find_spec("kubernetes_validate") is None:
        return "no kubernetes-validate: pip install -e '.[test]'"
    if subprocess.run(UNSHARE, capture_output=True).returncode:
        return "needs root, and a kernel that allows unshare"
    return None


@pytest.fixture
def site(tmp_path):
    """Return a cluster of stand-ins."""
    if reason := missing_programs():
        (pytest.fail if os.environ.get("TITAN_REQUIRE_KUBECTL") else pytest.skip)(reason)
    (tmp_path / "site").mkdir()
    site = Site(tmp_path / "site")
    try:
        yield site
        assert not site.kubelet.errors
    finally:
        site.close()


@pytest.fixture
def desk(site, tmp_path):
    """Return a user of the cluster, in an empty folder."""
    folder = tmp_path / "shared" / "work"
    folder.mkdir(parents=True)
    desk = Desk(folder.resolve(), site)
    yield desk
    site.kubelet.stop()
    for process in desk.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@pytest.fixture
def closed(site, monkeypatch):
    """Return the cluster with all its nodes closed; kubectl of this process leads to it."""
    site.kubelet.closed = set(site.kubelet.gpus)
    monkeypatch.setenv("KUBECONFIG", str(site.config))
    monkeypatch.setattr(submit, "PATIENCE", 0)
    return site


@pytest.fixture
def cell(closed, tmp_path):
    """Return a function that makes a cell of two pods, with these overrides."""

    def make(*overrides: str) -> Cell:
        common = ("debug=tiny", "cluster=kubernetes", f"cluster.image={IMAGE}", f"paths.runs={tmp_path}/shared/runs")
        volume, size = f"+cluster.volumes={{shared: {tmp_path}/shared}}", ("gpus=2", "cluster.gpus_per_node=1")
        job = compose_job(*common, volume, *size, *overrides)
        return Cell(1, [*overrides], job, rundir.directory_of(job), 1)

    (tmp_path / "shared").mkdir()
    return make


def jobs(site: Site) -> list[str]:
    """Return the names of the Jobs of a cluster."""
    return [job["metadata"]["name"] for job in site.store.all("jobs")]


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true, at most ten seconds."""
    for _ in range(200):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("never so")
