"""No file of a run has a secret of the launcher's environment or of the checkout."""

import shutil
import subprocess

from tests.experiments.launch.conftest import ROOT

SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "HF_TOKEN": "hf_" + "aB3" * 11,
    "DB_PASSWORD": "hunter2hunter2",
}
GIT = ("git", "-c", "user.name=t", "-c", "user.email=t@example.org")


def test_no_secret_is_in_what_a_run_leaves(launcher):
    """The checkout's diff and the environment contain secrets. A run that logs to wandb fails once, and resumes."""
    checkout = launcher.folder / "checkout"
    for name in ("titan_hydra", "conf", "sweeps"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "launch.py", checkout)
    for command in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "all")):
        subprocess.run([*GIT, *command], cwd=checkout, check=True)
    with (checkout / "launch.py").open("a") as file:
        file.write(
            "".join(f'# {name} = "{value}"\n' for name, value in SECRETS.items())
            + 'WANDB_API_KEY = "fedcba9876543210"\n'
            'import os; os.environ["PGPASSWORD"] = "opensesame"\nURL = "s3://me:opensesame@host/"\n'
        )
    launcher.env.update(SECRETS, PYTHONPATH=str(checkout))

    def launch(*overrides, status=0):
        done = launcher.python(
            str(checkout / "launch.py"), *launcher.TINY, "gpus=2", "metrics.trackers=[wandb]", *overrides
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    said = (
        launch("steps=4")
        + launch("steps=4")
        + launch("steps=4", "optimizer.lr=1e30", "optimizer.max_norm=0", status=78)
    )
    token = f"+cluster.environment.HF_TOKEN={SECRETS['HF_TOKEN']}"
    refused = launch("cluster=slurm", token, status=2)
    assert "cluster.environment.HF_TOKEN" in refused
    refused += launch(token, status=2)  # a key of the slurm executor
    runs = launcher.folder / "runs"
    files = [path for path in runs.rglob("*") if path.is_file()]
    assert {"config.json", "env.json", "rank_0.log", "manifest.json", "metrics.jsonl"} <= {path.name for path in files}
    environment = next(path for path in files if path.name == "env.json").read_text()
    assert "redacted WANDB_API_KEY" in environment and "+# HF_TOKEN" in environment
    for secret in (*SECRETS.values(), "fedcba9876543210", "opensesame"):
        assert secret not in said + refused
        assert [path for path in files if secret.encode() in path.read_bytes()] == [], secret
