"""A model family from a user's own module trains on any layout; the example is the one in docs/extend.md."""
import re
import subprocess
import sys
from pathlib import Path

import pytest

from titan_hydra import models
from titan_hydra.base.errors import ConfigError
from titan_hydra.config import compose_job
from titan_hydra.train.spec import SPECS, TrainSpec, register, spec_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path):
    """A user's folder with the module of docs/extend.md."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs/extend.md").read_text(), re.S).group(1)
    (tmp_path / "parallel_llama.py").write_text(code)
    return tmp_path


def launch(folder, *arguments):
    return subprocess.run([sys.executable, str(ROOT / "launch.py"), "debug=tiny", *arguments], cwd=folder, capture_output=True, text=True,
                          check=False)


@pytest.mark.slow
def test_the_example_of_the_guide_trains_and_learns_on_two_ranks(folder):
    run = launch(folder, "train.imports=[parallel_llama]", "model.family=parallel_llama", "gpus=2", "steps=20")
    assert run.returncode == 0, run.stdout + run.stderr
    plain = launch(folder, "gpus=2", "steps=20")
    losses = [re.findall(r"loss (\d+\.\d+)", result.stdout) for result in (run, plain)]
    assert losses[0][0] != losses[1][0], "the user's model is not the one that ran"
    assert float(losses[0][-1]) < float(losses[0][0]) - 0.5


def test_a_family_or_module_that_is_not_there_is_one_line(folder):
    for arguments, text in ((["model.family=parallel_llama"], "model.family=parallel_llama: no such model"),
                            (["train.imports=[nowhere]"], "train.imports=[nowhere]: there is no module nowhere")):
        run = launch(folder, *arguments)
        assert (run.returncode, run.stderr.count("\n")) == (2, 1), run.stderr
        assert text in run.stderr
        assert not (folder / "runs").exists()


def test_a_family_that_no_import_brings_is_refused_on_the_rank():
    job = compose_job("train.imports=[json]", "model.family=mine")
    with pytest.raises(ConfigError, match="there are: llama3"):
        spec_of(job)


def test_a_name_is_given_once():
    register(SPECS["llama3"])
    with pytest.raises(ConfigError, match="taken"):
        register(TrainSpec("llama3", models.Llama3, lr_factor=max))
