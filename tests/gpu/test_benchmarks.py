"""The programs of benchmarks/gpu: their lists, their results, and what `carry` brings to a machine."""

import dataclasses
import json
import os
import shlex
import subprocess
import sys
import time
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest
import yaml

from titan_hydra.core.job.freeze import freeze
from titan_hydra.experiments.compose.compose import compose_job, compose_unchecked
from titan_hydra.experiments.plan.memory import peak
from titan_hydra.experiments.plan.time import speed
from titan_hydra.instruments.rates.published import rows_of, score

ROOT = Path(__file__).parents[2]
LISTS = sorted(file.stem for file in (ROOT / "benchmarks/gpu/lists").glob("*.yaml"))


def program(name):
    """Import a program of benchmarks/gpu as a module."""
    folder = str(ROOT / "benchmarks/gpu")
    sys.path += [folder] * (folder not in sys.path)  # as it is for a program that is run
    loader = SourceFileLoader(f"gpu_{name.partition('.')[0]}", f"{folder}/{name}")
    module = sys.modules[loader.name] = module_from_spec(spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bench():
    return program("run.py")


@pytest.mark.parametrize("name", LISTS)
def test_every_row_of_a_list_is_legal(name, bench, quickly):
    rows = bench.read(name, {"cpu": False})
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        if row.tool == "titan_hydra":
            job = compose_job(*bench.overrides(row), "cluster=slurm")  # a cluster's memory is not that of this machine
            assert (job.model.dim, job.model.n_layers, job.data.seq_len) == (*row.dimensions[:2], row.seq_len)
            assert (job.optimizer.lr, job.data.local_batch) == (row.lr, row.batch)
        else:
            assert (
                row.tool == "torchtitan"
                and row.ac in ("none", "full", "op", "layer", "memory_budget")
                and not row.overrides
            )
        assert bench.tiny(row).dimensions[1] == 2


@pytest.mark.parametrize("name", LISTS)
def test_every_row_fits_the_card_for_which_it_is_chosen(name, bench, quickly):
    """The layers of a row follow the card's memory, and rows that no number of layers fits are left out."""
    for hardware, gib in (("h100", 79.1), ("h200", 139.8)):
        rows = [row for row in bench.read(name, {}, gib) if row.needs <= gib and row.tool == "titan_hydra"]
        assert rows
        for row in rows:
            job = freeze(compose_unchecked(*bench.overrides(row), f"hardware={hardware}"))
            assert peak(job).gib <= gib, row.name


def test_settings_follow_the_memory_of_the_card(bench, tmp_path):
    text = "shape: 8b\nseq_len: 1\nlayers: {0: 6, 120: 12}\nrows: [{tool: x, name: y, batch: {60: 1, 130: 2}}]"
    (tmp_path / "list.yaml").write_text(text)
    found = {gib: bench.read(str(tmp_path / "list.yaml"), {}, gib)[0] for gib in (40.0, 79.1, 120.0, 139.8)}
    assert {gib: (row.layers, row.batch, row.needs) for gib, row in found.items()} == {
        40.0: (6, 1, 60),
        79.1: (6, 1, 60),
        120.0: (12, 1, 60),
        139.8: (12, 2, 60),
    }
    assert bench.omitted(found[40.0], 100, {"memory_gib": 40.0}) == "needs 60 GiB"
    assert [bench.omitted(found[79.1], left, {"memory_gib": 79.1}) for left in (100, 1)] == ["", "not run"]
    assert bench.read(str(tmp_path / "list.yaml"), {"layers": 3}, 79.1)[0].layers == 3


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
    found = [bench.measure(crash, 100, 100, environment, log), bench.measure(hang, 100, 6, environment, log)]
    assert [row["status"] for row in found] == ["crashed", "hung"] and "error" in found[0]
    first = dataclasses.replace(fine, name="first")
    card = {"peak_flops": 1e12}
    (done,) = bench.results([fine], time.monotonic() + 100, 100, environment, card, tmp_path)
    (missing,) = bench.results([first], time.monotonic() + 10, 100, environment, card, tmp_path)
    assert done["status"] == "done" and 0 < done["mfu"] < 1 and done["ratio"] is None and done["tokens_per_second"] > 0
    assert missing["status"] == "not run"
    assert all(name in log.read_text() for name in ("aborts", "sleeps", "fine"))
    assert bench.line(found[1]).endswith("hung") and f"{done['tokens_per_second']:,.0f}" in bench.line(done)


def test_a_row_that_the_end_of_the_time_cuts_off_has_not_hung(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "command", lambda *_: [sys.executable, "-c", "import time; time.sleep(100)"])
    row = bench.tiny(bench.Row("one", "titan_hydra", "debug", 64, 2))
    cut, hung = (
        bench.measure(row, left, limit, dict(os.environ), tmp_path / "rows.log") for left, limit in ((0.2, 9), (9, 0.2))
    )
    assert (cut["status"], hung["status"]) == ("not run: time was up while it ran", "hung")
    assert bench.line(cut).endswith(cut["status"]) and "error" in cut


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


def test_a_row_of_torchtitan_says_what_its_memory_depends_on(bench):
    """It compiles its loss, and may wrap the model with FSDP on one rank, which gathers weights in bf16."""
    (row,) = (row for row in bench.read("first", {}, 139.8) if row.name == "TorchTitan bf16 fsdp")
    found, card = {"tokens_per_second": 1.0, "reserved_gib": 92.54}, {"device": "NVIDIA H200", "commit": "abc"}
    native = dataclasses.replace(row, wrap="native")
    rows = [{"stack": {}, "shape": None} | bench.as_published(one, found, card) for one in (row, native)]
    scored = [score(one) for one in rows]
    assert [one.shape.wrapped for one in scored] == [True, False]
    assert [round(one.memory[1], 1) for one in scored] == [95.1, 87.2]


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

    monkeypatch.setattr(bench, "card", lambda *_: ({"device": "cpu", "commit": "abc"}, dict(os.environ)))
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


class Queue:
    """A device that works behind its host; times in milliseconds."""

    def __init__(self):
        self.host = self.device = 0.0

    def start(self, to_start, to_run):
        self.host += to_start
        self.device = max(self.device, self.host) + to_run

    def synchronize(self):
        self.host = max(self.host, self.device)

    def __matmul__(self, _):
        self.start(0.01, 1.4)

    def Event(self, enable_timing):
        return Mark(self)


class Mark:
    def __init__(self, queue):
        self.queue, self.time = queue, 0.0

    def record(self):
        self.time = max(self.queue.device, self.queue.host)

    def query(self):
        return self.time <= self.queue.host

    def elapsed_time(self, other):
        return other.time - self.time


@pytest.mark.parametrize(("to_start", "shown"), [(0.15, 0.055), (4, 0.055), (100, None)])
def test_the_time_of_a_kernel_has_no_time_of_the_host(to_start, shown, monkeypatch):
    """A call takes the host longer than its kernel runs; if no queue can hide this, no time is shown."""
    monkeypatch.setattr(sys, "argv", ["wide_kernels.py", "cuda"])
    kernels, queue = program("wide_kernels.py"), Queue()
    monkeypatch.setattr(kernels.torch, "cuda", queue)
    monkeypatch.setattr(kernels, "random", lambda *_: queue)
    measured = kernels.milliseconds(lambda: queue.start(to_start, 0.055))
    assert measured == (None if shown is None else pytest.approx(shown))


def test_the_command_is_short_enough_for_every_part():
    carry = program("carry")
    words = carry.command(".gpu", ["tests", *LISTS, "profile=8b_block"], "--device cpu --dry-run")
    assert len(words) <= 2000 and words.count("--seconds") == words.count("--dry-run") == len(LISTS) + 2


def test_options_reach_only_the_programs_that_have_them():
    """Each program parses its options of the command, and those that it does not have do not reach it."""
    carry = program("carry")
    line = carry.command(
        ".gpu", ["tests", "pairs", "profile=pairs"], "--set layers=5 --only 'cp 2' --set=batch=1 --faults"
    )
    programs = {}
    for words in (shlex.split(part) for part in line.split(" ; ") if part.startswith("python3 ")):
        programs[Path(words[1]).stem if "benchmarks" in words[1] else "tests"] = words[2:]
    assert programs["tests"][:3] == ["--only", "cp 2", "--faults"]
    assert (
        programs["run"][1:7]
        == programs["profile_rows"][1:7]
        == ["--set", "layers=5", "--only", "cp 2", "--set", "batch=1"]
    )
    for name, known in carry.OPTIONS.items():
        script = "tests/gpu/run.py" if name == "tests" else "benchmarks/gpu/run.py"
        text = subprocess.run([sys.executable, str(ROOT / script), "--help"], capture_output=True, text=True).stdout
        assert all(f"{option} " in text or f"{option}]" in text for option in known), script


@pytest.mark.parametrize("words", [["--options=--layers 5"], ["no_list"], ["--again", "missing.jsonl"]])
def test_what_carry_cannot_do_is_one_line(words, tmp_path):
    folder = tmp_path / ".gpu"
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/gpu/carry"), "--folder", str(folder), *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and not folder.exists(), done.stderr


@pytest.mark.parametrize("words", [[], ["correct"], ["correct", "390", "sped", "290"], ["speed", "soon"]])
def test_words_that_the_first_call_does_not_know_start_nothing(words, tmp_path):
    script = ROOT / "benchmarks/gpu/first_call.sh"
    done = subprocess.run(["bash", str(script), *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "again" in done.stderr and not list(tmp_path.iterdir())


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
import titan_hydra.experiments.launch.main, titan_hydra.core.train.worker, titan_hydra.core.train.loop
import titan_hydra.instruments.verify.verify
import titan_hydra.core.checkpoint.convert, titan_hydra.core.train.generate, titan_hydra.recipes.flux.sample, titan_hydra.core.train.score
"""


def test_what_a_rank_imports_is_carried():
    carry = program("carry")
    wheels = (wheel.partition("==")[0].lower().replace("_", "-") for wheel in (*carry.WHEELS, carry.BUILT))
    carried = {"titan-hydra", *BARE.split(), *wheels}
    subprocess.run([sys.executable, "-c", ALONE.format(carried=carried)], check=True, cwd=ROOT)
