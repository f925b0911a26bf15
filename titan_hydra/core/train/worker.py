"""The entry point of every rank: check that the job is the one that was submitted, and call the trainer.

An executor calls `run_rank` in each of its processes, with the rank's place. The command `python -m
titan_hydra.core.train.worker DIRECTORY [ATTEMPT]` reads the place from torchrun's variables; without these variables, it
runs a single rank. A rank imports only what its job needs: neither Hydra nor the rest of the launcher.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import getpass
import importlib
import io
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_hydra.core.base.errors import LAST_WORDS, ConfigError, Exit, RunError, Stopped, Unhealthy
from titan_hydra.core.base.threads import cores
from titan_hydra.core.job.config import Job
from titan_hydra.core.job.config.files import write_json, write_text
from titan_hydra.core.job.config.user_code import digest_of_code, edited_sources
from titan_hydra.core.job.ranks import processes
from titan_hydra.core.job.run import inputs, layout
from titan_hydra.core.job.run.failure import describe
from titan_hydra.core.job.run.frozen import load_job
from titan_hydra.core.job.run.layout import runs_of
from titan_hydra.core.job.run.records import this_process
from titan_hydra.core.job.run.run import Run, folders_of, group_at, newest_attempt

if TYPE_CHECKING:
    from torch.distributed import Store

START_LIMIT = 300  # seconds within which each rank must have found rank 0
LATE = 60  # seconds within which a rank must see the files that were written before it was started
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class Place:
    """The number of this process among all ranks that were started together, and what started them."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 1
    torchrun: bool = False  # whether torchrun started this process, and its variables give the rendezvous
    job: str = ""  # the id of the executor's job, as attempt.json has it; a job runs the ranks of one replica group
    host: str = ""  # the name under which other hosts find rank 0; "" means the host name of rank 0's machine

    @classmethod
    def of(cls, variables: Sequence[str], torchrun: bool = False, job: str = "", host: str = "") -> Place:
        """Read a place from four environment variables: rank, number of ranks, rank on this host, ranks on this host."""
        rank, ranks, local_rank, local_ranks = (
            int(os.environ.get(name, value)) for name, value in zip(variables, "0101", strict=True)
        )
        return cls(rank, ranks, local_rank, local_ranks, torchrun, job, host)


ALONE = Place()
STOPS = (signal.SIGTERM, signal.SIGUSR2)  # signals that ask a rank to stop


def run_rank(directory: str, attempt: int, place: Place = ALONE, inline: bool = False) -> int:
    """Run one rank. With `inline` return the rank's exit status; otherwise end the process with this status."""
    folder = Path(directory).absolute()
    attempt_folder = layout.ATTEMPT.of(folder, attempt)
    attempt_folder.mkdir(parents=True, exist_ok=True)
    record = {**this_process(), "started": time.time(), "load": {"cores": os.cpu_count(), "start": os.getloadavg()[0]}}
    record_file = layout.RANK.of(attempt_folder, place.rank)
    error, before = None, signal.getsignal(signal.SIGTERM)
    try:
        if not inline:
            own_process(layout.LOG.of(attempt_folder, place.rank))
        write_json(record_file, record)
        _train(folder, attempt_folder, place)
        status = Exit.DONE
    # also catches SystemExit and KeyboardInterrupt, for which `describe` returns their own exit statuses
    except BaseException as caught:
        if not inline:  # a second request to stop must not interrupt the record of the first one
            for number in STOPS:
                signal.signal(number, signal.SIG_IGN)
        status, error = describe(caught)
        if not inline:
            last_words = error["traceback"] or f"{error['type']}: {error['message']}"
            print(f"{LAST_WORDS} {int(status)}\n{last_words}", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):  # if the disk is full, the launcher learns only the exit status of the process
        record["load"]["end"] = os.getloadavg()[0]
        write_json(record_file, {**record, "ended": time.time(), "exit_status": int(status), "error": error})
    if inline:
        # the earlier handler is restored, as the trainer's handler would ignore a SIGTERM between two cells
        signal.signal(signal.SIGTERM, before)
        return int(status)
    sys.stdout.flush()
    sys.stderr.flush()
    # exit without cleaning up: a destructor of NCCL or a data loader's thread could wait for ranks that have exited
    os._exit(status)


class Log(io.FileIO):
    """A rank's output stream. If the disk is full, output is lost and the run continues."""

    def write(self, data: Any) -> int:
        """Write the data. After an error, the returned number is the same as if all data had been written."""
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def own_process(log: Path) -> None:
    """Redirect this rank's output to its log, handle requests to stop, and let SIGQUIT print the stacks of all threads."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for target in (1, 2):
        os.dup2(descriptor, target)
    os.close(descriptor)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.BufferedWriter(Log(number, "w", closefd=False)), "utf-8", "backslashreplace", line_buffering=True
        )
        for number in (1, 2)
    )
    for number in STOPS:
        signal.signal(number, _stop_before_training)
    faulthandler.enable()
    faulthandler.register(signal.SIGQUIT, all_threads=True)


def _stop_before_training(number: int, frame: object) -> None:
    """Handle a stop signal before the trainer has installed its own handler. There is nothing to save yet."""
    raise Stopped("stopped before the first step")


def _train(folder: Path, attempt: Path, place: Place) -> None:
    """Wait for the files that the launcher writes, check the job and its files, set up this rank's world, and train."""
    directory, _ = group_at(folder)
    if place.job or place.torchrun:
        until_seen(layout.CONFIG.of(directory))
    if place.job:  # nobody has claimed the attempt if a user has started torchrun by hand
        until_seen(layout.CLAIM.of(attempt))
    async_tp = layout.CONFIG.read(directory).get("parallelism", {}).get("async_tp", False)
    set_environment(place.local_ranks, async_tp, place.local_rank)
    job = load_job(directory)
    if fault := edited_sources(job.train):
        raise fault.error
    replica, group = _group_of(job, place, folder)
    submission = _check_claim(attempt, place)
    remove_stopped(layout.ATTEMPT.of(folder, int(attempt.name) - 1), place.rank)
    if layout.RESULT.read(directory).get("status") == "done":
        return None  # SLURM may requeue a job whose run is done
    os.environ.update(
        RANK=str(group.rank),
        LOCAL_RANK=str(place.local_rank),
        WORLD_SIZE=str(group.ranks),
        LOCAL_WORLD_SIZE=str(place.local_ranks),
    )
    if place.rank == 0 and (faults := inputs.check_files({directory: job}, runs_of(job))):
        raise ConfigError("\n".join(map(str, faults)))
    home, attempt = (folder, attempt) if submission else folders_of(replica, directory, attempt)
    attempt.mkdir(parents=True, exist_ok=True)
    home.mkdir(parents=True, exist_ok=True)
    if place.rank == 0:
        print("loading torch", flush=True)  # importing torch takes seconds, and longer on a busy machine
    here = place.local_ranks >= group.ranks and (job.fault_tolerance.name == "off" or not submission)
    store = _rendezvous(
        layout.RENDEZVOUS.of(attempt), group, "127.0.0.1" if here else place.host or socket.gethostname()
    )

    run = Run(home, attempt, group.rank, place.local_rank, group.ranks, store, replica, submission)
    if job.comm.name == "fake":
        from titan_hydra.core.train import fake

        return fake.train_fake(job, run)
    import_trainer()
    from titan_hydra.core.train.loop import train

    if job.fault_tolerance.name == "off":
        return train(job, run)
    from titan_hydra.core.train.fault_tolerance import open_groups

    return train(job, run, open_groups)


def import_trainer() -> None:
    """Import the trainer, and the compiler, which torch's optimizers import at their first step. Imports leave no garbage,
    but searches for it would take a fifth of their time; later searches leave out what is imported.
    """
    # a later cell of cluster=inline: the earlier ones may have left garbage
    if "titan_hydra.core.train.loop" in sys.modules:
        return
    gc.disable()  # the loop collects at its own times
    for module in ("torch._dynamo", "titan_hydra.core.train.loop"):
        importlib.import_module(module)
    gc.freeze()


def remove_stopped(attempt: Path, rank: int) -> None:
    """Delete this rank's files in the previous attempt, if the rank stopped there on request. Otherwise 512 ranks with
    three files each would leave 150,000 files after a hundred requeues. The files of rank 0 and of failed ranks are
    kept.
    """
    if rank and layout.RANK.read(attempt, rank).get("exit_status") == Exit.REQUEUED:
        for entry in (layout.RANK, layout.LOG, layout.BEAT):
            with contextlib.suppress(OSError):
                entry.of(attempt, rank).unlink()


def set_environment(local_ranks: int, async_tp: bool, local_rank: int = 0) -> None:
    """Set environment variables that torch and other libraries read once in a process. This must happen before a user's
    module imports these libraries. A variable that is already set keeps its value.

    Expandable segments reduce the fragmentation of a GPU's memory. Async tensor parallelism runs without them, as its
    symmetric memory cannot be in such segments.
    """
    settings = {
        "OMP_NUM_THREADS": str(max(cores() // local_ranks, 1)),
        # With this value, an OpenMP thread that waits for others spins only briefly, then yields its core. With the
        # default it spins much longer, and a step took ten times as long on busy cores.
        "GOMP_SPINCOUNT": "20000",
        "RUST_LOG": "error",  # without this, torchft writes many lines in each step
        # cuBLAS reads this variable at the first matmul of a process. It is set for all runs, as with cluster=inline a
        # deterministic run may follow other runs in the same process. The value is torch's default on Hopper.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        # Where torch's compiler has Triton's kernels. Triton's own default is in the home folder, and on NFS its files
        # go stale under a rank that reads them.
        "TRITON_CACHE_DIR": f"{kernel_cache()}/triton/{local_rank}",
    }
    if not (async_tp or "PYTORCH_CUDA_ALLOC_CONF" in os.environ):  # the name that this variable had before torch 2.9
        settings["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def kernel_cache() -> str:
    """Return the folder in which torch's compiler keeps its kernels: by default one on the node."""
    try:
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, ImportError, OSError):  # a container may not know the name of the user
        user = f"uid_{os.getuid()}"
    return os.environ.get("TORCHINDUCTOR_CACHE_DIR") or f"{tempfile.gettempdir()}/torchinductor_{user}"


def _group_of(job: Job, place: Place, folder: Path) -> tuple[int, Place]:
    """Return the index of a rank's replica group (which may be a separate job), and the rank's place in this group.
    Raises ConfigError if the number of started ranks is not the number that the job needs.
    """
    directory, replica = group_at(folder)
    size = processes(job) // job.fault_tolerance.replicas
    ranks = size if place.job else processes(job)
    if place.ranks != ranks:
        raise ConfigError(f"{directory.name} needs {ranks} ranks, and {place.ranks} were started")
    if job.fault_tolerance.name != "off" and place.torchrun and "MASTER_PORT" in os.environ:
        raise ConfigError(
            "replica groups cannot be started by one torchrun, which ends all ranks when one dies; launch.py starts them"
        )
    if place.job:
        return replica, place
    return place.rank // size, replace(place, rank=place.rank % size, ranks=size)


def _check_claim(attempt: Path, place: Place) -> str:
    """Return the token of the submission; "" if there is none. Raises ConfigError if there is a newer attempt, if the
    attempt belongs to another job, or if the present code is not the code that was submitted.
    """
    newest = newest_attempt(attempt.parents[1])
    if newest > int(attempt.name):
        raise ConfigError(
            f"{attempt.parents[1].name}: attempt {attempt.name} is not the newest any more; attempt {newest} has taken over"
        )
    owner = layout.CLAIM.read(attempt)
    if place.job and owner.get("job_id") not in (None, place.job):
        raise ConfigError(
            f"{attempt.parents[1].name}: attempt {attempt.name} is that of job {owner['job_id']}, and this is {place.job}"
        )
    submitted = owner.get("code")
    if submitted and place.local_rank == 0:
        from titan_hydra.core.job.run.code import ROOT, code_in

        code = digest_of_code(code_in(ROOT))
        if code != submitted and ROOT.name != submitted:
            raise ConfigError(
                f"titan_hydra is imported from {ROOT}, and not from the copy {submitted} that was submitted: a line of "
                "cluster.setup or the site's own setup has replaced PYTHONPATH; add to it, as PYTHONPATH=$PYTHONPATH:FOLDER"
            )
        if code != submitted:
            raise ConfigError(f"{ROOT}: the code is {code}, but {submitted} was submitted: it has changed since")
    return owner.get("token", "")


def _rendezvous(file: Path, place: Place, host: str) -> Store:
    """Return the store that all ranks share, and set MASTER_ADDR and MASTER_PORT. Rank 0 opens the store at a free port
    and writes `host` and the port to `file`; the other ranks read them there.

    Under torchrun, return torchrun's own store. Raises NoRendezvous if rank 0 does not start.
    """
    from datetime import timedelta

    from torch import distributed

    from titan_hydra.core.train.world import open_store

    limit = timedelta(seconds=START_LIMIT)
    if place.torchrun and "MASTER_PORT" in os.environ:
        return next(distributed.rendezvous("env://", place.rank, place.ranks, timeout=limit))[0]
    if place.rank == 0:
        store = open_store(host, place.ranks, limit)
        write_text(file, f"{host} {store.port}\n")
        port = store.port
    else:
        if not _appears(file, START_LIMIT):
            raise NoRendezvous(f"rank 0 did not start within {START_LIMIT} s: see its log")
        host, port = file.read_text().split()
        store = distributed.TCPStore(
            host, int(port), place.ranks, is_master=False, wait_for_workers=False, timeout=limit
        )
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    return store


class NoRendezvous(RunError):
    """The error of a rank for which rank 0 did not start in time."""

    status = Exit.HANG


def until_seen(file: Path, seconds: int = LATE) -> None:
    """Wait for a file that was written before this rank was started. On a network file system, another host may see a
    file late.

    Raises Unhealthy after `seconds`: then this host's access to the file system has a fault.
    """
    if not _appears(file, seconds):
        raise Unhealthy(
            f"{socket.gethostname()}: {file} cannot be seen here after {seconds} s; is its file system mounted?"
        )


def _appears(file: Path, seconds: float) -> bool:
    """Whether a file exists now, or appears within `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(FileNotFoundError):
            # An NFS client caches for a long time that a file was absent; listing the folder asks the server again.
            if file.name in os.listdir(file.parent):
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)


def main(arguments: list[str]) -> int:
    """Run one rank. The arguments are DIRECTORY [ATTEMPT]; the default of ATTEMPT is the newest attempt, or 1 if there
    is none.
    """
    if len(arguments) not in (1, 2) or not Path(arguments[0]).is_dir():
        print("python -m titan_hydra.core.train.worker RUN_DIRECTORY [ATTEMPT]", file=sys.stderr)
        return Exit.CONFIG
    attempt = int(arguments[1]) if len(arguments) == 2 else newest_attempt(Path(arguments[0])) or 1
    return run_rank(arguments[0], attempt, Place.of(TORCHRUN, torchrun=True) if "RANK" in os.environ else ALONE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
