"""Use sweep files on the command line."""

import pytest

FILE = """\
# @package _global_
# An example.
defaults:
  - override /data: synthetic
lr_scheduler: {{warmup_steps: 1}}
sweep: {{name: example, cells: {cells}}}
"""


@pytest.fixture
def sweep(launcher):
    """Return a function that composes `+sweeps=example` from a folder that Hydra searches in addition to conf/."""

    def run(*arguments, cells="{a: [steps=5], b: [steps=6, parallelism=tp]}"):
        folder = launcher.folder.parent / "mine" / "sweeps"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "example.yaml").write_text(FILE.format(cells=cells))
        return launcher.run(*arguments, "+sweeps=example", "launch.mode=dry", "--config-dir", str(folder.parent))

    return run


def test_m_multiplies_the_cells_of_a_file(sweep):
    result = sweep("-m", "seed=0,1", "gpus=2")
    assert (result.returncode, result.stderr) == (0, "")
    names = ("a seed=0", "a seed=1", "b seed=0", "b seed=1")
    assert [sum(name in line for line in result.stdout.splitlines()) for name in names] == [1] * 4


def test_every_cell_that_does_not_compose_is_a_line_and_nothing_starts(sweep):
    result = sweep(cells="{a: [steps=5], b: [stesp=6], c: [model=llama4]}")
    assert (result.returncode, result.stdout) == (2, "")
    assert [line.split(":")[0] for line in result.stderr.splitlines()] == ["stesp", "model=llama4"]


def test_a_file_is_chosen_with_a_plus(launcher):
    result = launcher.run("sweeps=laptop_layouts")
    assert (result.returncode, result.stderr) == (
        2,
        "sweeps: a file of sweeps/ is added to the configuration; write +sweeps=NAME\n",
    )


@pytest.mark.parametrize("cells", ["{a: steps=5}", "{a: [steps=1,2]}", "{a: null}", "{1: [steps=5]}", "[steps=5]"])
def test_a_file_of_the_wrong_shape_is_one_line(sweep, cells):
    result = sweep(cells=cells)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "sweeps/example.yaml:" in result.stderr.partition(" ")[0]
