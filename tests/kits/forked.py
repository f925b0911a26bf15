"""Run launch.py and titan in processes that are forked from a server, which has imported torch, Hydra and the package:
to import them takes two thirds of the time of a short run.

The server is multiprocessing's, which the ranks of `titan verify` use too. It runs no test's code, and each process
gets its own environment, folder, session and output, so nothing passes from one to another.
"""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Variables that Python or libraries read when they are started or imported.
AT_START = ("PYTHON", "LC_", "LANG", "OMP_", "TORCH", "CUDA", "LD_")
# modules that are imported once, in the fork server
PRELOADED = [
    "titan_hydra.core.train.loop",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
]
PROGRAMS = ["titan_hydra.experiments.launch.main", "titan_hydra.cli"]


def can_run(environment: Mapping[str, str]) -> bool:
    """Whether a fork is like a new process in this environment: no variable differs that was read at the server's start."""
    names = {name for name in {*environment, *os.environ} if name.startswith(AT_START)}
    return all(environment.get(name) == os.environ.get(name) for name in names)


def run(
    program: str, words: Sequence[str], folder: Path, environment: Mapping[str, str], timeout: float = 300
) -> subprocess.CompletedProcess:
    """Run "launch.py" or "titan" with these words to its end, as subprocess.run does."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([*PRELOADED, *PROGRAMS])
    with tempfile.TemporaryDirectory() as output:
        given = (program, list(words), str(folder), dict(environment), output)
        process = server.Process(target=_main, args=given)
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
            raise subprocess.TimeoutExpired([program, *words], timeout)
        out, err = (Path(output, name).read_text() for name in ("out", "err"))
    return subprocess.CompletedProcess([program, *words], process.exitcode, out, err)


def _main(program: str, words: list[str], folder: str, environment: dict[str, str], output: str) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method(None, force=True)  # a new process has chosen none
    # what the server has from its parent may have a test's folders
    own = [place for place in sys.path if place.startswith((sys.prefix, sys.base_prefix))]
    sys.path[:] = [str(ROOT) if program == "launch.py" else folder, *own]
    for number, name in ((1, "out"), (2, "err")):
        descriptor = os.open(f"{output}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    try:
        if program == "launch.py":
            from titan_hydra.experiments.launch.main import launch_script

            sys.argv = [str(ROOT / program), *words]
            status = launch_script(sys.argv[0])
        else:
            from titan_hydra.cli import main

            sys.argv = [program, *words]
            status = main()
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        traceback.print_exc()
        status = 1
    if isinstance(status, str):
        print(status, file=sys.stderr)
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):
            stream.flush()
    os._exit(status or 0)
