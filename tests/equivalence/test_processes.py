"""Ranks of cases inherit nothing from the process that starts them."""

import os
from pathlib import Path

from titan_hydra.config import to_dict
from titan_hydra.config.compose import compose_job
from titan_hydra.verify.processes import spawn_ranks


def note_parent(device, folder, jobs):
    Path(folder, f"parent_of_{os.getpid()}").write_text(str(os.getppid()))


def test_no_rank_is_a_fork_of_its_caller(tmp_path):
    """After the first use of a fork server, Python's default start method is a fork. A fork of a process that has had
    process groups, such as the fake ones of a plan, sums over the wrong ranks.
    """
    job = to_dict(compose_job("debug=tiny", "gpus=2", "parallelism=fsdp"))
    for _ in range(2):
        spawn_ranks(2, note_parent, str(tmp_path), [(job,)])
    parents = [file.read_text() for file in tmp_path.glob("parent_of_*")]
    assert len(parents) == 4 and str(os.getpid()) not in parents
