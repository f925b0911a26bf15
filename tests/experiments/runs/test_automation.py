"""The loop of docs/metrics.md runs from its question to its conclusion."""

import re
import shutil
import subprocess
import sys


def test_the_loop_of_the_page_comes_to_a_conclusion(launcher):
    page = (launcher.ROOT / "docs/metrics.md").read_text()
    (loop,) = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(loop.splitlines()) < 45
    shutil.copy(launcher.ROOT / "launch.py", launcher.folder)
    (launcher.folder / "loop.py").write_text(loop)
    command, where = [sys.executable, "loop.py"], {"cwd": launcher.folder, "env": launcher.env}
    # two minutes on an idle machine
    done = subprocess.run(command, **where, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in said] == ["plan", "verify", "proof", "run", "conclusion"], done.stdout
    assert said[3] == "run: 6 cells, 6 done" and said[4].endswith("3 seeds"), done.stdout


def test_a_gate_that_refuses_ends_the_loop_with_its_status(launcher):
    page = (launcher.ROOT / "docs/metrics.md").read_text()
    (loop,) = re.findall(r"```python\n(.*?)```", page, re.S)
    shutil.copy(launcher.ROOT / "launch.py", launcher.folder)
    (launcher.folder / "loop.py").write_text(loop.replace("optimizer.lr=1e-3,3e-3", "optimizer.lr=1e-3,-1"))
    done = launcher.python("loop.py")
    assert (done.returncode, done.stdout) == (2, "") and "optimizer.lr=-1" in done.stderr
