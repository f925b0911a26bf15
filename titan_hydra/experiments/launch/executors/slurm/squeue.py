"""Ask SLURM about jobs: one call of squeue for all jobs, and one call of sacct for those that squeue no longer lists."""

import getpass
import re
import shutil
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass

from titan_hydra.experiments.runs.queue import Owner, Queue, QueuedJob

LIMIT = 30  # maximum seconds for a SLURM command, which would otherwise block while SLURM's controller is down
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
# some of SLURM's reasons why a job waits, and the clearer words that are shown instead
REASONS = {"JobArrayTaskLimit": "max_parallel"}
ACTIVE = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
# Time and answer of the last `scontrol show config`. If there was no answer, it is called again after LIMIT seconds.
SETTINGS: list[tuple[float, str]] = []
FIELDS = "%i|%T|%r|%N|%S|%j"  # the job's id, state, reason for waiting, nodes, start (actual or expected), and name


@dataclass(frozen=True)
class SlurmJob(QueuedJob):
    """One job, or one task of an array, as squeue lists it."""

    name: str = ""

    @property
    def why(self) -> str:
        return REASONS.get(self.reason, super().why)

    @property
    def unfinished(self) -> bool:
        return self.waiting or self.active

    @property
    def waiting(self) -> bool:
        return self.state in WAITING

    @property
    def active(self) -> bool:
        return self.state in ACTIVE


def find_job(queue: Queue, owner: Owner) -> SlurmJob | None:
    """Return the job of an attempt. It is found by its id and the token in its name. A job with the token alone is the
    attempt's if there is no such job: the submitter died before recording the id, or the recorded id is damaged.
    """
    recorded: SlurmJob | None = queue.jobs.get(owner["job_id"])
    if recorded and recorded.name.endswith(owner["token"]):
        return recorded
    task = f"_{owner.get('index', 0)}"
    named = [job for job in queue.jobs.values() if job.name.endswith(owner["token"])]
    return next((job for job in named if "_" not in job.id or job.id.endswith(task)), recorded)


def ask_queue(owners: list[Owner]) -> Queue:
    """Ask squeue about the jobs of attempts, and sacct about those jobs that squeue no longer lists. An attempt is
    given as the content of its attempt.json.

    squeue is also asked about attempts that are recorded as ended: an administrator may have requeued their jobs, and
    after a failed sbatch a job may appear late.
    """
    owners = [owner for owner in owners if not elsewhere(owner)]
    if not owners:
        return Queue()
    undecided = [owner for owner in owners if "ended" not in owner]
    names = ",".join(sorted({getpass.getuser(), *(owner["user"] for owner in owners)}))
    out = call("squeue", "--noheader", "--array", "--states=all", f"--user={names}", f"--format={FIELDS}")
    if out is None:
        return Queue(answers=not undecided)
    jobs = {job.id: job for job in map(_job, out.splitlines()) if job}
    forgotten = {owner["job_id"] for owner in undecided if owner["job_id"]} - jobs.keys()
    return Queue(jobs | ended(forgotten) if forgotten else jobs)


def _job(line: str) -> SlurmJob | None:
    parts = line.strip().split("|", 5)
    return SlurmJob(*parts) if len(parts) > 5 else None


def ended(job_ids: Iterable[str]) -> dict[str, SlurmJob]:
    """Ask sacct how the jobs that squeue no longer lists have ended; {} on a cluster without accounting."""
    ids = sorted(job_ids)
    jobs = {}
    for first in range(0, len(ids), 500):  # several calls, as the length of a command line is limited
        out = call(
            "sacct", "-X", "-n", "--parsable2", "-j", ",".join(ids[first : first + 500]), "-o", "JobID,State,NodeList"
        )
        for line in (out or "").splitlines():
            job_id, state, nodes = [*line.split("|"), "", ""][:3]
            if state:
                # only the first word: sacct also writes "CANCELLED by 1000"
                jobs[job_id] = SlurmJob(job_id, state.split()[0], nodes=nodes)
    return jobs


def setting(name: str) -> str:
    """Return a setting of the SLURM cluster of this machine, such as ClusterName; "" if SLURM is not installed or does not
    answer.
    """
    if not SETTINGS or (not SETTINGS[-1][1] and time.monotonic() - SETTINGS[-1][0] > LIMIT):
        text = call("scontrol", "show", "config") or ""
        SETTINGS[:] = [(time.monotonic(), text)]
    match = re.search(rf"^{name}\s*=\s*(\S+)", SETTINGS[-1][1], re.M)
    return match[1] if match else ""


def elsewhere(owner: Owner) -> str:
    """Return the name of the cluster to which an attempt was submitted, if that is not the cluster of this machine;
    else "". The SLURM commands on this machine cannot find a job of another cluster.
    """
    this_cluster = owner.get("cluster") and setting("ClusterName")
    return owner["cluster"] if this_cluster and this_cluster != owner["cluster"] else ""


def minutes_of(limit: str) -> int | None:
    """Convert SLURM's [days-]hours:minutes:seconds, or minutes:seconds, to minutes; None for no limit."""
    if not (match := re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", limit)):
        return None
    days, hours, minutes, _ = (int(part or 0) for part in match.groups())
    return (days * 24 + hours) * 60 + minutes


def call(*command: str) -> str | None:
    """Return the output of a SLURM command; None if the command is not installed, fails, or does not answer."""
    if shutil.which(command[0]) is None:
        return None
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT).stdout
    except (OSError, subprocess.SubprocessError):
        return None
