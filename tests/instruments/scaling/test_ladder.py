"""Test ladders: one rule for all sizes, parameters as the family counts them, and sweep files whose cells compose."""

import shlex
from pathlib import Path

import pytest

from titan_hydra import cli
from titan_hydra.core.base.amounts import brief
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.family import family_of
from titan_hydra.experiments.compose.compose import compose_cells, compose_job, compose_unchecked
from titan_hydra.instruments.scaling.ladder import ladder_cells, model_near, model_of, parameters_in

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("option", ["llama3_1b", "qwen3_1_7b", "qwen3_moe_debug", "deepseek_v3_debug"])
def test_sizes_follow_one_rule(option):
    """The model itself is a size of its own rule; half the heads give half the width and the depth, rounded."""
    base = compose_unchecked(f"model={option}").model
    assert model_of(base, base.n_heads) == base
    half = model_of(base, base.n_heads // 2)
    assert (half.dim, half.n_layers, half.n_kv_heads) == (base.dim // 2, round(base.n_layers / 2), base.n_kv_heads // 2)
    assert half.head_width == base.head_width
    assert parameters_in(half) == family_of(half).parameters(half) < parameters_in(base) / 2
    near = model_near(base, parameters_in(half))
    assert near == half


def test_a_ladder_has_each_size_on_each_number_of_tokens():
    job = compose_job("validation=on", "data.seq_len=128", "data.local_batch=4", "steps=100")
    cells = ladder_cells(job, [3e5, 3e6], [2, 8])
    assert len(cells) == 4
    for name, overrides in cells.items():
        made = compose_job("validation=on", *overrides)
        size, tokens = parameters_in(made.model), made.steps * 4 * 128
        assert name == f"{brief(size)} on {brief(tokens)}"
        assert tokens / size == pytest.approx(8 if name == [*cells][-1] else tokens / size, rel=0.01)
        assert made.lr_scheduler.warmup_steps == max(1, round(made.steps / 10))
    with pytest.raises(ConfigError, match="two cells would be"):
        ladder_cells(job, [3e6, 3.1e6], [2])
    with pytest.raises(ConfigError, match="validation=off"):
        ladder_cells(compose_job("validation=off"), [3e6], [2])


def test_a_family_that_is_no_decoder_alone_is_refused():
    with pytest.raises(ConfigError, match="is not a decoder alone"):
        parameters_in(compose_job("model=llama3_vision_debug", "data=synthetic_image_text").model)


def test_the_ladder_of_sweeps_is_what_its_own_command_writes(tmp_path, monkeypatch, capsys):
    """The third line of sweeps/ladder.yaml is the command that made it."""
    shipped = (ROOT / "sweeps/ladder.yaml").read_text()
    command = shipped.splitlines()[2].removeprefix("# Made by: titan ").rstrip(".")
    (tmp_path / "conf").mkdir()
    monkeypatch.chdir(tmp_path)
    assert cli.main(shlex.split(command)) == 0
    assert (tmp_path / "conf/sweeps/ladder.yaml").read_text() == shipped
    capsys.readouterr()
    assert cli.main(shlex.split(command)) == 2
    assert "already exists; nearest legal: ladder_2" in capsys.readouterr().err


def test_every_cell_of_the_ladder_is_a_job_of_its_size():
    for job, _, name in compose_cells(["+sweeps=ladder"]):
        tokens = job.steps * job.data.global_batch * job.data.seq_len
        assert name == f"{brief(parameters_in(job.model))} on {brief(tokens)}"


def test_a_ladder_is_written_where_the_user_stands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["scale", "--make", "mine", "--sizes", "1e6,4e6", "--multiples", "20,40"]) == 0
    assert [path.parent.name for path in tmp_path.rglob("mine.yaml")] == ["sweeps"]
    assert "titan run --config-dir conf +sweeps=mine launch.mode=dry" in capsys.readouterr().out
