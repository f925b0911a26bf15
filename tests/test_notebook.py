"""`import titan_hydra as th`, as docs/notebook.md has it: launch, plan, runs and report in a process that stays as it is."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import titan_hydra as th
from titan_hydra.core.base.errors import ConfigError

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Launch a sweep from an empty folder. Return the folder and what `launch` has returned."""
    folder = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return folder, th.launch(["-m", "debug=tiny", "cluster=inline", "steps=3", "optimizer.lr=1e-3,2e-3"])


@pytest.fixture
def folder(launched, monkeypatch):
    monkeypatch.chdir(launched[0])
    return launched[0]


def test_a_sweep_returns_its_runs_with_what_they_vary(launched):
    folder, runs = launched
    assert [(run.state, run.step, run.varied) for run in runs] == [
        ("done", 3, {"optimizer.lr": rate}) for rate in (1e-3, 2e-3)
    ]
    assert all(run.directory.parent == folder / "runs" and run.reason is None for run in runs)


def test_the_frames_have_a_column_for_the_varied_key(folder):
    pytest.importorskip("pandas")
    frame = th.runs("runs").to_pandas()
    assert sorted(frame["optimizer.lr"]) == [1e-3, 2e-3] and "varied" not in frame
    compared = th.report(folder / "runs", allow=["optimizer"])
    assert {*compared.to_pandas()["optimizer.lr"]} == {1e-3, 2e-3}
    assert [row.as_dict()["optimizer.lr"] for row in compared.rows] == [*compared.to_pandas()["optimizer.lr"]]


def test_curves_are_arrays_and_an_unknown_one_is_a_fault(folder):
    run = th.report().rows[0]
    steps, losses = run.curve()
    assert isinstance(losses, np.ndarray) and steps.tolist() == [1, 2, 3] and losses.dtype == float
    assert run.mean_loss == pytest.approx(losses.mean())
    with pytest.raises(ConfigError, match="did you mean loss"):
        run.curve("los")


def test_figures_are_returned_and_nothing_of_matplotlib_changes(folder):
    import matplotlib

    before = dict(matplotlib.rcParams)
    figures = th.report().figures()
    assert {"loss", "throughput"} <= {*figures} and figures["loss"].axes[0].lines
    assert dict(matplotlib.rcParams) == before and not [*folder.glob("*.png")]
    with pytest.raises(ConfigError, match="tokens"):
        th.report().figures(x="hours")


def test_all_faults_of_a_line_are_one_exception_and_nothing_is_printed_or_written(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as raised:
        th.launch("-m debug=tiny seed=0 data.local_batch=0,3 gpus=2 parallelism=tp parallelism.tp=3")
    assert len(str(raised.value).splitlines()) >= 2 and "data.local_batch=0" in str(raised.value)
    assert (capfd.readouterr(), [*tmp_path.iterdir()]) == (("", ""), [])
    for call in (th.runs, th.report):
        with pytest.raises(ConfigError):
            call("nothing")


def test_plan_returns_the_layouts_or_the_fault():
    layouts = th.plan("model=llama3_8b hardware=h100 gpus=16")
    rates = [layout.tokens_per_second for layout in layouts]
    assert rates == sorted(rates, reverse=True) and layouts[0].fits == "yes" and layouts[0].gpus == 16
    assert layouts[0].document["terms"] and "document" not in layouts[0].as_dict()
    with pytest.raises(ConfigError, match="model=llama3_8c"):
        th.plan("model=llama3_8c hardware=h100 gpus=16")
    with pytest.raises(ConfigError, match="--json"):
        th.plan(["--json"])


def test_the_process_stays_as_it_is(folder):
    """Two calls of each function that reads, and of one that launches, in a new process."""
    code = """
import logging, os, signal, sys
def state():
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    return [*sys.argv], dict(os.environ), handlers, [*sys.path], os.getcwd(), [*logging.root.handlers], sys.stdout, sys.stderr
before = state()
import titan_hydra as th
assert not {"torch", "hydra", "numpy"} & {*sys.modules}, "importing"
for _ in range(2):
    th.runs("runs"), th.report().figures(), th.runs()[0].curve()
    assert [run.state for run in th.launch("debug=tiny cluster=inline steps=3 launch.mode=dry optimizer.lr=1e-3")] == ["done"]
assert state() == before
assert not {"torch", "hydra", "matplotlib.pyplot"} & {*sys.modules}
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("1 cell") == 2, done.stdout


def test_an_interrupt_is_ctrl_c_and_the_run_continues(tmp_path):
    """The run saves a checkpoint; `launch` returns it, and the process goes on."""
    # a shell starts what it runs in the background with SIGINT ignored, and this test may run there
    code = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
import titan_hydra as th
print([run.state for run in th.launch('debug=tiny cluster=local steps=100000')], flush=True)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )
    while not any(tmp_path.glob("runs/*/metrics.jsonl")) and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and out.splitlines()[-1] == "['interrupted']", out
    assert [*tmp_path.glob("runs/*/checkpoints/step-*/manifest.json")]


def test_the_page_runs_in_a_jupyter_kernel(tmp_path):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/notebook.md").read_text(), re.S | re.M)
    cells = [
        *blocks,
        "%matplotlib inline\ncompared.figures()['loss']",
        "import sys; 'torch' in sys.modules, 'hydra' in sys.modules",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=environment)
    outputs = [list(cell["outputs"]) for cell in notebook["cells"]]
    assert "done, 12 steps" in "".join(output.get("text", "") for output in outputs[0])
    assert "optimizer.lr=-1" in outputs[1][0]["text"]
    assert any("optimizer.lr" in output.get("data", {}).get("text/plain", "") for output in outputs[3])
    assert any("image/png" in output.get("data", {}) for output in outputs[-2])
    assert outputs[-1][0]["data"]["text/plain"] == "(False, False)" and (tmp_path / "loss.png").is_file()
