"""Run cases of a copy of the package: `python -m tests.equivalence.mutants.server`, started in the copy.

The server imports the libraries once, but nothing of the package. Each request runs in a fork, which imports the copy
of the package in its present state. A request is a line of JSON on the standard input, the answer a line on the
standard output.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

LIBRARIES = (
    "hydra",
    "numpy",
    "omegaconf",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torchao.float8",
)


def main() -> None:
    """Answer requests until the input ends."""
    for name in LIBRARIES:
        importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run a request in a fork, and return its answer. A fork that needs more than `seconds` is ended together with its
    ranks. Otherwise, if one rank did not enter a collective, the ranks that have entered it would wait for minutes. They
    also end if the process that started this server has ended.
    """
    out, caller = Path(request["out"]), os.getppid()
    out.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        os.setsid()  # makes a process group of this fork and its ranks, which are ended together
        os.dup2(2, 1)
        _write(out, request)
        os._exit(0)
    deadline = time.monotonic() + request["seconds"]
    while not (ended := os.waitpid(child, os.WNOHANG)[0]) and time.monotonic() < deadline and os.getppid() == caller:
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
        return {"error": f"no end after {request['seconds']} s"}
    return json.loads(out.read_text()) if out.exists() else {"error": "the process was killed"}


def _write(out: Path, request: dict[str, Any]) -> None:
    """Run the cases of a request, and write their outcomes or the exception."""
    try:
        from titan_hydra.instruments.verify import processes
        from titan_hydra.instruments.verify.matrix import whole_matrix
        from titan_hydra.instruments.verify.verify import verify

        # forking is fast and safe: this process has no threads and has imported the libraries
        processes.START_METHOD = "fork"
        cases = {case.name: case for case in whole_matrix()}
        outcomes = verify([cases[name] for name in request["cases"]], request["steps"], bands_of_failed=False)
        found = {
            "outcomes": [
                {
                    "case": one.case.name,
                    "passed": one.passed,
                    "times": one.times,
                    "counts": one.counts,
                    "error": one.error,
                }
                for one in outcomes
            ]
        }
    except BaseException as error:
        traceback.print_exc()
        found = {
            "error": f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"
        }
    out.with_suffix(".part").write_text(json.dumps(found))
    out.with_suffix(".part").rename(out)


if __name__ == "__main__":
    main()
