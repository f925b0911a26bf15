"""Test ranks that cannot end by themselves, as a user meets them: unfit machines, and ranks that block when they are
asked to stop.
"""

import json
import signal
import socket


def test_an_unfit_machine_is_named_before_training(launcher):
    launcher.sabotage(
        "import time; from titan_hydra.core.train.observe import health; health.matmul = lambda device: time.sleep(100 * rank)"
    )
    failed = launcher.run(*launcher.ENDLESS, "gpus=2", "comm.health_check_seconds=8")
    assert failed.returncode == 79, failed.stderr
    assert (
        f"failed (79): rank 1: {socket.gethostname()}: the matmul of device cpu did not end within 8 s" in failed.stderr
    )
    assert "Traceback" not in failed.stderr and launcher.processes() == []


def test_ranks_that_block_stop_within_their_grace(launcher):
    """Rank 1 blocks in C, rank 0 in a collective; neither can run its Python handler of the signal."""
    launcher.sabotage_step_3(
        1, "import ctypes; lock = ctypes.CDLL(None).pthread_mutex_lock; at = bytes(64); lock(at); lock(at)"
    )
    process = launcher.start(*launcher.ENDLESS, "gpus=2", "cluster.stop_seconds=4")
    launcher.wait(lambda: json.loads((launcher.attempt() / "beat_1.json").read_text())["step"] == 3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130 and "was not over 3 s after the run was asked to stop" in err
    assert launcher.processes() == []
    assert launcher.rank(1)["exit_status"] == 75 and (launcher.attempt() / "stopped").read_text() == "blocked\n"


def test_a_rank_that_freezes_in_a_save_does_not_hold_the_others_for_an_hour(launcher):
    """A save may take as long as the disk needs, but a rank that is alive writes heartbeats during it."""
    launcher.sabotage("""
checkpointer = __import__("titan_hydra.core.checkpoint.checkpointer", fromlist=["Checkpointer"]).Checkpointer
after_step = checkpointer.after_step
def frozen(self, step, *given):
    if step == 3 and rank == 1:
        os.kill(os.getpid(), 19)
    return after_step(self, step, *given)
checkpointer.after_step = frozen""")
    failed = launcher.run(
        *launcher.TINY, "gpus=2", "steps=9", "checkpoint=sync", "checkpoint.interval=3", "comm.train_timeout_seconds=5"
    )
    assert failed.returncode == 77, failed.stderr
    assert "rank 1 was late at step 3, checkpoint" in failed.stderr, failed.stderr
    assert "step 3, checkpoint: rank 1 has written no heartbeat for" in launcher.rank(0)["error"]["message"]
    assert launcher.processes() == []
