"""A family with an attention kernel of its own is refused a ring by the launcher, and keeps its kernel under Ulysses."""

import pytest

from titan_hydra.core.job.config.family import FAMILIES
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.experiments.launch.own_kernels import under_a_ring

pytestmark = pytest.mark.usefixtures("user_modules")  # what these modules register is removed after the tests
FAMILY = """
from dataclasses import dataclass

from titan_hydra.core.models import Family, Model, register
from titan_hydra.core.models.qwen3.config import parameters


@dataclass
class {name}Config(Model):
    qk_norm = True


register(Family("{name}", {name}Config, model="{name}:build", parameters=parameters))


def build(config, seq_len):
    from torch import nn

    from titan_hydra.core.models.layers import Decoder

    class Windowed(nn.Module):
        pass

    model = Decoder(config, seq_len)
    for block in model.layers.values() if {own} else ():
        block.attention.sdpa = Windowed()
    return model
"""


@pytest.mark.parametrize("own", [True, False])
def test_a_ring_is_refused_before_anything_starts(own, tmp_path, monkeypatch):
    name = f"family_of_a_stranger_{own}".lower()
    (tmp_path / f"{name}.py").write_text(FAMILY.format(name=name, own=own))
    monkeypatch.syspath_prepend(str(tmp_path))
    jobs = [
        compose_job(
            "debug=tiny", f"train.imports=[{name}]", "model=qwen3_debug", f"model.family={name}", "gpus=2", *words
        )
        for words in (["parallelism=cp"], ["parallelism=cp", "parallelism.cp_rotate=ulysses"], ["parallelism=fsdp"])
    ]
    faults = under_a_ring(jobs)
    assert [(fault.key, fault.value, fault.legal) for fault in faults] == (
        [("parallelism.cp_rotate", "allgather", ("ulysses",))] if own else []
    )
    assert all("Windowed" in str(fault) for fault in faults)
    assert under_a_ring([compose_job("debug=tiny", "parallelism=cp", "gpus=2")]) == []


def test_models_of_one_family_and_modules_of_one_family_are_asked_one_by_one(tmp_path, monkeypatch):
    """Two modules give their families the same name, and a family chooses its kernel by a key."""
    monkeypatch.syspath_prepend(str(tmp_path))
    jobs = []
    for module, own in (("kernels_of_a", "config.tie_embeddings"), ("kernels_of_b", "not config.tie_embeddings")):
        family = FAMILY.format(name="of_two_modules", own=own).replace("of_two_modules:build", f"{module}:build")
        (tmp_path / f"{module}.py").write_text(family)
        monkeypatch.delitem(FAMILIES, "of_two_modules", raising=False)
        for tied in (True, False):
            words = [f"train.imports=[{module}]", "model=qwen3_debug", "model.family=of_two_modules", "gpus=2"]
            jobs.append(compose_job("debug=tiny", *words, "parallelism=cp", f"model.tie_embeddings={tied}"))
    assert [bool(under_a_ring([job])) for job in jobs] == [True, False, False, True]
    assert len(under_a_ring(jobs)) == 2
