"""Check with the planner the sizes that the options of conf/model tell: on how many 80 GiB GPUs a model can be trained."""

import re
from pathlib import Path

import pytest

from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.experiments.plan.predict import in_memory, on_nodes

MODELS = Path(__file__).parents[3] / "conf/model"
# the words of each sentence, the number of GPUs that they mean, and the overrides under which they are true
TOLD = {
    "llama3_1b": ("for one GPU", 1, ""),
    "llama3_3b": ("fits one 80 GiB GPU", 1, ""),
    "qwen3_0_6b": ("for one GPU", 1, ""),
    "qwen3_1_7b": ("for one GPU", 1, ""),
    "qwen3_4b": ("fits one 80 GiB GPU with short sequences", 1, "data.seq_len=2048 ac=full"),
    "qwen3_14b": ("for one node of eight 80 GiB GPUs", 8, "ac=full"),
    "qwen3_30b_a3b": ("for one to a few nodes", 8, "ac=full"),
    "deepseek_v3_16b": ("for one to a few nodes", 8, "ac=full"),
}
SIZE = re.compile(r"fits one|for one (?:GPU|node|to)|for \w+ (?:GPU|node)s?\b|several nodes")


@pytest.mark.parametrize("model", TOLD)
def test_a_model_fits_as_its_option_tells(model):
    words, gpus, overrides = TOLD[model]
    assert words in (MODELS / f"{model}.yaml").read_text().splitlines()[0]
    job = compose_job(
        f"model={model}", "data=synthetic", "cluster=slurm", "hardware=h100", f"gpus={gpus}", "data.local_batch=1",
        "data.global_batch=null", *overrides.split(),
    )  # fmt: skip
    assert in_memory(on_nodes(job, gpus)).fits == "yes"


def test_every_size_that_an_option_tells_is_checked():
    told = {file.stem for file in MODELS.glob("*.yaml") if SIZE.search(file.read_text().splitlines()[0])}
    assert told == set(TOLD)
