"""The server whose forks run launch.py for the tests (tests/kits/forked.py) passes nothing from one fork to another."""

import multiprocessing
import os

from tests.kits import forked

# what a run could leave behind, as a line that reads it
STATE = """
import os, sys, torch, torch.distributed as dist, multiprocessing as mp, signal, gc
print(os.environ.get("LEFT"), os.getcwd(), torch.get_default_dtype(), dist.is_initialized(), "left" in sys.path,
      mp.get_start_method(allow_none=True), torch.initial_seed(), signal.getsignal(signal.SIGTERM), sys.argv[1:])
"""
LEAVE = """
import os, sys, torch, torch.distributed as dist, multiprocessing as mp, signal
os.environ["LEFT"] = "x"; os.chdir("/"); torch.set_default_dtype(torch.float64); sys.path.append("left")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1); mp.set_start_method("fork")
torch.manual_seed(7); signal.signal(signal.SIGTERM, signal.SIG_IGN)
"""


def test_nothing_passes_from_one_fork_to_another_or_to_the_tests(tmp_path):
    (tmp_path / "state.py").write_text(STATE)
    (tmp_path / "leave.py").write_text(LEAVE + STATE)

    def state(module):
        line = ["debug=tiny", f"train.imports=[{module}]", f"--config-dir={tmp_path}", "launch.mode=dry"]
        done = forked.run("launch.py", line, tmp_path, os.environ)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[0]

    first, left, last = state("state"), state("leave"), state("state")
    assert first != left and first == last
    assert "None" in first and str(tmp_path) in first and "float32 False False None" in first
    assert multiprocessing.get_start_method(allow_none=True) in (None, "fork") and "LEFT" not in os.environ


def test_a_variable_that_is_read_at_the_start_asks_for_a_new_process():
    assert forked.can_run(dict(os.environ)) and forked.can_run({**os.environ, "TITAN_ANY": "1"})
    assert not forked.can_run({**os.environ, "PYTHONPATH": "/nowhere"})
    assert not forked.can_run({**os.environ, "OMP_NUM_THREADS": "7"})
