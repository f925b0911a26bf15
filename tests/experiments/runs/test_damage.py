"""A damaged file of one run gives a row that names the file: no command ends with a traceback, and all other runs are
shown as before.
"""

import json
import shutil
import socket

import pytest

from titan_hydra import cli
from titan_hydra.core.job.config import identity, to_dict
from titan_hydra.experiments.compose.compose import compose_job

BYTES, CUT, GONE, FOLDER, DEEP = b"\xff\xfe\x00{\x80", "cut", "gone", "folder", b"[" * 100_000
PROCESS = {"pid": 1, "born": "another boot 1", "host": socket.gethostname()}
RESULT = {
    "status": "done",
    "hash": "-",
    "name": "-",
    "overrides": [],
    "steps": 12,
    "final_loss": 3.0,
    "validation_loss": 3.1,
    "tokens_per_second": 1127.0,
    "tokens_per_second_iqr": 18.0,
    "measured_steps": 11,
    "memory_gib": 1.5,
    "mfu": None,
    "seconds": 2.4,
    "gpu_hours": None,
    "world_size": 1,
    "device": "Xeon",
    "versions": {"torch": "2.13"},
    "git_sha": "e248c86c6141",
}
ROW = {
    "grad_norm": 0.5,
    "lr": 1e-3,
    "tokens_per_second": 1100.0,
    "tflops": 0.1,
    "mfu": None,
    "memory_gib": 1.0,
    "memory_reserved_gib": 1.5,
    "step_seconds": 0.1,
    "data_seconds": 0.01,
}
OOM = {
    "type": "OutOfMemoryError",
    "message": "CUDA out of memory",
    "traceback": "Traceback of the rank",
    "time": 50.0,
    "secondary": False,
    "step": 3,
    "peak_gib": 7.0,
    "capacity_gib": 8.0,
}


def rows(change=lambda row: row):
    made = [change(ROW | {"step": step, "loss": 5.0 - step / 10, "tokens_seen": 256 * step}) for step in range(1, 13)]
    return "".join(json.dumps(row) + "\n" for row in made).encode()


def without(*names):
    return lambda row: {name: value for name, value in row.items() if name not in names}


# By name: the file of the damaged run (or the manifest), what is done to it, and the file that the run's row names.
DAMAGE = {
    **{
        f"config {name}": ("config.json", what, "config.json")
        for name, what in {
            "bytes": BYTES,
            "empty": b"",
            "cut": CUT,
            "{}": b"{}",
            "[]": b"[]",
            "gone": GONE,
            "folder": FOLDER,
            "deep": DEEP,
            "number": b"7",
            "strings": b'{"steps": "many", "gpus": {}, "model": 3}',
            "groups": b'{"steps": 5, "gpus": 2, "cluster": [], "model": {}}',
        }.items()
    },
    **{
        f"result {name}": ("result.json", what, "result.json")
        for name, what in {
            "bytes": BYTES,
            "empty": b"",
            "cut": CUT,
            "[]": b"[]",
            "folder": FOLDER,
            "strings": json.dumps(RESULT | {"tokens_per_second": "fast", "steps": "all"}).encode(),
            "huge": json.dumps(RESULT | {"tokens_per_second": 10**400}).encode(),
            "versions": json.dumps(RESULT | {"versions": ["torch"]}).encode(),
        }.items()
    },
    "result NaN": (
        "result.json",
        json.dumps(RESULT | {"tokens_per_second": float("nan"), "final_loss": float("inf")}).encode(),
        None,
    ),
    "result without numbers": ("result.json", b'{"status": "done"}', None),
    "result zeros": (
        "result.json",
        json.dumps(
            RESULT | dict.fromkeys(("tokens_per_second", "tokens_per_second_iqr", "validation_loss"), 0)
        ).encode(),
        None,
    ),
    **{
        f"env {name}": ("env.json", what, None)
        for name, what in {
            "bytes": BYTES,
            "[]": b"[]",
            "versions": b'{"versions": [1], "git_sha": 5, "git_diff": [], "git_untracked": "x"}',
        }.items()
    },
    **{
        f"metrics {name}": ("metrics.jsonl", what, None)
        for name, what in {
            "bytes": rows()[:900] + BYTES + b"\n" + rows()[900:],
            "empty": b"",
            "gone": GONE,
            "folder": FOLDER,
            "cut": CUT,
            "deep": DEEP,
            "NaN": rows(lambda row: row | {"loss": float("nan") if row["step"] == 5 else row["loss"]}),
            "all NaN": rows(lambda row: row | {"loss": float("nan"), "grad_norm": float("inf")}),
            "infinite": rows(lambda row: row | {"loss": float("-inf") if row["step"] % 2 else float("inf")}),
            "zero": rows(lambda row: row | {"loss": 0.0, "tokens_per_second": 0.0}),
            "null": rows(lambda row: row | {"loss": None}),
            "without loss": rows(without("loss")),
            "without step": rows(without("step")),
            "without times": rows(without("step_seconds", "lr")),
            "lists": b"[1, 2]\n[]\n",
            "strings": rows(lambda row: row | {"loss": "low", "step": "one"}),
            "huge": rows(lambda row: row | {"loss": 10**400, "step": 10**30}),
            "large": rows(lambda row: row | {"loss": 1e308}),
            "backwards": b"".join(reversed(rows().splitlines(True))),
        }.items()
    },
    "events bytes": ("events.jsonl", BYTES, None),
    "events folder": ("events.jsonl", FOLDER, None),
    "events strings": ("events.jsonl", b'{"event": "validation", "step": "last", "validation_loss": []}\n3\n', None),
    "events layout": (
        "events.jsonl",
        b'{"event": "layout", "step": 0}\n{"event": "layout", "step": 3, "parallelism": [], "gpus": 2, "tp": "x"}\n'
        b'{"event": "layout", "step": 5, "parallelism": "fsdp", "gpus": 2}\n',
        None,
    ),
    "metrics slow": ("metrics.jsonl", rows(lambda row: row | {"slowest_over_median": 9.0}), None),
    "metrics slower": (
        "metrics.jsonl",
        rows(lambda row: row | {"slowest_rank": 1, "slowest_over_median": 9.0, "others_over_median": None}),
        None,
    ),
    "overrides bytes": ("overrides.txt", BYTES, None),
    "overrides folder": ("overrides.txt", FOLDER, None),
    **{
        f"attempt {name}": ("failed/attempts/1/attempt.json", what, "attempts/1/attempt.json")
        for name, what in {
            "bytes": BYTES,
            "[]": b"[]",
            "{}": b"{}",
            "strings": json.dumps(PROCESS | {"started": "yesterday"}).encode(),
            "never": json.dumps(PROCESS | {"started": 1e300}).encode(),
            "slurm": json.dumps(PROCESS | {"executor": "slurm"}).encode(),
        }.items()
    },
    **{
        f"ranks {name}": ("failed/attempts/1/ranks.json", what, "attempts/1/ranks.json")
        for name, what in {
            "bytes": BYTES,
            "text": json.dumps(PROCESS | {"ranks": "none"}).encode(),
            "numbers": json.dumps(PROCESS | {"ranks": [3]}).encode(),
        }.items()
    },
    **{
        f"failed {name}": ("failed/attempts/1/rank_0.json", what, "attempts/1/rank_0.json")
        for name, what in {
            "bytes": BYTES,
            "cut": CUT,
            "error": json.dumps(PROCESS | {"exit_status": 76, "error": "none"}).encode(),
            "keys": json.dumps(PROCESS | {"exit_status": 76, "error": {"type": "Out"}}).encode(),
            "status": json.dumps(PROCESS | {"exit_status": "bad", "error": OOM}).encode(),
        }.items()
    },
    **{
        f"flight {name}": ("failed/attempts/1/flight_0.json", what, None)
        for name, what in {
            "bytes": BYTES,
            "{}": b"{}",
            "keys": b'{"rank": 0, "time": 5, "timeout": 3, "groups": [], "collectives": 3}',
        }.items()
    },
    "log bytes": ("attempts/1/rank_0.log", BYTES, None),
    "log folder": ("attempts/1/rank_0.log", FOLDER, None),
    "beat": ("attempts/1/beat_0.json", b'{"time": "now"}', None),
    "status": ("attempts/1/status.json", b'{"step": "last"}', None),
    "cancelled": ("attempts/1/cancelled", b"[]", None),
    "wandb": ("wandb", b"", None),
    "attempts file": ("attempts", b"", None),
    "attempts gone": ("attempts", GONE, None),
    "attempt file": ("attempts/1", b"", None),
    "run gone": ("", GONE, None),
    "run file": ("", b"", None),
    **{
        f"manifest {name}": ("manifest", what, "manifest.json")
        for name, what in {
            "bytes": BYTES,
            "empty": b"",
            "cut": CUT,
            "[]": b"[]",
            "{}": b"{}",
            "folder": FOLDER,
            "cells": b'{"name": "s", "command": [], "baseline": null, "cells": "all"}',
            "cell": b'{"name": "s", "command": [], "baseline": null, "cells": [{"name": "fine"}, 3]}',
            "places": b'{"name": "s", "command": "x", "baseline": 3, "cells": [{"name": [], "directory": 3, "overrides": null}]}',
            "long": json.dumps(
                {
                    "name": "s",
                    "command": [],
                    "baseline": None,
                    "cells": [{"name": "x", "directory": "x" * 5000, "overrides": []}],
                }
            ).encode(),
            "null": json.dumps(
                {
                    "name": "s",
                    "command": [],
                    "baseline": None,
                    "cells": [{"name": "x", "directory": "a\0b", "overrides": []}],
                }
            ).encode(),
        }.items()
    },
}


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """Return the folder of a sweep of three cells (two done, one out of memory) and of a separate run, and the run
    directories by name.
    """
    runs, places, cells = tmp_path_factory.mktemp("healthy") / "runs", {}, []
    job = compose_job("debug=tiny", "gpus=1", "steps=12", "metrics.log_every=1")
    for seed, name in enumerate(("fine", "done", "failed", "alone")):
        job.seed = seed
        directory = places[name] = runs / f"{job.name}-{identity(job)}"
        write(directory / "config.json", to_dict(job))
        write(
            directory / "env.json",
            {"git_sha": "e248c86c", "git_diff": "", "git_untracked": [], "versions": {"torch": "2.13"}},
        )
        (directory / "overrides.txt").write_text(f"debug=tiny\ngpus=1\nseed={seed}\n")
        (directory / "metrics.jsonl").write_bytes(rows())
        write(directory / "events.jsonl", {"event": "validation", "step": 12, "validation_loss": 3.1, "seconds": 0.1})
        attempt = directory / "attempts" / "1"
        write(attempt / "attempt.json", PROCESS | {"started": 10.0, "ended": 90.0, "overrides": []})
        write(
            attempt / "ranks.json",
            PROCESS | {"ranks": [PROCESS | {"exit_status": 76 if name == "failed" else 0, "ended": 80.0}]},
        )
        write(attempt / "beat_0.json", {"step": 12, "phase": "end", "since": 70.0, "count": 72, "time": 71.0})
        write(attempt / "status.json", {"step": 12, "phase": "end", "time": 71.0})
        (attempt / "rank_0.log").write_text("step 12/12  loss 3.0\n")
        status, error = (76, OOM) if name == "failed" else (0, None)
        write(
            attempt / "rank_0.json", PROCESS | {"started": 20.0, "ended": 80.0, "exit_status": status, "error": error}
        )
        if name != "failed":
            write(directory / "result.json", RESULT)
        if name != "alone":
            cells.append(
                {
                    "name": name,
                    "directory": directory.name,
                    "overrides": ["debug=tiny", "gpus=1", f"seed={seed}"],
                    "hash": "-",
                }
            )
    write(
        runs / "_sweeps/table-1/manifest.json",
        {
            "name": "table",
            "created": 0,
            "command": ["-m"],
            "baseline": None,
            "packed": False,
            "user": "ada",
            "cells": cells,
        },
    )
    return runs, {name: directory.name for name, directory in places.items()}


def damage(runs, places, file, what):
    """Do the damage to a file of the finished run, or of the failed run if `file` begins with failed/."""
    path = runs / "_sweeps/table-1/manifest.json" if file == "manifest" else runs / places["done"] / file
    if file.startswith("failed/"):
        path = runs / places["failed"] / file.removeprefix("failed/")
        if "flight" in file:  # flight records are read after a hang
            record = path.with_name("rank_0.json")
            record.write_text(record.read_text().replace("76", "77"))
    if what == CUT:
        path.write_bytes(path.read_bytes()[: -path.stat().st_size // 3])
        return
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if what == FOLDER:
        path.mkdir()
    elif what != GONE:
        path.write_bytes(what)


HURT = object()  # stands for the damaged run in a command
COMMANDS = [
    ("status",),
    ("status", "runs"),
    ("status", "--json"),
    ("status", "--all"),
    ("report", "--allow", "seed"),
    ("report", "table", "--csv"),
    ("report", "runs", "--md", "--allow", "seed"),
    ("report", "table", "--html", "-o", "page"),
    ("report", "--over", "seed"),
    ("report", HURT),
    ("logs", HURT),
    ("logs", HURT, "--guilty"),
    ("logs", HURT, "-f"),
    ("compare", HURT, "fine"),
    ("compare", "fine", HURT),
    ("resume", "--only", "oom"),
    ("resume", "runs", "--only", "time"),
    ("stop", "--yes"),
    ("stop", "runs", "--yes"),
    ("stop", "--help"),
    ("report", "--send", "--dry"),
    ("report", "runs", "--send", "--dry"),
    ("logs", HURT, "--hang"),
    ("checkpoint", "ls", HURT),
    ("--completion-words=status ",),
]
PLOTTED = ("metrics", "result NaN", "result zeros")  # files that plots read; drawing takes most of the time


# For each kind of file, the damage that most commands could fail on; -m slow runs the rest.
SOONER = {
    "config bytes",
    "config cut",
    "config {}",
    "config []",
    "config gone",
    "config strings",
    "result bytes",
    "result []",
    "result strings",
    "result NaN",
    "result zeros",
    "env bytes",
    "env versions",
    "metrics bytes",
    "metrics gone",
    "metrics folder",
    "metrics NaN",
    "metrics all NaN",
    "metrics null",
    "metrics without loss",
    "metrics lists",
    "metrics huge",
    "events bytes",
    "events strings",
    "events layout",
    "overrides bytes",
    "attempt bytes",
    "attempt {}",
    "attempt never",
    "ranks numbers",
    "failed bytes",
    "failed keys",
    "failed status",
    "flight keys",
    "log folder",
    "beat",
    "cancelled",
    "attempts file",
    "run file",
    "manifest bytes",
    "manifest cut",
    "manifest []",
    "manifest {}",
    "manifest cell",
    "manifest long",
}


@pytest.mark.parametrize(
    "name", [name if name in SOONER else pytest.param(name, marks=pytest.mark.slow) for name in DAMAGE]
)
def test_no_damage_ends_a_command_or_hides_other_runs(healthy, tmp_path, capsysbinary, monkeypatch, name):
    (runs, places), (file, what, told) = healthy, DAMAGE[name]
    shutil.copytree(runs, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    damage(tmp_path / "runs", places, file, what)
    hurt, out = places["failed" if file.startswith("failed/") else "done"], {}
    plots = [("report", "table", "--plots", "-o", "page")] if name.startswith(PLOTTED) else []
    for line in COMMANDS + plots:
        words = [{HURT: hurt, "fine": places["fine"]}.get(word, word) for word in line]
        try:
            status = cli.main(words)
        except SystemExit as end:  # raised by argparse
            status = end.code
        out[" ".join(words)] = capsysbinary.readouterr().out.decode(errors="replace")
        assert status in (0, 1, 2), words
    fine, alone = (places[name].rpartition("-")[2] for name in ("fine", "alone"))
    assert fine in out["status"] and fine in out["status runs"] and places["alone"] in out["status --all"]
    assert alone in out["report runs --md --allow seed"] or "1,127" in out["report runs --md --allow seed"]
    if file == "manifest":
        assert "damaged: manifest.json cannot be read" in out["status --all"]
        return
    assert "1,127" in out["report --allow seed"] and "fine" in (tmp_path / "page/report.html").read_text()
    if told:
        assert f"{told} cannot be read" in out["status"] or f"{told} is missing" in out["status"]
        assert f"damaged: {told} " in out["report --allow seed"] and "1 damaged" in out["status --all"]


def test_retry_names_a_damaged_run_and_what_mends_it(healthy, tmp_path, monkeypatch, capsys):
    runs, places = healthy
    shutil.copytree(runs, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    damage(tmp_path / "runs", places, "config.json", CUT)
    assert cli.main(["resume", "runs", "--only", "interrupted"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "config.json cannot be read" in line and "command line" in line
