"""Plots and page: what is drawn says what the table says, and the page needs nothing but itself."""
import html.parser
import math
import xml.etree.ElementTree as ElementTree

import pytest

from titan_hydra.config import compose_job
from titan_hydra.config.compose import CONF
from titan_hydra.config.pipeline import stage_count, wrong_with
from titan_hydra.parallel.order import actions_of_ranks
from titan_hydra.report.style import LIGHT, spread
from titan_hydra.report.timeline import TIME, Pipeline, ask, play

RESULT = {"tokens_per_second": 100.0, "tokens_per_second_iqr": 5.0, "memory_gib": 10.0, "device": "H100"}
CURVE = [3 + math.exp(-step / 10) for step in range(40)]


def text(file) -> str:
    return file.read_text()


def test_bars_say_what_the_table_says(sweep, capsys, tmp_path):
    sweep.cell("base", losses=CURVE, result=RESULT)
    sweep.cell("wrong", losses=[2 * loss for loss in CURVE], result=RESULT | {"tokens_per_second": 150.0, "memory_gib": 7.5})
    status, out, _ = sweep.report(capsys, "--plots", "-o", str(tmp_path))
    assert status == 0
    assert out.split() == [str(tmp_path / f"{name}.{ending}") for name in ("throughput", "memory", "loss") for ending in ("png", "svg")]
    for said in (">150<", ">+50.00 %, loss left the band<", ">baseline<", "tokens/s per device"):
        assert said in text(tmp_path / "throughput.svg")
    for said in (">7.5<", "\N{MINUS SIGN}25.00 %", "GiB"):
        assert said in text(tmp_path / "memory.svg")
    for said in (">base (baseline)<", ">wrong<", ">step 1<", "nats per token"):
        assert said in text(tmp_path / "loss.svg")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_report_draws_the_same_bytes(sweep, capsys, tmp_path):
    sweep.cell("base", losses=CURVE, result=RESULT)
    for folder in ("one", "two"):
        sweep.report(capsys, "--plots", "--html", "-o", str(tmp_path / folder))
    for name in ("throughput.svg", "loss.svg", "report.html"):
        assert text(tmp_path / "one" / name) == text(tmp_path / "two" / name)


def test_scaling_is_drawn_against_the_ideal(sweep, capsys, tmp_path):
    for gpus, rate in ((8, 100.0), (16, 90.0), (32, 75.0)):
        sweep.cell(f"fsdp gpus={gpus}", {"gpus": gpus, "parallelism.dp_shard": gpus, "data.global_batch": 2 * gpus},
                   result=RESULT | {"tokens_per_second": rate})
    sweep.report(capsys, "--plots", "-o", str(tmp_path))
    assert ">fsdp, weak: 75%<" in text(tmp_path / "scaling.svg")
    assert ">ideal<" in text(tmp_path / "scaling.svg")


class Page(html.parser.HTMLParser):
    """Every address that a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched = []

    def handle_starttag(self, tag, attributes):
        self.fetched += [value for name, value in attributes if name in ("src", "href", "xlink:href") and not value.startswith("#")]


def test_the_page_has_everything_and_fetches_nothing(sweep, capsys, tmp_path):
    sweep.cell("a <b> & c", losses=CURVE, result=RESULT)
    sweep.cell("pipelined", {"parallelism.pp": 2, "data.local_batch": 4}, losses=CURVE, result=RESULT | {"tokens_per_second": 120.0})
    status, out, _ = sweep.report(capsys, "--html", "-o", str(tmp_path))
    assert (status, out) == (0, f"{tmp_path / 'report.html'}\n")
    page = text(tmp_path / "report.html")
    parser = Page()
    parser.feed(page)
    assert parser.fetched == []
    assert "url(http" not in page
    assert "@import" not in page
    for said in ("a &lt;b&gt; &amp; c", "+20.00 %", "parallelism.pp", "H100", "sweep.cell=pipelined parallelism.pp=2 data.local_batch=4<",
                 "git checkout 0123456", "prefers-color-scheme: dark", ">1f1b: pipelined<"):
        assert said in page, said
    pictures = page.split("<figure>")[1:]
    assert len(pictures) == 4  # throughput, memory, loss, pipeline
    assert not any(colour in picture for picture in pictures for colour in LIGHT.values())  # the page's own instead
    identifiers = [part.split('"')[0] for part in page.split(' id="')[1:]]
    assert len(identifiers) == len(set(identifiers))


@pytest.mark.filterwarnings("error")  # matplotlib says so when a plot does not fit
def test_a_single_cell_is_drawn_well_formed(sweep, capsys, tmp_path):
    sweep.cell("a <b> & c", losses=CURVE, result=RESULT)
    sweep.report(capsys, "--plots", "-o", str(tmp_path))
    files = sorted(file.name for file in tmp_path.glob("*.svg"))
    assert files == ["loss.svg", "memory.svg", "throughput.svg"]
    for file in files:
        ElementTree.parse(tmp_path / file)


SCHEDULES = {"gpipe": 1, "1f1b": 1, "looped_bfs": 2, "interleaved_1f1b": 2, "interleaved_zb": 2, "zbv": 2, "dualpipe_v": 2}


@pytest.mark.parametrize("name", [*SCHEDULES, "csv"])
def test_every_schedule_is_played_to_its_end(name):
    ranks = ["parallelism.pp=2", f"pp_schedule.csv={CONF / 'pp_schedule' / 'zb_h1.csv'}"] if name == "csv" else ["parallelism.pp=4"]
    job = compose_job("parallelism=pp", f"pp_schedule={name}", "data.local_batch=8", "model.n_layers=8", *ranks)
    actions = actions_of_ranks(job)
    assert wrong_with(actions, job) is None
    pipeline = Pipeline(name, stage_count(job), play(actions, stage_count(job)))
    for own, played in zip(actions, pipeline.ranks, strict=True):
        assert [action for _, action in played] == own
        ends = [start + TIME[action[1]] for start, action in played]
        assert all(start >= end for (start, _), end in zip(played[1:], ends, strict=False))  # one thing at a time
    assert 0 < pipeline.idle < 0.5


def test_the_bubble_is_the_textbooks():
    """1F1B and GPipe: (p - 1) / (m + p - 1) of the time (Narayanan et al., 2021)."""
    for name in ("gpipe", "1f1b"):
        job = compose_job("parallelism=pp", f"pp_schedule={name}", "data.local_batch=8", "parallelism.pp=4")
        assert Pipeline(name, 4, play(actions_of_ranks(job), 4)).idle == pytest.approx(3 / 11)


def test_the_order_can_be_asked_for_by_a_program_without_torch(sweep):
    directory = sweep.cell("pp", {"parallelism.pp": 2, "data.local_batch": 4})
    gone = sweep.cell("gone", {"parallelism.pp": 2, "pp_schedule.name": "csv", "pp_schedule.csv": "gone.csv"})
    order, missing = ask([str(directory / "config.json"), str(gone / "config.json")])
    assert order[0][:3] == [(0, "F", 0), (0, "F", 1), (0, "B", 0)]
    assert missing is None


def test_names_that_would_touch_are_moved_apart():
    assert spread([5.0, 1.0, 5.1], 1.0, 0, 10) == pytest.approx([4.55, 1.0, 5.55])
    assert spread([0.0, 0.1], 1.0, 0, 10) == pytest.approx([0.0, 1.0])
    assert spread([9.9, 10.0], 1.0, 0, 10) == pytest.approx([9.0, 10.0])
    assert spread([], 1.0, 0, 10) == []
