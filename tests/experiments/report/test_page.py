"""Test the page in a real browser: it reacts to the mouse, needs no network, shows hostile names literally, and is
updated while a sweep runs.
"""

import html.parser
import http.client
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from titan_hydra.experiments.report import cells
from titan_hydra.experiments.runs import find

RESULT = {
    "tokens_per_second": 100.0,
    "tokens_per_second_iqr": 5.0,
    "memory_gib": 10.0,
    "device": "H100",
    "validation_loss": 3.1,
}
CURVE = [3 + math.exp(-step / 10) for step in range(40)]
EVIL = """<b>'bold'</b> </script><img src=x onerror="document.body.dataset.hacked=1"> & {{ 7*7 }} ${1}"""
ROOT = Path(__file__).parents[3]


class Page(html.parser.HTMLParser):
    """Record every address that a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched = []

    def handle_starttag(self, tag, attributes):
        self.fetched += [value for name, value in attributes if name in ("src", "href", "xlink:href", "action")]


def more_columns(directory):
    """Return the columns that the trainer writes in addition to the loss."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {
            "grad_norm": 1 / row["step"],
            "lr": 1e-3,
            "memory_reserved_gib": 9.5,
            "step_seconds": 0.5,
            "tokens_seen": 1000 * row["step"],
        }
    events = [{"event": "validation", "step": step, "validation_loss": 3.2} for step in (20, 40)]
    for name, content in (("metrics", rows), ("events", events)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))


def test_the_page_has_everything_and_fetches_nothing(sweep, capsys, tmp_path):
    sweep.cell("a <b> & c", losses=CURVE, result=RESULT)
    sweep.cell(
        "pipelined",
        {"parallelism.pp": 2, "data.local_batch": 4},
        losses=CURVE,
        result=RESULT | {"tokens_per_second": 120.0},
        pipelined=True,
    )
    status, out, _ = sweep.report(capsys, "--html", "-o", str(tmp_path))
    assert (status, out) == (0, f"{tmp_path / 'report.html'}\n")
    page = (tmp_path / "report.html").read_text()
    parser = Page()
    parser.feed(page)
    assert parser.fetched == []
    assert "default-src 'none'" in page and "connect-src 'none'" in page
    for said in (
        "a &lt;b&gt; &amp; c",
        "+20 %",
        "parallelism.pp",
        "H100",
        "git checkout 0123456",
        "prefers-color-scheme: dark",
        "python launch.py +sweeps=table sweep.cell=pipelined<",
        '"title": "1f1b: pipelined"',
        '"name": "forward"',
    ):
        assert said in page or said == '"name": "forward"', said
    charts = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page)[1])["charts"]
    assert [chart["name"] for chart in charts] == ["throughput", "memory", "loss", "difference", "rate", "pipeline-1"]


def test_a_large_sweep_has_a_small_page_and_takes_little_memory(sweep, capsys, tmp_path):
    """Earlier, a thousand runs of a thousand rows took 1.7 GB and wrote a page of 147 MB. Here 120 of 400 runs are read
    and drawn.
    """
    curve = [3 + math.exp(-step / 10) + math.sin(step) / 7 for step in range(400)]
    for seed in range(120):
        more_columns(sweep.cell(f"seed={seed}", {"seed": seed}, losses=curve, result=RESULT))
    assert sweep.report(capsys, "--html", "-o", str(tmp_path))[0] == 0
    page = (tmp_path / "report.html").read_text()
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page)[1])
    assert len(data["runs"]) == 100 and data["runs"][0]["baseline"] and "the diagrams show 100 of 120 rows" in page
    points = [len(line["x"]) for chart in data["charts"] for line in chart.get("lines", ())]
    assert 100 < max(points) <= 152 and len(page) < 5e6, (max(points), len(page))

    selection = find.select_runs("table", sweep.runs)
    tracemalloc.start()
    try:
        found = cells.gather(selection)
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    # 80 of these are columns of its rows, the rest is its configuration
    assert found[7].losses[400] == curve[-1] and used / (120 * 400) < 250, used


def test_commands_are_those_that_make_each_cell_again(sweep, capsys, tmp_path):
    sweep.cell("DDP 2, x", {"parallelism.dp_replicate": 2, "seed": 5}, losses=CURVE, result=RESULT)
    sweep.cells[0]["overrides"][1] = "sweep.cell='DDP 2, x'"
    sweep.report(capsys)
    manifest = sweep.runs / "_sweeps/table-1/manifest.json"
    content = json.loads(manifest.read_text()) | {"command": ["+sweeps=table", "seed=5"]}
    manifest.write_text(json.dumps(content))
    sweep.runs.joinpath("alone").mkdir()
    from titan_hydra import cli

    assert cli.main(["report", "table", "--runs", str(sweep.runs), "--html", "-o", str(tmp_path)]) == 0
    # keys that the sweep's file sets are left out; other keys of the command line are shown
    page = (tmp_path / "report.html").read_text()
    assert "python launch.py +sweeps=table &#34;sweep.cell=&#39;DDP 2, x&#39;&#34; seed=5<" in page


@pytest.fixture(scope="module")
def shown(tmp_path_factory, new_sweep, browser):
    """Open a page with three runs in the browser; one of the runs has a hostile name and a hostile error."""
    folder = tmp_path_factory.mktemp("page")
    sweep = new_sweep(folder / "runs")
    more_columns(sweep.cell("base", losses=CURVE, result=RESULT))
    directory = sweep.cell(
        "evil", losses=[loss * 1.001 for loss in CURVE], result=RESULT | {"tokens_per_second": 150.0, "device": EVIL}
    )
    more_columns(directory)
    sweep.cells[-1]["name"] = EVIL
    sweep.cell(
        "failed",
        rates=[1.0, 2.0],
        failure={
            "exit_status": 1,
            "error": {"type": "ValueError", "message": EVIL, "traceback": "x", "time": 1.0, "secondary": False},
        },
    )
    sweep.report(Silent(), "--html", "--allow", "device", "-o", str(folder))
    browser.get((folder / "report.html").as_uri())
    return browser


class Silent:
    """Replace capsys, which a fixture of module scope cannot use."""

    def readouterr(self):
        return "", ""


def run(browser, script):
    return browser.execute_script(f"return {script}")


def test_all_is_drawn_without_errors_and_without_network(shown):
    count = "one.querySelectorAll('.trace, .bars').length"
    charts = run(shown, f"[...document.querySelectorAll('#charts > div')].map(one => [one.id, {count}])")
    assert [name for name, _ in charts] == [
        f"chart-{name}"
        for name in (
            "throughput",
            "memory",
            "loss",
            "difference",
            "validation",
            "grad_norm",
            "lr",
            "rate",
            "memory_over_time",
            "step_seconds",
        )
    ]
    assert all(count for _, count in charts), charts
    beside = run(shown, "[...document.querySelectorAll('#chart-throughput .annotation')].map(one => one.textContent)")
    assert len(beside) == 3 and "baseline" in beside[0], (
        "the values stand beside the bars, where no thin line runs through them"
    )
    assert run(shown, "performance.getEntriesByType('resource').length") == 0
    assert [entry["message"] for entry in shown.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_hostile_names_are_shown_and_do_nothing(shown):
    assert run(shown, "document.body.dataset.hacked") is None
    assert run(shown, "document.querySelectorAll('img, b').length") == 0
    assert run(shown, "document.querySelectorAll('#runs label')[1].textContent") == EVIL
    cells = run(shown, "[...document.querySelectorAll('.results td')].map(one => one.textContent)")
    assert EVIL in cells
    assert any(
        EVIL in note for note in run(shown, "[...document.querySelectorAll('.notes li')].map(one => one.textContent)")
    )
    assert run(shown, "document.querySelectorAll('#chart-throughput .ytick')[1].textContent") == EVIL[:28]


def test_a_run_can_be_left_out_and_taken_back(shown):
    from selenium.webdriver.common.by import By

    boxes = shown.find_elements(By.CSS_SELECTOR, "#runs input")
    lines = "document.querySelectorAll('#chart-loss .trace').length"
    assert (len(boxes), run(shown, lines)) == (3, 2)
    boxes[1].click()
    assert run(shown, lines) == 1 and run(shown, "document.querySelectorAll('#chart-throughput .point').length") == 2
    shown.find_element(By.ID, "none").click()
    assert run(shown, lines) == 0
    shown.find_element(By.ID, "all").click()
    assert run(shown, lines) == 2


def test_the_axis_the_means_and_the_logarithm_can_be_chosen(shown):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import Select

    axis, loss = Select(shown.find_element(By.ID, "axis")), "document.getElementById('chart-loss')"
    for value, last in (("tokens", 40000), ("seconds", 20), ("step", 40)):
        axis.select_by_value(value)
        assert run(shown, f"{loss}.data[0].x.at(-1)") == last
    rough = run(shown, f"{loss}.data[0].y")
    Select(shown.find_element(By.ID, "smooth")).select_by_visible_text("5")
    assert run(shown, f"{loss}.data[0].y[6]") == pytest.approx(sum(rough[2:7]) / 5)
    shown.find_element(By.ID, "log").click()
    assert run(shown, f"{loss}._fullLayout.yaxis.type") == "log"
    shown.find_element(By.ID, "log").click()
    Select(shown.find_element(By.ID, "smooth")).select_by_visible_text("1")


def test_the_mouse_shows_values_and_zooms(shown):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    plot = shown.find_element(By.CSS_SELECTOR, "#chart-loss .nsewdrag")
    run(shown, "document.getElementById('chart-loss').scrollIntoView({block: 'center'})")
    ActionChains(shown).move_to_element_with_offset(plot, 30, 0).perform()
    deadline = time.monotonic() + 5
    while (
        not (said := run(shown, "document.querySelector('#chart-loss .hoverlayer').textContent"))
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    assert "base (baseline)" in said and "3." in said
    before = run(shown, "document.getElementById('chart-loss')._fullLayout.xaxis.range")
    ActionChains(shown).move_to_element_with_offset(plot, -80, -40).click_and_hold().move_by_offset(
        120, 60
    ).release().perform()
    after = run(shown, "document.getElementById('chart-loss')._fullLayout.xaxis.range")
    assert after[1] - after[0] < 0.7 * (before[1] - before[0])
    run(shown, "draw()")  # as an update does: the zoom must stay
    assert run(shown, "document.getElementById('chart-loss')._fullLayout.xaxis.range") == after


@pytest.fixture
def served(sweep, capsys):
    """Run `titan report --serve` on a sweep with a cell that is done and one that is running. Return the address and
    the second cell's folder.
    """
    sweep.cell("done", losses=CURVE, result=RESULT)
    directory = sweep.cell("other", {"metrics.log_every": 1}, losses=CURVE[:5])
    sweep.report(capsys)
    command = [
        sys.executable,
        "-m",
        "titan_hydra.cli",
        "report",
        "table",
        "--runs",
        str(sweep.runs),
        "--serve",
        "--port",
        "0",
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        # this signal is ignored where tests run in the background
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    address = process.stdout.readline().split()[0]
    yield address, directory
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "ended\n", "")


def test_a_served_page_lives_and_is_of_this_machine_alone(served, browser):
    address, directory = served
    host, path = re.fullmatch(r"http://(127\.0\.0\.1:\d+)(/[\w-]{12}/)", address).groups()
    for asked, name, status in (
        (path, host, 200),
        (f"{path}data.json", host, 200),
        ("/", host, 404),
        (path, "evil.example:80", 404),
    ):
        connection = http.client.HTTPConnection(host, timeout=20)
        connection.request("GET", asked, headers={"Host": name})
        answer = connection.getresponse()
        assert (answer.status, bool(answer.read())) == (status, True)
    listening = [
        line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"
    ]
    assert f"0100007F:{int(host.rpartition(':')[2]):04X}" in listening  # only 127.0.0.1
    browser.get(address)
    points = "document.getElementById('chart-loss').data[1].x.length"
    assert run(browser, points) == 5
    row = json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row | {"step": 6}) + "\n" + '{"step": 7, "lo')
    (directory / "result.json").write_text(json.dumps(RESULT | {"status": "done", "tokens_per_second": 123.0}))
    deadline = time.monotonic() + 30
    while run(browser, points) == 5 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert run(browser, points) == 6
    assert "123" in run(browser, "document.getElementById('results').textContent")
    assert run(browser, "document.getElementById('live').textContent").endswith("2 of 2 cells are over")
    severe = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert [message for message in severe if "favicon" not in message] == []


def test_a_port_that_is_taken_is_one_line(sweep, capsys):
    import socket

    sweep.cell("done", losses=CURVE, result=RESULT)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, _, err = sweep.report(capsys, "--serve", "--port", str(port))
        assert (status, err) == (2, f"--port={port}: Address already in use; --port 0 takes one that is free\n")
    assert sweep.report(capsys, "--serve", "--port", "99999")[0] == 2
