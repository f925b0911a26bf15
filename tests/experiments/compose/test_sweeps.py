"""Test sweep files: their cells, which values win, what is printed for a wrong file, and that every file of sweeps/ can
run unchanged.
"""

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import open_dict

from titan_hydra.core.job.config import identity, read
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.rules import cluster
from titan_hydra.core.job.rules import compile as rules_of_compile
from titan_hydra.core.job.rules.checks import check
from titan_hydra.experiments.compose import describe
from titan_hydra.experiments.compose.compose import CONF, register_schema
from titan_hydra.experiments.compose.sweep import expand_sweep, named

FILES = describe.option_files("sweeps")
EXAMPLE = """\
# @package _global_
# An example.
defaults:
  - override /model: llama3_8b
  - override /data: synthetic
steps: 100
sweep:
  name: example
  baseline: {baseline}
  cells: {cells}
"""
CELLS = "{fsdp: [parallelism=fsdp, gpus=2], 'tp, alone': [parallelism=tp, steps=50]}"


def expanded(*overrides):
    """Return (cells, faults) of one command line without -m."""
    register_schema()
    faults = []
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", list(overrides), return_hydra_config=True)
        HydraConfig.instance().set_config(config)  # as in launch.py's function
        try:
            with open_dict(config):
                del config.hydra
            return expand_sweep(config, [text for text in overrides if not text.startswith("hydra.")], faults), faults
        finally:
            HydraConfig.instance().cfg = None  # other tests must not see ${hydra:...}


@pytest.fixture
def example(tmp_path):
    """Return a function that writes sweeps/example.yaml into a separate folder and expands it, with overrides."""

    def run(*overrides, cells=CELLS, baseline="fsdp"):
        (tmp_path / "sweeps").mkdir(exist_ok=True)
        (tmp_path / "sweeps" / "example.yaml").write_text(EXAMPLE.format(cells=cells, baseline=baseline))
        return expanded(f"hydra.searchpath=[file://{tmp_path}]", "+sweeps=example", *overrides)

    return run


def frozen(config):
    job, faults = read(config)
    assert not faults
    return freeze(job)


def test_a_file_becomes_its_cells_which_know_their_names(example):
    cells, faults = example()
    assert not faults
    jobs = [frozen(config) for config, _ in cells]
    assert [(job.sweep.name, job.sweep.cell, job.sweep.baseline, job.sweep.cells) for job in jobs] == [
        ("example", "fsdp", "fsdp", {}),
        ("example", "tp, alone", "fsdp", {}),
    ]
    assert [(job.model.name, job.parallelism.name, job.gpus, job.steps) for job in jobs] == [
        ("llama3_8b", "fsdp", 2, 100),
        ("llama3_8b", "tp", 2, 50),
    ]


def test_a_cell_wins_over_the_file_and_the_command_line_over_both(example):
    cells, _ = example("steps=7", "parallelism=ddp", "gpus=4", "data=embedded")
    jobs = [frozen(config) for config, _ in cells]
    assert [(job.parallelism.name, job.steps, job.gpus, job.data.name) for job in jobs] == [
        ("ddp", 7, 4, "embedded")
    ] * 2


def test_the_overrides_of_a_cell_make_that_cell_again(example):
    cells, _ = example("seed=3")
    config, overrides = cells[1]
    assert overrides == ["+sweeps=example", "sweep.cell='tp, alone'", "parallelism=tp", "steps=50", "seed=3"]
    again, faults = example(*overrides[1:])
    assert not faults and [other for other, _ in again] == [config]


@pytest.mark.parametrize(
    ("cells", "overrides", "said"),
    [
        (
            "{a: [steps=5], b: [parallelisn=fsdp], c: [steps=x]}",
            [],
            ["parallelisn: no such key or group; did you mean parallelism", "steps=x: must be a whole number"],
        ),
        ("{a: [parallelism=fspd]}", [], ["parallelism=fspd: no such option; did you mean fsdp"]),
        ("{a: ['steps=1,2']}", [], ["steps=1,2: several values need -m"]),
        (CELLS, ["sweep.cell=ftp"], ["sweep.cell=ftp: sweeps/example.yaml has no such cell; one of "]),
        (CELLS, ["sweep.baseline=ftp"], ["sweep.baseline=ftp: sweeps/example.yaml has no such cell; one of "]),
    ],
)
def test_what_is_wrong_with_cells_is_a_line_each(example, cells, overrides, said):
    _, faults = example(*overrides, cells=cells, baseline="null" if cells != CELLS else "fsdp")
    assert len(faults) == len(said)
    for fault, start in zip(faults, said, strict=True):
        assert fault.startswith(start) and "sweeps/example.yaml" in fault and "\n" not in fault


def test_m_multiplies_a_file_and_no_two_cells_have_the_same_name(example):
    cells = named(example("seed=0")[0] + example("seed=1")[0])
    assert [config.sweep.cell for config, _ in cells] == [
        "fsdp seed=0",
        "tp, alone seed=0",
        "fsdp seed=1",
        "tp, alone seed=1",
    ]
    assert {(config.sweep.name, config.sweep.baseline) for config, _ in cells} == {("example", "fsdp seed=0")}


def test_cells_of_m_are_named_by_what_differs():
    typed = [
        ["parallelism=ddp", "data.local_batch=4", "gpus=2"],
        ["parallelism=fsdp", "data.local_batch=4", "gpus=2"],
        ["parallelism=ddp", "data.local_batch=8", "gpus=2"],
        ["parallelism=ddp", "data.local_batch=4", "gpus=2"],
    ]
    cells = named([cell for overrides in typed for cell in expanded(*overrides)[0]])
    assert {config.sweep.name for config, _ in cells} == {"parallelism-local_batch"}
    assert [config.sweep.cell for config, _ in cells] == [
        "parallelism=ddp data.local_batch=4",
        "parallelism=fsdp data.local_batch=4",
        "parallelism=ddp data.local_batch=8",
        "parallelism=ddp data.local_batch=4 (2)",
    ]
    alone = named(expanded("seed=4")[0])[0][0].sweep
    assert (alone.name, alone.cell) == (None, None)


def test_names_that_are_given_stay():
    cells = named(
        expanded("seed=0", "sweep.name=mine", "sweep.cell=a")[0]
        + expanded("seed=1", "sweep.name=mine", "sweep.cell=b")[0]
    )
    assert [(config.sweep.name, config.sweep.cell) for config, _ in cells] == [("mine", "a"), ("mine", "b")]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_sweep_file_says_when_to_choose_it_and_all_its_cells_pass_the_checks(file, monkeypatch):
    monkeypatch.setattr(cluster, "devices_here", lambda: 0)
    assert file.read_text().startswith("# @package _global_\n# ") and describe.when(file).endswith(".")
    assert all(line.startswith("#") for line in file.read_text().partition("defaults:")[0].splitlines())
    cells, faults = expanded(f"+sweeps={file.stem}", *([] if file.stem.startswith("laptop") else ["cluster=slurm"]))
    assert not faults and len(cells) > 1
    jobs = [frozen(config) for config, _ in cells]
    assert {job.sweep.name for job in jobs} == {file.stem}
    assert jobs[0].sweep.baseline in {job.sweep.cell for job in jobs}
    assert {job.sweep.cell: [str(fault) for fault in check(job)] for job in jobs} == {
        job.sweep.cell: [] for job in jobs
    }
    assert len({identity(job) for job in jobs}) == len(jobs)


GROWING = [(8, 1, 32768), (4, 2, 65536), (2, 4, 131072), (1, 8, 262144)]  # dp_shard, cp, seq_len of tables 5 and 6
# (dp_shard, tp, pp, cp, local batch, global batch, seq_len, ac, compile, asynchronous TP, number format) of each row
PAPER = {
    "paper_table1": [
        (8, 1, 1, 1, 2, 16, 8192, "op", how, False, what)
        for how, what in (("off", "bf16"), ("block", "bf16"), ("block", "float8_tensorwise"))
    ],
    "paper_table2": [
        (128, 1, 1, 1, 2, 256, 8192, "op", how, False, what)
        for how, what in (("off", "bf16"), ("block", "bf16"), ("block", "float8_tensorwise"))
    ],
    "paper_table3 ac=full data.local_batch=16": [
        (32, 8, 1, 1, 16, 512, 8192, "full", "block", overlap, "float8_tensorwise") for overlap in (False, True)
    ],
    "paper_table4 compile=block parallelism.async_tp=true": [
        (4, 8, 16, 1, 32, 128, 8192, "full", "block", True, "float8_tensorwise")
    ]
    * 2,
    "paper_table5": [
        (shard, 1, 1, cp, 1, shard, length, "full", "block", False, "float8_tensorwise")
        for shard, cp, length in GROWING
    ],
    "paper_table6 compile=block parallelism.async_tp=true": [
        (shard, 8, 8, cp, 8, 8 * shard, length, "full", "block", True, "float8_tensorwise")
        for shard, cp, length in GROWING
    ],
    "loss_convergence": [
        (8, 1, 1, 1, 4, 32, 8192, "op", "off", False, "bf16"),
        (8, 2, 2, 1, 4, 32, 8192, "op", "block", True, "float8_tensorwise"),
        (8, 2, 2, 2, 4, 32, 8192, "op", "block", True, "float8_tensorwise"),
        (8, 1, 1, 8, 4, 32, 8192, "op", "off", False, "bf16"),
    ],
}


@pytest.mark.parametrize("line", PAPER)
def test_the_papers_rows_are_as_it_has_them_on_the_torch_that_can_run_them(line, monkeypatch):
    monkeypatch.setattr(rules_of_compile, "versions", lambda: {"torch": "2.11.0"})
    cells, faults = expanded(*f"+sweeps={line} cluster=slurm".split())
    jobs = [frozen(config) for config, _ in cells]
    assert not faults and [check(job) for job in jobs] == [[]] * len(jobs)
    assert [
        (
            job.parallelism.dp_shard,
            job.parallelism.tp,
            job.parallelism.pp,
            job.parallelism.cp,
            job.data.local_batch,
            job.data.global_batch,
            job.data.seq_len,
            job.ac.name,
            job.compile.name,
            job.parallelism.async_tp,
            job.precision.name,
        )
        for job in jobs
    ] == PAPER[line]
    assert line.startswith("loss") or all(job.pp_schedule.microbatches in (None, job.parallelism.pp) for job in jobs)
    # the default of TorchTitan at that time
    assert all(job.pp_schedule.microbatches == job.parallelism.pp for job in jobs if job.parallelism.pp > 2)
