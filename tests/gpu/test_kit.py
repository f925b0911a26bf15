"""Test the GPU kit on a CPU: a failing case stops no other case, and cases and lists name things that exist. The whole
dry run is slow.
"""

import contextlib
import inspect
import json
import os
import re
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))

import gpu_cases
import gpu_checks
import gpu_pool
import gpu_rank
from torch.utils._python_dispatch import TorchDispatchMode

from titan_hydra.core import models
from titan_hydra.core.job.run.run import Run
from titan_hydra.core.train.observe import memory
from titan_hydra.instruments.verify import verify

ROOT = Path(__file__).parents[2]


def dry_run(out, *arguments):
    """Return exit status and rows of tests/gpu/run.py on a CPU."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/gpu/run.py"), "--device", "cpu", "--dry-run", "--out", str(out), *arguments],
        capture_output=True,
        text=True,
    )
    header, *rows = map(json.loads, (out / "tests.jsonl").read_text().splitlines())
    assert header["torch"] and header["device"]
    return done.returncode, {row["name"]: row for row in rows}, done.stdout


def test_a_case_that_raises_dies_or_hangs_costs_itself(tmp_path):
    status, rows, said = dry_run(tmp_path, "--faults")
    assert status == 1 and {name: row["status"] for name, row in rows.items()} == {
        "well before": "passed",
        "hangs": "hung",
        "raises": "failed",
        "well after": "passed",
        "a rank is killed": "crashed",
    }
    assert rows["raises"]["error"].endswith("ValueError: planted")
    assert "in hangs" in rows["hangs"]["error"] and "rank 1 was killed by signal 9" in rows["a rank is killed"]["error"]
    assert "=== a rank is killed, rank 1" in (tmp_path / "tests.log").read_text() and "2 passed" in said


def test_a_run_that_is_killed_keeps_its_rows_and_leaves_no_process(tmp_path):
    command = [sys.executable, str(ROOT / "tests/gpu/run.py"), "--device", "cpu", "--faults", "--out", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"TMPDIR": str(tmp_path)}) as process:
        try:
            assert eventually(lambda: '"well before"' in (tmp_path / "tests.jsonl").read_text()) and left_in(tmp_path)
        finally:
            process.kill()
    assert json.loads((tmp_path / "tests.jsonl").read_text().splitlines()[1])["name"] == "well before"
    assert eventually(lambda: not left_in(tmp_path)), "a rank that hangs outlived run.py, and would hold the GPU"


def eventually(true):
    """Return whether a condition becomes true within five minutes; the machine may be busy."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            if true():
                return True
        time.sleep(0.1)
    return False


def left_in(folder):
    """Return the processes that run gpu_rank.py for a folder."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = file.read_bytes().split(b"\0")
            found += (
                [words]
                if any(word.endswith(b"gpu_rank.py") for word in words) and str(folder).encode() in b" ".join(words)
                else []
            )
    return found


def test_rings_run_in_processes_of_their_own(tmp_path, monkeypatch):
    """A ring runs in processes of its own, as torch keeps its options, and cuDNN's graphs, for the whole process."""
    sets, in_world = [], {case.name: case.world for case in gpu_cases.CASES}

    class Noted:
        def __init__(self, folder, ranks, world, names, *_):
            sets.append((ranks, names))
            assert all(name.startswith("reference of ") or in_world[name] == world for name in names)

        def run(self, limits, until):
            return [gpu_pool.Row(name, 1, "passed") for name in sets[-1][1]]

    monkeypatch.setattr(gpu_pool, "Processes", Noted)
    found = list(gpu_pool.rows(gpu_cases.CASES, tmp_path, gpu=True, dry=False, seconds=1000))
    assert sorted(row.name for row in found) == sorted(case.name for case in gpu_cases.CASES)
    rings = [case for case in gpu_cases.CASES if "parallelism.cp_rotate=all" in str(case.options)]
    assert len(rings) >= 5 and all((case.ranks, [case.name]) in sets for case in rings)
    assert len(sets) < len(gpu_cases.CASES) / 4


def test_the_lines_that_hold_memory_are_those_that_the_kit_looks_for(tmp_path, monkeypatch):
    """`out_of_memory` can only run on a card. Here the frames of a forward replace those that the allocator records."""
    blocks = []

    class Allocations(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), kwargs=None):
            frames = [
                {"filename": frame.filename, "line": frame.lineno, "name": frame.name}
                for frame in traceback.extract_stack()[-2::-1]
            ]
            blocks.append({"state": "active_allocated", "size": 2**30, "frames": frames})
            return function(*arguments, **(kwargs or {}))

    job = gpu_checks.Here(tmp_path, gpu=False, dry=True, rank=0, ranks=1).job()
    model = models.build(job.model, 64)
    with Allocations():
        model(torch.zeros(1, 64, dtype=torch.int64))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_summary", str)
    monkeypatch.setattr(memory, "memory_snapshot", lambda: {"segments": [{"blocks": blocks}]})
    (tmp_path / "attempts/1").mkdir(parents=True)
    memory.explain_out_of_memory(Run(tmp_path, tmp_path / "attempts/1"), torch.OutOfMemoryError("planted"))
    gpu_checks.names_lines_of_layers(tmp_path)


def test_cases_that_had_no_time_are_rows_too(tmp_path):
    found = list(gpu_pool.rows(gpu_cases.CASES, tmp_path, gpu=True, dry=True, seconds=-1))
    assert sorted(row.name for row in found) == sorted(case.name for case in gpu_cases.CASES)
    assert {row.status for row in found} == {"not run"} and not list(tmp_path.iterdir())


def test_three_equal_errors_in_a_row_end_a_kind_of_set(tmp_path, monkeypatch):
    """A fault of NCCL costs the starts of three sets. Other kinds, other errors, and errors after a case that passes
    cost only themselves.
    """
    started = []

    class Failing:
        def __init__(self, folder, ranks, world, names, *_):
            self.names, self.ranks = names, ranks
            started.append((ranks, names[0]))

        def run(self, limits, until):
            name = self.names[0]
            error = f"at 0x{len(started):x} in {tmp_path}/set_{len(started)}/plan.json"
            if self.ranks == 2:
                yield gpu_pool.Row(name, 2, "crashed", error=f"{name}\nNCCL is broken: {error}")
            elif self.ranks == 4:
                yield gpu_pool.Row(name, 4, "failed", error=f"off by {len(started)}")
            else:
                yield from (gpu_pool.Row(name, 1, "passed") for name in self.names)

    monkeypatch.setattr(gpu_pool, "Processes", Failing)
    cases = [case for case in gpu_cases.CASES if case.world]
    found = list(gpu_pool.rows(cases, tmp_path, gpu=True, dry=False, seconds=1000))
    assert sorted(row.name for row in found) == sorted(case.name for case in cases)
    two, four = ([row for row in found if row.ranks == ranks] for ranks in (2, 4))
    assert [row.status for row in two] == ["crashed"] * 3 + ["not run"] * (len(two) - 3) and "NCCL is broken" in two[
        3
    ].error
    assert {row.status for row in four} == {"failed"} and sum(ranks == 2 for ranks, _ in started) == 3
    assert all(row.status == "passed" for row in found if row.ranks == 1)


def test_references_run_before_the_layouts_that_need_them():
    known = set()
    for ranks, world, names in gpu_pool.sets(gpu_cases.CASES):
        known |= {name for name in names if name.startswith("reference of ")}
        assert not known & {*names} or (ranks, world) == (1, True)
        for case in (case for case in gpu_cases.CASES if case.name in names and "layout" in case.options):
            bases = {base_of_reference(name) for name in known}
            assert gpu_cases.base_of(case.options["layout"]) in bases, case.name
    assert len(known) == len(bases)


def base_of_reference(name):
    """Return what a reference has in common with its layouts."""
    (case,) = [case for case in gpu_cases.CASES if f"reference of {case.name}" == name]
    return gpu_cases.base_of(case.options["layout"])


def test_shards_run_side_by_side_and_what_needs_the_device_runs_last(tmp_path):
    """Failed cases of a dry run are repeated by their exact names, and nothing else is."""
    status, rows, said = dry_run(
        tmp_path, "--shards", "--only", "random generators", "fsdp 2, documents", "compile, ac lean"
    )
    assert status == 0 and len(rows) >= 3 and {row["status"] for row in rows.values()} == {"passed"}, said
    assert {case.shard for case in gpu_cases.CASES if case.name in rows} == {
        "one process of 1",
        "one process of 1, compiled",
        "layouts of 2",
        "runs of 2",
    }
    failed = tmp_path / "failed.jsonl"
    header, *found = (tmp_path / "tests.jsonl").read_text().splitlines()
    found[0] = json.dumps(json.loads(found[0]) | {"status": "hung"})
    failed.write_text("\n".join([header, *found]))
    status, again, _ = dry_run(tmp_path, "--shards", "--again", str(failed))
    assert status == 0 and list(again) == [json.loads(found[0])["name"]]


def test_every_case_names_a_check_and_its_options():
    names = [(case.name, case.ranks) for case in gpu_cases.CASES]
    assert len(set(names)) == len(names)
    for case in [*gpu_cases.CASES, *gpu_cases.FAULTS]:
        inspect.signature(gpu_rank.check_of(case.check, case.world)).bind(None, **case.options)


def test_every_layout_of_its_own_is_legal(quickly, user_modules):
    layouts = {
        case.options["layout"]: case
        for case in gpu_cases.CASES
        if case.name not in gpu_cases.SHORT and case.check == "agrees"
    }
    for layout, case in layouts.items():
        assert verify.job_of(layout).gpus == layout.ranks == case.ranks
    for layout in {layout.base: layout for layout in layouts}.values():
        assert verify.reference_of(layout).gpus == 1


@pytest.mark.parametrize(("gpu", "dry"), [(True, False), (False, True)])
def test_every_run_is_legal(gpu, dry, quickly):
    able = [
        case
        for case in gpu_cases.CASES
        if "overrides" in case.options and (gpu or not case.gpu) and case.check != "refuses"
    ]
    runs = {(case.ranks, *case.options["overrides"]) for case in able} | {
        (1, *(case.options.get("like") or ())) for case in able
    }
    # without a GPU, runs of one rank that name no model are left out: a dry run makes them smaller
    for ranks, *words in runs if gpu else [words for words in runs if "model" in str(words) or words[0] > 1]:
        job = gpu_checks.Here(Path("."), gpu, dry, 0, ranks).job(*words)
        assert job.gpus == ranks and (job.precision.compute_dtype == "bfloat16" or "precision=fp32" in words)


def test_the_readme_names_what_exists():
    """The README names files that exist, and after each file only names that this file defines."""
    folder, file = ROOT / "titan_hydra", Path()
    for row in (ROOT / "tests/gpu/README.md").read_text().splitlines():
        for name in re.findall(r"`([^`]+)`", row.split("|")[1]) if row.startswith("| `") else []:
            if "/" in name:
                folder = (ROOT / "titan_hydra" / name).parent
            if "/" in name or name.endswith(".py"):
                file = folder / Path(name).name
                assert file.exists(), row
            elif file.is_file() and name.isidentifier():
                assert re.search(rf"^ *(def|class) {name}\b", file.read_text(), re.M), row


@pytest.mark.slow
def test_the_whole_dry_run_passes(tmp_path):
    status, rows, said = dry_run(tmp_path, "--seconds", "3000")
    assert status == 0 and {row["status"] for row in rows.values()} == {"passed", "skipped"}, said
