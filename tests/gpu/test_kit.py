"""Test the GPU kit on a CPU: a failing case stops no other case, and cases and lists name things that exist. The whole
dry run is slow.
"""

import contextlib
import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
import time
import traceback
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest
import torch
import yaml

sys.path.append(str(Path(__file__).parent))

import gpu_cases
import gpu_checks
import gpu_pool
import gpu_rank
from hydra._internal.config_repository import ConfigRepository
from hydra.plugins.sweeper import Sweeper
from torch.utils._python_dispatch import TorchDispatchMode

from titan_hydra import models
from titan_hydra.config.compose import compose_job, compose_unchecked
from titan_hydra.job.freeze import freeze
from titan_hydra.observe import memory
from titan_hydra.plan.published import rows_of, score
from titan_hydra.plan.time import speed
from titan_hydra.runs.run import Run
from titan_hydra.verify import verify

ROOT = Path(__file__).parents[2]
LISTS = sorted(file.stem for file in (ROOT / "benchmarks/gpu/lists").glob("*.yaml"))


def program(name):
    """Import a program of benchmarks/gpu as a module."""
    loader = SourceFileLoader(f"gpu_{name.partition('.')[0]}", str(ROOT / "benchmarks/gpu" / name))
    module = sys.modules[loader.name] = module_from_spec(spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bench():
    return program("run.py")


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


@pytest.fixture
def quickly(monkeypatch):
    """Let Hydra read each file only once."""
    monkeypatch.setattr(ConfigRepository, "load_config", ConfigRepository.load_config)
    monkeypatch.setattr(Sweeper, "validate_batch_is_legal", Sweeper.validate_batch_is_legal)


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
    sets = []

    class Noted:
        def __init__(self, folder, ranks, world, names, *_):
            sets.append((ranks, names))

        def run(self, limits, until):
            return [gpu_pool.Row(name, 1, "passed") for name in sets[-1][1]]

    monkeypatch.setattr(gpu_pool, "Processes", Noted)
    found = list(gpu_pool.rows(gpu_cases.CASES, tmp_path, gpu=True, dry=False, seconds=1000))
    assert sorted(row.name for row in found) == sorted(case.name for case in gpu_cases.CASES)
    rings = [case for case in gpu_cases.CASES if "parallelism.cp_rotate=all" in str(case.options)]
    assert len(rings) >= 6 and all((case.ranks, [case.name]) in sets for case in rings)
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


@pytest.mark.parametrize("name", LISTS)
def test_every_row_of_a_list_is_legal(name, bench, quickly):
    rows = bench.read(name, {"cpu": False})
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        if row.tool == "titan_hydra":
            job = compose_job(*bench.overrides(row), "cluster=slurm")  # a cluster's memory is not that of this machine
            assert (job.model.dim, job.model.n_layers, job.data.seq_len) == (
                *row.dimensions[:2],
                row.seq_len,
            ) and row.against
        else:
            assert (
                row.tool == "torchtitan"
                and row.ac in ("none", "full", "op", "layer", "memory_budget")
                and not row.overrides
            )
        assert bench.tiny(row).dimensions[1] == 2


def test_a_list_that_cannot_be_read_is_one_line(bench, tmp_path, capsys):
    unknown = "shape: 8b\nseq_len: 1\nbatch: 1\nrows: [{tool: x, name: y, against: z}]"
    for text in ("rows: [{tool: titan_hydra, nmae: x}]", "rows: 3", "[", unknown):
        (tmp_path / "list.yaml").write_text(text)
        with pytest.raises(SystemExit) as ended:
            bench.read(str(tmp_path / "list.yaml"), {})
        error = capsys.readouterr().err
        assert ended.value.code == 2 and "cannot be read as a list of rows" in error and "8b_block" in error


@pytest.mark.slow
def test_a_row_that_crashes_or_hangs_costs_itself(bench, tmp_path):
    (tmp_path / "aborts.py").write_text("import os\nos.abort()\n")
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(1000)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    fine = bench.tiny(bench.Row("fine", "titan_hydra", "debug", 64, 2, compile=False, cpu=True, against="first"))
    crash, hang = (
        dataclasses.replace(fine, name=name, overrides=(f"train.imports=[{name}]",)) for name in ("aborts", "sleeps")
    )
    log = tmp_path / "rows.log"
    found = [bench.measure(crash, 100, environment, log), bench.measure(hang, 6, environment, log)]
    assert [row["status"] for row in found] == ["crashed", "hung"] and "error" in found[0]
    first = dataclasses.replace(fine, name="first")
    (done,) = bench.results([fine], time.monotonic() + 100, 100, environment, 1e12, tmp_path)
    (missing,) = bench.results([first], time.monotonic() + 10, 100, environment, 1e12, tmp_path)
    assert done["status"] == "done" and 0 < done["mfu"] < 1 and done["ratio"] is None and done["tokens_per_second"] > 0
    assert missing["status"] == "not run"
    assert all(name in log.read_text() for name in ("aborts", "sleeps", "fine"))
    assert bench.line(found[1]).endswith("hung") and f"{done['tokens_per_second']:,.0f}" in bench.line(done)


@pytest.mark.parametrize(
    ("device", "cpu", "tool"), [("AMD EPYC", True, "titan_hydra"), ("NVIDIA H100 80GB HBM3", False, "torchtitan")]
)
def test_a_measured_row_is_one_that_the_score_reads(bench, tmp_path, device, cpu, tool):
    row = bench.tiny(bench.Row("one", tool, "debug", 64, 2, ac="op", cpu=cpu))
    found = {"tokens_per_second": 1000.0, "reserved_gib": None if cpu else 1.5}
    written = bench.as_published(row, found, {"device": device, "commit": "abc"})
    (tmp_path / "rows.yaml").write_text(yaml.safe_dump([written]))
    (read,) = rows_of(tmp_path / "rows.yaml")
    scored = score(read)
    job = freeze(compose_unchecked(*bench.overrides(row), f"hardware={'cpu' if cpu else 'h100'}"))
    assert (
        scored.speed == (1000.0, pytest.approx(speed(job).tokens_per_second))
        and read["source"] == f"{'pytorch/' * (not cpu)}{tool}, benchmarks/gpu, abc"
    )
    assert scored.memory is None if cpu else scored.memory[0] == 1.5


def test_a_row_that_cannot_be_read_or_published_stops_no_row(bench, tmp_path, monkeypatch, capsys):
    """The three rows run; the results of the first cannot be read, and the second cannot be published."""
    published = bench.as_published

    def failing(row, *arguments):
        if row.name == "ours 2":
            raise ModuleNotFoundError("No module named 'planted'")
        return published(row, *arguments)

    def read(row, *_):
        if row.name == "ours 1":
            raise StopIteration
        return {"status": "done", "tokens_per_second": 1.0, "slowest": 1.0, "fastest": 1.0, "active_gib": None} | {
            "reserved_gib": None, "first_step_seconds": 1.0, "flops_per_token": 1, "first_loss": 1.0, "last_loss": 1.0
        }  # fmt: skip

    monkeypatch.setattr(bench, "card", lambda _: ({"device": "cpu", "commit": "abc"}, dict(os.environ)))
    monkeypatch.setattr(bench, "as_published", failing)
    monkeypatch.setattr(bench, "measured", read)
    monkeypatch.setattr(bench, "command", lambda *_: [sys.executable, "-c", ""])
    words = ["pairs", "--only", "ours", "--device", "cpu", "--dry-run", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    assert bench.main() == 1
    _, *rows = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert [row["status"] for row in rows] == ["failed", "done", "done"] and "StopIteration" in rows[0]["error"]
    (written,) = yaml.safe_load((tmp_path / "rows.yaml").read_text())
    assert "ours 3" in str(written)
    assert "No module named 'planted'" in capsys.readouterr().out


def test_the_command_is_short_enough_for_every_part():
    carry = program("carry")
    words = carry.command(".gpu", ["tests", *LISTS, "profile=8b_block"], "--device cpu --dry-run")
    assert len(words) <= 2000 and words.count("--seconds") == len(LISTS) + 2


# the only packages besides those of the project that the device machine has
BARE = "torch numpy triton filelock fsspec jinja2 markupsafe mpmath networkx setuptools sympy typing-extensions"
ALONE = """
import sys
from importlib.machinery import PathFinder
from importlib.metadata import packages_distributions

owners = packages_distributions()

class Carried:
    def find_spec(self, name, path=None, target=None):
        here = {{owner.lower().replace("_", "-") for owner in owners.get(name.partition(".")[0], ())}}
        return None if here and not here & {carried} else PathFinder.find_spec(name, path, target)

sys.meta_path = [Carried() if finder is PathFinder else finder for finder in sys.meta_path]
import titan_hydra.launch.main, titan_hydra.launch.worker, titan_hydra.train.loop, titan_hydra.verify.verify
import titan_hydra.checkpoint.convert, titan_hydra.train.generate, titan_hydra.recipes.flux.sample, titan_hydra.train.score
"""


def test_what_a_rank_imports_is_carried():
    carry = program("carry")
    wheels = (wheel.partition("==")[0].lower().replace("_", "-") for wheel in (*carry.WHEELS, carry.BUILT))
    carried = {"titan-hydra", *BARE.split(), *wheels}
    subprocess.run([sys.executable, "-c", ALONE.format(carried=carried)], check=True, cwd=ROOT)
