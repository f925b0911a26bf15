"""The README and the tutorials show what their commands print, but for rates and times, and tell one thing about GPUs."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("transcripts", ROOT / "docs/transcripts.py")
transcripts = importlib.util.module_from_spec(spec)
spec.loader.exec_module(transcripts)

README = (ROOT / "README.md").read_text()
PRINTED = [
    "step  1/8  loss 8.7772 (mean 8.7772)  norm 0.753  257 tokens/s  0.01 tflops  0:05:15 left",
    "step  8/8  loss 7.5614 (mean 8.2835)  norm 1.754  127 tokens/s  0.01 tflops",
    "run     loss  tokens/s/device",
    "a-1    8.2835              141",
]


def test_rates_and_times_may_differ():
    shown = [
        "step 1/8  loss 8.7772 (mean 8.7772) norm 0.753  9,257 tokens/s  0.9 tflops  0:00:01 left",
        "...",
        "run  loss  tokens/s/device",
        "a-1  8.2835  9",
    ]
    assert transcripts.compare(shown, PRINTED) == ([], [PRINTED[0], "...", *PRINTED[2:]])


@pytest.mark.parametrize(
    "shown", ["step 8/8  loss 7.5615  ...", "a-1  8.2836  141", "step 8/8  loss 7.5614 (mean 8.2835)  norm 1.754"]
)
def test_another_loss_or_a_cut_without_a_mark_is_found(shown):
    missing, _ = transcripts.compare(PRINTED[2:3] * shown.startswith("a-1") + [shown], PRINTED)
    assert missing == [shown]


def test_todays_line_takes_the_place_of_an_old_one():
    missing, today = transcripts.compare(["step 8/8  loss 9.9999 (mean 9.1)  ..."], PRINTED)
    assert missing and today == ["step  8/8  loss 7.5614 (mean 8.2835)  ..."]
    assert transcripts.compare(today, PRINTED) == ([], today)


def test_the_time_of_day_may_differ():
    printed = [f"03:04:05  {line}" for line in PRINTED[:2]]
    assert transcripts.compare(["01:01:01  step  8/8  loss 7.5614 (mean 8.2835)  ..."], printed) == (
        [],
        ["03:04:05  step  8/8  loss 7.5614 (mean 8.2835)  ..."],
    )
    assert transcripts.compare(["01:01:01  step  8/8  loss 7.5614 (mean 9.2835)  ..."], printed)[0]


def test_a_wrong_line_cannot_stand_before_a_right_one():
    assert transcripts.compare([PRINTED[1], PRINTED[0]], PRINTED)[0] == [PRINTED[0]]


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 130 and len(README.split()) <= 900
    assert len(list(transcripts.questions(README))) == 8


def test_the_number_of_proven_cases_is_that_of_the_table():
    rows = re.findall(r"\| yes \|$", (ROOT / "docs/lab/acceptance.md").read_text(), re.M)
    assert f"{len(rows)} layouts and recipes" in README


STATUS = "Checked and measured on one H200. Nothing has run on several GPUs: their speed and memory are predicted, not measured"
TOLD_AT = (
    "README.md",
    "docs/quickstart.md",
    "docs/parallelism.md",
    "docs/faq.md",
    "docs/index.md",
    "docs/performance.md",
    "docs/lab/performance.md",
)
OTHERWISE = re.compile(
    r"(?:\bnot|nothing|never|none)\b[^.|]{0,60}\b(?:measured|run|ran)\b[^.|]{0,20}\b(?:GPU|CUDA|card)s?\b", re.I
)


def test_one_sentence_tells_what_has_run_on_a_gpu():
    pages = {str(path.relative_to(ROOT)): " ".join(path.read_text().split()) for path in ROOT.glob("docs/**/*.md")}
    pages["README.md"] = " ".join(README.split())
    assert [name for name in TOLD_AT if STATUS not in pages[name]] == []
    del pages["docs/performance.md"]  # which tells the details
    assert {
        name: found[0] for name, text in pages.items() if (found := OTHERWISE.search(text.replace(STATUS, "")))
    } == {}


def test_no_option_tells_a_speed_that_was_not_measured_with_this_code():
    """The rates of hardware/ are the planner's input, and give their sources."""
    claim = re.compile(
        r"\b(?:on|for) (?:an? )?(?:[ABH][12]00|GB?[23]00)s?\b.*\b(?:fast|slow|GiB less)|\b(?:fast|slow)\w* .*\bon .*[ABH][12]00"
    )
    files = [path for path in ROOT.glob("conf/*/*.yaml") if path.parent.name != "hardware"]
    assert [str(path.relative_to(ROOT)) for path in files if claim.search(path.read_text())] == []


def test_the_readme_shows_what_its_lines_print(tmp_path):
    """Also the eight questions run as they stand, after the page's other lines, and the picture is the plan's output."""
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    missing, _ = transcripts.check(ROOT / "README.md", tmp_path)
    assert missing == []
    for line in transcripts.questions(README):
        assert transcripts.run(line, tmp_path).strip()
    assert [path.name for path, text in transcripts.pictures().items() if path.read_text() != text] == []


def test_the_quickstart_shows_what_its_lines_print(tmp_path):
    missing, _ = transcripts.check(ROOT / "docs/quickstart.md", tmp_path)
    assert missing == []
