"""The real launch.py answers bad input with exit status 2, no files, and the same lines as tests/core/job/test_fuzz.py,
which calls the checks in one process.
"""

import random
import sys

import pytest

from tests.core.job import corpus
from tests.core.job.test_fuzz import verdict
from titan_hydra.experiments.launch import main


@pytest.mark.parametrize("number", [10, pytest.param(300, marks=pytest.mark.slow)])
def test_a_line_is_refused_as_the_corpus_says(launcher, number):
    lines = [
        overrides
        for overrides, refused in corpus.lines()
        # a word `--` ends a program's options, and is no override there
        if refused and "--" not in overrides and not any("\x00" in text for text in overrides)
    ]
    for overrides in random.Random(number).sample(lines, number):
        done = launcher.run(*overrides, "launch.mode=dry")
        said = [line for line in done.stderr.splitlines() if not line.startswith("warning: ")]
        if not overrides[0].startswith("-"):
            assert said == verdict([*overrides, "launch.mode=dry"]), overrides
        assert (done.returncode, done.stdout, bool(said), list(launcher.folder.iterdir())) == (2, "", True, []), (
            overrides
        )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["debug=tiny", "-m", "seed=range(0,0)"], "seed=range(0,0): no value, so the sweep has no cell\n"),
        (["-m", "optimizer=glob(zzz*)"], "optimizer=glob(zzz*): no value, so the sweep has no cell\n"),
        (["name=${nosuch.key}"], "name=${nosuch.key}: Interpolation key 'nosuch.key' not found\n"),
        (["data=text_files", "data.path=/", "launch.mode=dry"], "data.path=/: would be every file of this machine\n"),
        (
            ["paths.runs=/proc/x", "launch.mode=dry"],
            "paths.runs=/proc/x: cannot be written: No such file or directory\n",
        ),
    ],
)
def test_what_only_the_whole_command_line_shows_is_one_line(launcher, arguments, text):
    done = launcher.run(*arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", text)


def test_flags_between_overrides_and_warnings(launcher):
    done = launcher.run("debug=tiny", "-m", "seed=1,2", "lr_scheduler.warmup_steps=9", "launch.mode=dry")
    assert done.returncode == 0 and "2 cells: 2 to start" in done.stdout
    assert done.stderr == "warning: lr_scheduler.warmup_steps=9: more than steps=5: optimizer.lr is never reached\n"
    short = launcher.folder / "short.txt"
    short.write_text("a short text")
    done = launcher.run("data=text_files", "data.path=short.txt", "launch.mode=dry")
    assert done.stderr == "warning: data.path=short.txt: 12 bytes of text, and a step takes 16,384 tokens\n"


def test_what_the_command_line_takes_from_cells_is_told(launcher):
    done = launcher.run("+sweeps=laptop_layouts", "gpus=2", "sweep.cell='FSDP 4'", "launch.mode=dry")
    assert done.stderr.startswith(
        "warning: gpus=2 takes the place of what sweeps/laptop_layouts.yaml gives the cells 'FSDP 4'\n"
    )


def test_help_of_one_key(launcher):
    text = launcher.run("--help", "data.seq_len").stdout
    assert text.startswith(
        "- `data.seq_len`: int, at least 2; `256` by data=embedded, else `2048`; changes learning and work."
    )


def test_ctrl_c_that_another_error_covers_is_no_mistake_of_the_line(monkeypatch):
    """OmegaConf, interrupted while it changes a flag, raises AttributeError as it leaves."""

    def interrupted(line):
        try:
            raise KeyboardInterrupt
        finally:
            None._invalidate_flags_cache  # noqa: B018

    monkeypatch.setattr(main.Line, "compose", interrupted)
    monkeypatch.setattr(sys, "argv", ["launch.py", "debug=tiny"])
    with pytest.raises(KeyboardInterrupt):
        main.main()
