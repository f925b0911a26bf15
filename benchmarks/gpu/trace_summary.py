"""Summarize how the time in a trace of torch's profiler was spent, without importing torch: python
benchmarks/gpu/trace_summary.py trace_0.json.gz

Every moment counts once, for the first of the classes below that is active. So the shares add up to 100 %, and time in
which communication overlaps with computation counts as computation. On a GPU kernels are counted, on a CPU the
operators of the training thread.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

CLASSES = ("optimizer", "attention", "matmul", "loss", "casts", "other", "communication", "idle")
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
NAMES = (  # the first that matches a name counts; operators are called aten::..., all others are kernels or ranges
    ("communication", r"nccl|gloo:|c10d|symm_mem|record_param_comms"),
    ("loss", r"soft_?max|nll_loss|cross_entropy|logsumexp|^_(sums|slopes)$"),  # the last two: of loss.chunk_tokens
    # kernels of precision.kernels=fused
    (
        "casts",
        r"titan_hydra::float8|^_(rows|columns|maxima|parts|gated_maxima|gated_backward)$",
    ),
    ("casts", r"triton.*(amax|clamp)|aten::(copy_|cat|clone)$|copy_kernel|memcpy|memset|CatArray|chunk_cat"),
    ("other", r"^triton_"),  # names of the compiler's kernels contain the names of all operators that they fuse
    ("optimizer", r"Optimizer\.step|adam|multi_tensor_apply|_foreach_|_fused_"),
    ("attention", r"attention|flash|fmha|sdpa|_sdp"),
    ("matmul", r"aten::(mm|addmm|bmm|baddbmm|_scaled_mm|_grouped_mm)$|gemm|cublas|cutlass|nvjet|xmma"),
)
TOP = 15  # number of names that are shown


@dataclass(frozen=True)
class Work:
    """An activity from its begin to its end, in microseconds."""

    begin: float
    end: float
    kind: str
    name: str


@dataclass(frozen=True)
class Summary:
    steps: int
    seconds: float  # of all recorded steps
    shares: dict[str, float]  # by class, as shares of the whole time
    communication: float  # share of the time in which messages were sent, overlapped or not
    top: list[tuple[str, float, int]]  # name, seconds, number of calls
    device: str


def main(arguments: list[str]) -> None:
    """Print the summary of a trace."""
    trace = Path(arguments[0])
    with gzip.open(trace, "rt") if trace.suffix == ".gz" else trace.open() as file:
        print(text(summarize(json.load(file)["traceEvents"])), end="")


def kind_of(name: str) -> str:
    """Return the class of an operator, kernel or range by its name."""
    return next((kind for kind, pattern in NAMES if re.search(pattern, name, re.I)), "other")


def summarize(events: list[dict]) -> Summary:
    """Summarize the time of the recorded steps. Raises ValueError for a trace without steps."""
    events = [event for event in events if event.get("ph") == "X" and "dur" in event]
    steps = [
        event for event in events if event["name"].startswith("ProfilerStep#") and event.get("cat") == "user_annotation"
    ]
    if not steps:
        raise ValueError("no ProfilerStep in this trace")
    begin, end = min(event["ts"] for event in steps), max(event["ts"] + event["dur"] for event in steps)
    kernels = [event for event in events if event.get("cat") in KERNELS and begin <= event["ts"]]
    if kernels:
        works = [_work(event) for event in kernels]
        end = max(end, max(work.end for work in works))  # the device may end later than the thread
        top = _totals(((work.name, work.end - work.begin) for work in works), Counter(work.name for work in works))
    else:
        thread = steps[0]["tid"]
        own = [
            event
            for event in events
            if event["tid"] == thread and (event.get("cat") == "cpu_op" or event["name"].startswith("Optimizer.step"))
        ]
        others = [event for event in events if event["tid"] != thread and kind_of(event["name"]) == "communication"]
        works = list(_innermost(sorted(map(_work, own), key=lambda work: (work.begin, -work.end))))
        top = _totals(((work.name, work.end - work.begin) for work in works), Counter(event["name"] for event in own))
        works += map(_work, others)
    times, communication = _shared_out(works, begin, end)
    return Summary(
        len(steps),
        (end - begin) / 1e6,
        {kind: times[kind] / (end - begin) for kind in CLASSES},
        communication / (end - begin),
        top,
        "GPU" if kernels else "CPU",
    )


def text(summary: Summary) -> str:
    """Format the summary."""
    what = "kernels" if summary.device == "GPU" else "operators, without those they call"
    hidden = summary.communication - summary.shares["communication"]
    lines = [
        f"{summary.steps} steps, {1000 * summary.seconds / summary.steps:.1f} ms each, by the time of the {summary.device}",
        "",
    ]
    for kind in CLASSES:
        note = f"   and {hidden:.1%} more behind computation" if kind == "communication" and hidden > 0.0005 else ""
        lines.append(f"{kind:<14}{summary.shares[kind]:>7.1%}{note}")
    lines += ["", f"{'ms a step':>10}{'share':>8}{'calls':>7}  {what}"]
    for name, seconds, calls in summary.top[:TOP]:
        lines.append(
            f"{1000 * seconds / summary.steps:>10.2f}{seconds / summary.seconds:>8.1%}{calls / summary.steps:>7.0f}  {name[:100]}"
        )
    return "\n".join(lines) + "\n"


def _work(event: dict) -> Work:
    return Work(event["ts"], event["ts"] + event["dur"], kind_of(event["name"]), event["name"])


def _shared_out(works: list[Work], begin: float, end: float) -> tuple[dict[str, float], float]:
    """Return microseconds by class, each moment assigned to the first active class, and the total time in which
    communication was active.
    """
    changes = sorted(
        [(min(max(work.begin, begin), end), 1, work.kind) for work in works]
        + [(min(max(work.end, begin), end), -1, work.kind) for work in works]
    )
    active, times, communication, last = Counter(), defaultdict(float), 0.0, begin
    for moment, change, kind in [*changes, (end, 0, "idle")]:
        busy = next((one for one in CLASSES if active[one]), "idle")
        times[busy] += moment - last
        communication += (moment - last) * bool(active["communication"])
        active[kind] += change
        last = moment
    return times, communication


def _innermost(works: list[Work]) -> Iterator[Work]:
    """Yield the time that a thread's operators spend themselves, without the operators they call. `works` is sorted by
    begin, callers first.

    An operator without a class gets the class of its caller; whatever the optimizer or attention calls gets their
    class.
    """
    stack: list[Work] = []  # callers; `begin` is the start of the time not yet yielded

    def close(until: float) -> Iterator[Work]:
        while stack and stack[-1].end <= until:
            done = stack.pop()
            yield done
            if stack:
                stack[-1] = replace(stack[-1], begin=done.end)

    for work in works:
        yield from close(work.begin)
        kind = work.kind
        if stack:
            caller = stack[-1]
            yield replace(caller, end=work.begin)
            kind = caller.kind if kind == "other" or caller.kind in ("optimizer", "attention") else kind
        stack.append(replace(work, kind=kind))
    yield from close(math.inf)


def _totals(times: Iterable[tuple[str, float]], calls: Counter[str]) -> list[tuple[str, float, int]]:
    """Return seconds and calls by name, the longest first."""
    seconds: Counter[str] = Counter()
    for name, time in times:
        seconds[name] += time / 1e6
    return [(name, time, calls[name]) for name, time in seconds.most_common()]


if __name__ == "__main__":
    main(sys.argv[1:])
