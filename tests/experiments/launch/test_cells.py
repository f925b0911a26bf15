"""Test what launch.py does with cells before and after they run: faults, dry runs, states, sweeps. launch.py and the
ranks are real.
"""

import ast
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from titan_hydra.core.base.errors import Unhealthy
from titan_hydra.core.job.config import to_dict
from titan_hydra.core.train import worker
from titan_hydra.experiments.compose.compose import compose_job


def written(launcher):
    return [str(path.relative_to(launcher.folder)) for path in launcher.folder.rglob("*")]


def test_fault_of_any_cell_stops_all_and_leaves_nothing(launcher):
    done = launcher.run("-m", *launcher.TINY, "gpus=1,3", "data.global_batch=4", "launch.mode=run")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        line for line in done.stderr.splitlines() if line.startswith("data.global_batch=4: ")
    ]
    assert "nearest legal: 6" in done.stderr and done.stderr.endswith("   (cell 2 of 2: gpus=3)\n")
    assert written(launcher) == []


def test_a_fault_of_all_cells_is_one_line(launcher):
    done = launcher.run("-m", *launcher.TINY, "gpus=3", "data.global_batch=4", "seed=1,2,3")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr.endswith("   (all 3 cells)\n")


def test_faults_of_all_cells_are_shown_at_once(launcher):
    done = launcher.run("-m", *launcher.TINY, "gpus=3,5", "data.global_batch=4")
    assert done.returncode == 2 and "(cell 1 of 2" in done.stderr and "(cell 2 of 2" in done.stderr


def test_skip_invalid_runs_the_others_and_says_what_is_left_out(launcher):
    done = launcher.run("-m", *launcher.TINY, "gpus=1,3", "data.global_batch=4", "launch.skip_invalid=true", "steps=2")
    assert done.returncode == 0, done.stderr
    assert "left out: data.global_batch=4" in done.stderr
    assert launcher.run_directory.name in done.stdout


def test_mistyped_command_line_is_one_line(launcher):
    for mistake in ("optimzer.lr=1", "+unknown=1", "model=llama3_9b", "steps=many", "steps="):
        done = launcher.run(*launcher.TINY, mistake)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.stderr
    assert written(launcher) == []


def test_full_error_shows_the_traceback(launcher):
    launcher.env["HYDRA_FULL_ERROR"] = "1"
    done = launcher.run("optimzer.lr=1")
    assert done.returncode == 1 and "Traceback" in done.stderr


def test_hydra_launchers_are_refused(launcher):
    for arguments in (["hydra/launcher=submitit_slurm"], ["-m", "hydra/launcher=joblib", "steps=1,2"]):
        done = launcher.run(*arguments)
        assert done.returncode == 2 and "cluster=slurm" in done.stderr and len(done.stderr.splitlines()) == 1
    assert launcher.run("hydra/launcher=basic", "launch.mode=dry").returncode == 0


def test_help_and_config_start_nothing(launcher):
    for arguments in (["--help"], ["--cfg", "job"], ["--info", "config"]):
        done = launcher.run(*arguments)
        assert done.returncode == 0 and done.stdout, done.stderr
    assert written(launcher) == []


def test_dry_shows_cells_and_writes_nothing(launcher):
    done = launcher.run("-m", *launcher.TINY, "gpus=1,2", "launch.mode=dry", "cluster.time_minutes=30")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if "gpus=" in line]
    assert [row[2:] for row in rows] == [["647,488", "1", "1", "new", "0.5"], ["647,488", "2", "1", "new", "1.0"]]
    assert written(launcher) == []


def test_more_gpu_hours_than_allowed_start_nothing(launcher):
    done = launcher.run(*launcher.TINY, "gpus=2", "cluster.time_minutes=60", "launch.max_gpu_hours=1")
    assert done.returncode == 2 and "1 cell could take 2.0 GPU-hours" in done.stderr and written(launcher) == []
    done = launcher.run(*launcher.TINY, "launch.max_gpu_hours=1")
    assert done.returncode == 2 and "needs cluster.time_minutes" in done.stderr


def test_runs_folder_that_cannot_be_written_is_one_line(launcher):
    (launcher.folder / "file").touch()
    for runs in ("file/runs", "/proc/runs"):
        done = launcher.run(*launcher.TINY, f"paths.runs={runs}")
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
        assert done.stderr.startswith("paths.runs=") and "cannot be written" in done.stderr
    assert written(launcher) == ["file"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small file system")
@pytest.mark.parametrize("cluster", [("cluster=local",), ("cluster=slurm", "cluster.gpus_per_node=4")])
def test_a_full_disk_at_the_start_is_one_line(launcher, cluster):
    runs = launcher.folder / "runs"
    runs.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(runs)], check=True)
    (launcher.folder / "sbatch").touch(mode=0o755)
    launcher.env["PATH"] += f":{launcher.folder}"
    try:
        done = launcher.run("-m", *launcher.TINY, *cluster, "seed=1,2")
    finally:
        subprocess.run(["umount", str(runs)], check=True)
    assert done.returncode == 1
    # on a slow machine launch.py also prints how many cells it has composed
    assert len([line for line in done.stderr.splitlines() if not line.startswith("composed")]) == 1, done.stderr
    assert f"{runs}" in done.stderr and "No space left on device; free disk space" in done.stderr, done.stderr


def test_inline_run_leaves_a_whole_run_directory(launcher):
    launcher.env["MY_SECRET"] = "hunter2-in-the-environment"
    done = launcher.run(*launcher.TINY, "cluster=inline")
    assert done.returncode == 0, done.stderr
    directory = launcher.run_directory
    assert json.loads((directory / "result.json").read_text())["status"] == "done"
    config = (directory / "config.json").read_text()
    assert config == json.dumps(json.loads(config), indent=2, sort_keys=True) + "\n"
    assert directory.name.startswith(json.loads(config)["name"] + "-")
    assert (directory / "overrides.txt").read_text().splitlines() == ["debug=tiny", "precision=fp32", "cluster=inline"]
    environment = json.loads((directory / "env.json").read_text())
    assert environment["versions"]["torch"] and environment["git_sha"]
    assert not any(b"hunter2" in path.read_bytes() for path in directory.rglob("*") if path.is_file())
    assert launcher.rank(0)["exit_status"] == 0
    assert {path.name for path in launcher.folder.iterdir()} == {"runs"}


def test_done_run_is_not_run_again_unless_forced(launcher):
    line = (*launcher.TINY, "cluster=inline")
    first = launcher.run(*line)
    assert first.returncode == 0, first.stderr
    assert "step 5/5" in first.stdout
    (launcher.run_directory / "stale").touch()
    again = launcher.run(*line)
    assert again.returncode == 0 and "done, 5 steps" in again.stdout and "step 5/5" not in again.stdout
    forced = launcher.run(*line, "launch.force=true")
    assert forced.returncode == 0 and "step 1/5" in forced.stdout
    assert not (launcher.run_directory / "stale").exists()
    assert [path.name for path in (launcher.run_directory / "attempts").iterdir()] == ["1"]
    rows = (launcher.run_directory / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3, 4, 5]


def test_a_sweep_in_one_process_ends_with_the_cell_that_was_stopped(launcher):
    process = launcher.start("-m", *launcher.ENDLESS, "seed=0,1", "cluster=inline")
    launcher.wait(lambda: any("step" in file.read_text() for file in launcher.folder.glob("runs/*/metrics.jsonl")))
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 143 and "the same command line resumes it" in err, out + err
    assert len(list(launcher.folder.glob("runs/*/attempts/1"))) == 1


def test_identical_cells_run_once(launcher):
    done = launcher.run("-m", *launcher.TINY, "steps=2", "metrics.log_every=1,2", "cluster=inline")
    assert done.returncode == 0, done.stderr
    assert "cell 2 is the same experiment as cell 1" in done.stdout
    assert len(list((launcher.folder / "runs").iterdir())) == 1


def test_sweep_goes_on_after_a_failed_cell_and_shows_all(launcher):
    launcher.sabotage("""
build = loop.build
def sabotaged(job, device):
    if job.seed == 1:
        raise ValueError("seed 1 is cursed")
    return build(job, device)
loop.build = sabotaged
""")
    done = launcher.run("-m", *launcher.TINY, "steps=2", "seed=0,1,2")
    assert done.returncode == 1, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.strip().startswith("llama3_debug") and " seed=" in line]
    assert [("seed 1 is cursed" in row, " done " in row) for row in rows] == [
        (False, True),
        (True, False),
        (False, True),
    ]
    launcher.heal()
    listed = launcher.run("-m", *launcher.TINY, "steps=2", "seed=0,1,2")
    assert listed.returncode == 1 and "launch.retry=failed" in listed.stderr
    healed = launcher.run("-m", *launcher.TINY, "steps=2", "seed=0,1,2", "launch.retry=failed")
    assert healed.returncode == 0, healed.stderr


def test_failed_run_is_listed_and_retried_by_class(launcher):
    launcher.sabotage_step_3(
        0, 'raise RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 9e18")'
    )
    failed = launcher.run(*launcher.TINY)
    assert failed.returncode == 76, failed.stderr
    assert "DefaultCPUAllocator" in failed.stderr
    launcher.heal()
    for retry in ("none", "node"):
        again = launcher.run(*launcher.TINY, f"launch.retry={retry}")
        assert again.returncode == 76 and "launch.retry=failed" in again.stderr and "step" not in again.stdout
    retried = launcher.run(*launcher.TINY, "launch.retry=oom")
    assert retried.returncode == 0 and "attempt 2" in retried.stdout, retried.stderr


def test_changed_config_is_refused(launcher):
    assert launcher.run(*launcher.TINY, "cluster=inline").returncode == 0
    config = launcher.run_directory / "config.json"
    config.write_text(config.read_text().replace('"lr": 0.002', '"lr": 0.003').replace('"seed": 0', '"seed": 1'))
    (launcher.run_directory / "result.json").unlink()
    (launcher.run_directory / "attempts" / "2").mkdir()
    worker = launcher.python("-m", "titan_hydra.core.train.worker", str(launcher.run_directory), "2")
    assert worker.returncode == 2
    assert "it was changed after it was submitted" in launcher.rank(0, attempt=2)["error"]["message"]


def test_worker_runs_under_torchrun(launcher):
    assert launcher.run(*launcher.TINY, "gpus=2").returncode == 0
    directory = launcher.run_directory
    (directory / "result.json").unlink()
    shutil.rmtree(directory / "checkpoints")
    done = launcher.python(
        "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "titan_hydra.core.train.worker", str(directory), "2"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((directory / "result.json").read_text())["world_size"] == 2
    wrong = launcher.python("-m", "titan_hydra.core.train.worker", str(directory), "3")
    assert wrong.returncode == 2
    assert "needs 2 ranks, and 1 were started" in launcher.rank(0, attempt=3)["error"]["message"]


HEAVY = ("torch", "datasets", "transformers", "tiktoken", "tokenizers", "wandb")


def test_launch_side_imports_nothing_heavy(launcher):
    watch = f"""
import atexit, sys
def tell():
    if sys.argv[0].endswith("launch.py"):
        print("HEAVY", sorted(set(sys.modules) & set({HEAVY})), "submitit" in sys.modules, file=sys.stderr)
atexit.register(tell)
"""
    folder = launcher.folder.parent / "watch"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(watch)
    launcher.env["PYTHONPATH"] = str(folder)
    for arguments in (
        ["--cfg", "job"],
        ["--help"],
        ["launch.mode=dry"],
        [*launcher.TINY, "gpus=1"],
        [*launcher.TINY, "gpus=1"],  # the run is done
        ["-m", "gpus=1,2", "launch.mode=dry"],
        ["parallelism.tp=3"],
    ):
        assert launcher.run(*arguments).stderr.splitlines()[-1] == "HEAVY [] False", arguments


def test_rank_imports_only_what_it_needs(launcher):
    unused = {
        "hydra",
        "omegaconf",
        "datasets",
        "wandb",
        "rich",
        "torch.distributed.pipelining",
        "transformers",
        "diffusers",
    }
    launcher.sabotage_step_3(0, f"import sys; sys.exit(sorted({unused} & set(sys.modules)) == [] and 78)")
    assert launcher.run(*launcher.TINY, "gpus=1").returncode == 78


def test_files_that_a_node_sees_late_are_waited_for(launcher):
    """A network file system shows a new file to other hosts seconds later. A file that never appears is a fault of the
    node and not of the user.
    """
    assert launcher.run(*launcher.TINY, "cluster=inline").returncode == 0
    directory = launcher.run_directory
    (directory / "result.json").unlink()
    shutil.rmtree(directory / "checkpoints")
    launcher.attempt(2).mkdir()
    shutil.copy(launcher.attempt(1) / "attempt.json", launcher.attempt(2))
    hidden = [directory / "config.json", launcher.attempt(2) / "attempt.json"]
    for file in hidden:
        file.rename(file.with_suffix(".late"))
    env = {**launcher.env, "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}
    rank = subprocess.Popen(
        [sys.executable, "-m", "titan_hydra.experiments.launch.executors.slurm.rank", str(directory), "2"],
        cwd=launcher.ROOT,
        env=env,
    )
    for file in hidden:
        time.sleep(3)
        assert rank.poll() is None, launcher.rank(0, attempt=2)
        file.with_suffix(".late").rename(file)
    assert rank.wait(60) == 0, launcher.rank(0, attempt=2)
    with pytest.raises(Unhealthy, match=f"{socket.gethostname()}: {directory}/nothing cannot be seen here after 0 s"):
        worker.until_seen(directory / "nothing", 0)


ENVIRONMENT = """
import os, sys
from pathlib import Path
from titan_hydra.core.train import worker
before = dict(os.environ)
def load(directory):
    assert "torch" not in sys.modules
    print("set:", sorted(name for name in set(os.environ) - set(before)))
    raise SystemExit(2)
worker.load_job = load
worker.run_rank(sys.argv[1], 1, inline=True)
"""


def test_what_torch_reads_once_is_set_before_it_is_imported(tmp_path):
    """These variables are set for every job. Otherwise a deterministic job could follow, in the same process, a job
    that has already called cuBLAS. A site's own values are kept.
    """

    def names(async_tp, **of_the_site):
        config["parallelism"]["async_tp"] = async_tp
        (tmp_path / "config.json").write_text(json.dumps(config))
        environment = {
            name: value for name, value in os.environ.items() if name not in always and "ALLOC_CONF" not in name
        }
        done = subprocess.run(
            [sys.executable, "-c", ENVIRONMENT, str(tmp_path)],
            capture_output=True,
            text=True,
            env=environment | of_the_site,
            cwd=Path(worker.__file__).parents[3],
        )
        return ast.literal_eval(done.stdout.partition("set: ")[2] or done.stderr)

    config = to_dict(compose_job("debug=tiny"))
    always = ["CUBLAS_WORKSPACE_CONFIG", "GOMP_SPINCOUNT", "OMP_NUM_THREADS", "RUST_LOG", "TRITON_CACHE_DIR"]
    assert names(False) == sorted([*always, "PYTORCH_ALLOC_CONF"])
    assert names(True) == always
    assert names(False, PYTORCH_CUDA_ALLOC_CONF="", CUBLAS_WORKSPACE_CONFIG=":16:8") == always[1:]
