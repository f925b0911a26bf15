"""Run a real SLURM of four nodes with four fake GPUs each on this machine, and start launch.py as a user does on its
login node.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.experiments.launch.conftest import ROOT, Launcher

SCRIPT = Path(__file__).parent / "slurm-cluster"
NODES, GPUS = 4, 4
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare")


class Cluster:
    """One SLURM: its environment, its jobs, and the accidents that a test can cause."""

    def __init__(
        self,
        accounting: str = "shim",
        preempt_signal: str = "user",
        owner: int | None = None,
        node_timeout: int = 10,
        name: str = "fake",
        enforce: str = "",
        timeouts: str = "short",
        binding: str = "none",
        nodes: int = NODES,
        gpus: int = GPUS,
    ) -> None:
        self.nodes, self.gpus = nodes, gpus
        self.home = Path(tempfile.mkdtemp(prefix="ts-", dir="/tmp"))  # a short path, because it contains unix sockets
        self.env = {
            **os.environ,
            "SLURM_HOME": str(self.home),
            "SLURM_ACCOUNTING": accounting,
            "SLURM_PREEMPT_SIGNAL": preempt_signal,
            "SLURM_OWNER": str(owner or os.getpid()),
            "SLURM_NODE_TIMEOUT_S": str(node_timeout),
            "SLURM_CLUSTER": name,
            "SLURM_ENFORCE": enforce,
            "SLURM_TIMEOUTS": timeouts,
            "SLURM_BINDING": binding,
            "SLURM_CONF": f"{self.home}/etc/slurm.conf",
            "PATH": f"{self.home}/bin:{os.environ['PATH']}:/usr/sbin:/sbin",
        }

    def manage(self, *arguments: str) -> None:
        """Run slurm-cluster: up, down, crash NODE, boot NODE."""
        done = subprocess.run([str(SCRIPT), *arguments], env=self.env, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise RuntimeError(f"slurm-cluster {' '.join(arguments)}: {done.stderr}")

    def up(self) -> None:
        """Start the cluster, or only those of its daemons that have died, and wait until all nodes answer."""
        self.manage("up", str(self.nodes), str(self.gpus))

    def status(self) -> subprocess.CompletedProcess:
        return subprocess.run([str(SCRIPT), "status"], env=self.env, capture_output=True, text=True, timeout=300)

    def down(self) -> None:
        self.manage("down")
        shutil.rmtree(self.home, ignore_errors=True)

    def call(self, *command: str) -> str:
        """Return the output of a SLURM command."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def jobs(self) -> dict[str, dict[str, str]]:
        """Return what `scontrol show job` prints of every job that the controller knows, by id: 123, or 123_4 in an
        array. Waiting tasks of an array share one entry.
        """
        found = {}
        for line in self.call("scontrol", "show", "job", "--oneliner").splitlines():
            job = dict(word.split("=", 1) for word in line.split() if "=" in word)
            if "JobId" in job:
                found[f"{job['ArrayJobId']}_{job['ArrayTaskId']}" if "ArrayJobId" in job else job["JobId"]] = job
        return found

    def active(self) -> list[str]:
        """Return the jobs that have not ended, with each task of an array listed separately."""
        return self.call("squeue", "--noheader", "--array", "--format=%i").split()

    def saved(self) -> None:
        """Wait until the controller has written its present state to disk. It writes up to 5 s after a change, and
        loses later changes if it is killed. To be sure that there is a change to write, this sets a job's comment.
        """
        asked, file = time.time(), self.home / "state" / "job_state"
        self.call("scontrol", "update", f"JobId={self.active()[0]}", "Comment=saved")
        while not file.exists() or file.stat().st_mtime < asked:
            assert time.time() < asked + 20
            time.sleep(0.2)

    @contextlib.contextmanager
    def closed(self):
        """Prevent jobs from starting while the block runs; they can still be submitted."""
        self.call("scontrol", "update", "PartitionName=main", "State=DOWN")
        try:
            yield
        finally:
            self.call("scontrol", "update", "PartitionName=main", "State=UP")

    def signal_job(self, job_id: str, *signals: str) -> None:
        """Send signals to all ranks of a job, one right after another. They go to the job's step, as scancel hangs on a
        task whose array still waits.
        """
        for name in signals:
            self.call("scancel", f"--signal={name}", f"{job_id}.0")

    def clear(self) -> None:
        """Kill all jobs, start every node again, and wait until nothing runs."""
        self.up()
        self.call("scancel", "--state=PENDING", "--user=root")
        deadline = time.monotonic() + 300
        while self.active():
            assert time.monotonic() < deadline, self.jobs()
            self.call("scancel", "--signal=KILL", "--full", "--user=root")
            self.call("scancel", "--user=root")
            time.sleep(0.3)
        self.up()


class Submitter(Launcher):
    """Run launch.py and titan on the login node of a cluster, in a folder of their own."""

    SLURM = ("cluster=slurm", f"cluster.gpus_per_node={GPUS}", "cluster.stop_seconds=30")

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        super().__init__(folder)
        self.cluster, self.code = cluster, ROOT
        self.env = {**cluster.env, "OMP_NUM_THREADS": "1"}

    def start(self, *overrides: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, str(self.code / "launch.py"), *overrides],
            cwd=self.folder,
            env=self.env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def line(self, *overrides: str) -> list[str]:
        """Return the command line that `submit` gives to launch.py."""
        sweep = [override for override in overrides if override == "-m"]
        return [*sweep, *self.SLURM, *self.TINY, *(override for override in overrides if override != "-m")]

    def submit(self, *overrides: str) -> str:
        """Submit cells to the cluster; return what launch.py printed."""
        done = self.run(*self.line(*overrides))
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def titan(self, *arguments: str) -> subprocess.CompletedProcess:
        """Run a `titan` command of this checkout."""
        code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from titan_hydra.cli import main; sys.exit(main())"
        return self.python("-c", code, *arguments)

    def status(self, target: str = "runs") -> dict[Path, dict]:
        """Return the status of every run, as `titan status --json` prints it."""
        done = self.titan("status", target, "--json")
        assert done.returncode == 0, done.stderr
        return {Path(cell["directory"]): cell for cell in json.loads(done.stdout)["cells"]}

    def cells(self) -> list[Path]:
        """Return all run directories of the cluster, by name. Tests with several shapes keep each shape in a folder of
        its own.
        """
        found = [*(self.folder / "runs").glob("*/config.json"), *(self.folder / "runs").glob("[0-9]/*/config.json")]
        return sorted(path.parent for path in found)

    def cell(self, *overrides: str) -> Path:
        """Return the run directory of the cell with these `overrides`."""
        (found,) = [
            path for path in self.cells() if {*overrides} <= {*(path / "overrides.txt").read_text().splitlines()}
        ]
        return found

    def job_id(self, run: Path, attempt: int = 1) -> str:
        """Return the id of the SLURM job of an attempt, as 123_4."""
        return json.loads((run / "attempts" / str(attempt) / "attempt.json").read_text())["job_id"]

    def job(self, run: Path, attempt: int = 1) -> dict[str, str]:
        """Return what SLURM knows of the job of an attempt."""
        return self.cluster.jobs()[self.job_id(run, attempt)]

    def attempts(self, run: Path) -> list[int]:
        """Return the attempts in which a rank has started."""
        return sorted({int(path.parent.name) for path in run.glob("attempts/[0-9]*/rank_0.json")})

    def step(self, run: Path, attempt: int = 1) -> int:
        """Return the last step of a run; -1 before its first."""
        try:
            return json.loads((run / "attempts" / str(attempt) / "status.json").read_text())["step"]
        except (OSError, ValueError):
            return -1

    def done(self, run: Path) -> bool:
        """Return whether a run has trained to its end."""
        return (run / "result.json").exists()

    def losses(self, run: Path) -> dict[int, str]:
        """Return loss and gradient norm by step, as written in the file: equal text means equal bits. A step that was
        made twice must have the same numbers both times.
        """
        found: dict[int, str] = {}
        for line in (run / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            values = f"{row['loss']!r} {row['grad_norm']!r}"
            assert found.setdefault(row["step"], values) == values, (run.name, row["step"])
        return found

    def settle(self, seconds: float = 240) -> None:
        """Wait until no job is queued or running."""
        self.wait(lambda: not self.cluster.active(), seconds, poll=0.5)

    def wait(self, condition, seconds: float = 180, poll: float = 0.2) -> float:
        """Wait as Launcher.wait does, but ask less often, so that the ranks can use the two cores. Print the queue if
        the wait fails.
        """
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            with contextlib.suppress(OSError, ValueError, KeyError):
                if condition():
                    return time.monotonic() - began
            time.sleep(poll)
        raise AssertionError(f"not so within {seconds} s\n{self.story()}")

    def story(self) -> str:
        """Return what the cluster and the ranks report, for the message of a failed test."""
        lines = [self.cluster.call("squeue", "--states=all", "--format=%i %j %T %r %N %M")]
        lines += ["--- slurmctld", *(self.cluster.home / "log" / "slurmctld.log").read_text().splitlines()[-20:]]
        for log in sorted(self.folder.glob("runs/**/attempts/*/*.log"), key=lambda path: path.stat().st_mtime)[-8:]:
            lines += [f"--- {log.relative_to(self.folder)}", *log.read_text(errors="replace").splitlines()[-12:]]
        return "\n".join(lines)

    def rank_record(self, run: Path, rank: int, attempt: int = 1) -> dict:
        """Return what a rank has recorded of itself."""
        return json.loads((run / "attempts" / str(attempt) / f"rank_{rank}.json").read_text())


def missing() -> str | None:
    """Return the programs that this machine lacks for a SLURM of its own."""
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    absent = [program for program in PROGRAMS if not shutil.which(program, path=path)]
    if absent:
        return f"no {', '.join(absent)}: apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"
    unshare = ["unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "true"]
    if subprocess.run(unshare, capture_output=True).returncode:
        return "needs root, and a kernel that allows unshare"
    return None


def skip(reason: str) -> None:
    """Skip the test, or fail where SLURM must be installed (CI)."""
    (pytest.fail if os.environ.get("TITAN_REQUIRE_SLURM") else pytest.skip)(f"SLURM on this machine: {reason}")


@contextlib.contextmanager
def running(**settings):
    """Run a cluster with these settings while the block runs."""
    if reason := missing():
        skip(reason)
    cluster = Cluster(**settings)
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


@pytest.fixture(scope="session")
def cluster():
    """Return the cluster of all tests that need no special settings."""
    with running() as cluster:
        yield cluster


@pytest.fixture
def submit(cluster, tmp_path):
    """Run launch.py on the cluster, in an empty folder; afterwards no job is left."""
    with desk(cluster, tmp_path / "work") as submitter:
        yield submitter


@contextlib.contextmanager
def desk(cluster: Cluster, folder: Path):
    """Return a user in a folder of the cluster's login node."""
    folder.mkdir(exist_ok=True)
    submitter = Submitter(folder.resolve(), cluster)
    try:
        yield submitter
    finally:
        cluster.clear()
        for process in submitter.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
