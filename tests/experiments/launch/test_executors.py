"""An executor written by a user, as in docs/extend.md: its key is typed, and its runs are followed, cancelled and
resumed.
"""

import json
import os
import re

import pytest

from titan_hydra.core.job.run import layout

from .conftest import ROOT

NICED = ("train.imports=[niced]", "cluster.executor=niced", "gpus=2")


@pytest.fixture
def niced(launcher):
    """Return launch.py in a folder that contains only the module of docs/extend.md."""
    ((name, code),) = re.findall(r"```python\n# (niced\.py)\n(.*?)```", (ROOT / "docs/extend.md").read_text(), re.S)
    (launcher.folder / name).write_text(code)
    return launcher


def titan(launcher, *arguments: str):
    return launcher.python("-m", "titan_hydra.cli", *arguments)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ((*NICED, "cluster.nice=20"), "cluster.nice=20: must be from 0 to 19"),
        (
            (*NICED, "cluster.partition=main"),
            "cluster.partition=main: cluster.executor=niced does not read it; slurm would",
        ),
        ((NICED[0], "cluster.nice=5"), "cluster.nice=5: cluster.executor=local does not read it; niced would"),
        (("cluster.executor=niced",), "one of your own needs train.imports=[ITS_MODULE]"),
        ((*NICED, "launch.packed=true"), "launch.packed=true: applies to batch jobs"),
    ],
)
def test_its_keys_are_its_own(niced, line, words):
    refused = niced.run(*niced.TINY, *line)
    assert refused.returncode == 2 and words in refused.stderr and refused.stderr.count("\n") == 1, refused.stderr
    assert not (niced.folder / "runs").exists()


def test_its_runs_are_followed_cancelled_and_resumed(niced):
    """The second command line has another value of the executor's key, but means the same run."""
    running = niced.start(*niced.ENDLESS, *NICED, "cluster.nice=5")
    niced.wait_for_step()
    assert json.loads((niced.attempt() / "attempt.json").read_text())["executor"] == "niced"
    assert [os.getpriority(os.PRIO_PROCESS, niced.rank(rank)["pid"]) for rank in (0, 1)] == [os.nice(0) + 5] * 2
    (cell,) = json.loads(titan(niced, "status", "--json").stdout)["cells"]
    assert (cell["state"], cell["failure"]) == ("running", None)
    with (niced.folder / "niced.py").open("a") as file:
        file.write("# edited while it runs\n")
    (cell,) = json.loads(titan(niced, "status", "--json").stdout)["cells"]
    assert (cell["state"], cell["damage"], cell["refused"]) == ("running", None, None)
    done = titan(niced, "stop", "--yes")
    assert done.returncode == 0 and "asked all 2 ranks to save and stop" in done.stdout, done.stdout + done.stderr
    assert running.wait(120) == 75, running.stderr.read()
    (cell,) = json.loads(titan(niced, "status", "--json").stdout)["cells"]
    assert cell["state"] == "interrupted" and cell["cancelled_by"] and cell["step"] >= 20
    module = niced.folder / "niced.py"
    module.write_text(module.read_text().replace("# edited while it runs\n", ""))
    again = niced.start(*niced.ENDLESS, *NICED, "cluster.nice=6")
    niced.wait_for_step(cell["step"] + 1, attempt=2)
    again.terminate()
    assert again.wait(120) in (75, 143), again.stderr.read()
    (niced.folder / "niced.py").unlink()
    (cell,) = json.loads(titan(niced, "status", "--json").stdout)["cells"]
    assert cell["state"] == "interrupted" and not cell["damage"]
    owner = layout.CLAIM.read(niced.attempt(2))
    for one in ({**owner, "here": False}, owner):
        layout.CLAIM.write(niced.attempt(2), one)  # as that of an executor whose ranks run elsewhere
        (cell,) = json.loads(titan(niced, "status", "--json").stdout)["cells"]
        if not one["here"]:
            assert cell["state"] == "unknown" and "there is no module niced" in cell["refused"]
            refused = titan(niced, "stop", "--yes")
            assert refused.returncode == 1 and "there is no module niced" in refused.stderr
    (niced.run_directory / "result.json").write_text('{"status": "done"}')
    assert [cell["state"] for cell in json.loads(titan(niced, "status", "--json").stdout)["cells"]] == ["done"]
