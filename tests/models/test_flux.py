"""FLUX: its sizes."""
import pytest
import torch

from titan_hydra import models
from titan_hydra.config import compose_job


@pytest.mark.parametrize(("name", "parameters"), [("flux_debug", None), ("flux_schnell", 11_891_178_560), ("flux_dev", 11_901_408_320)])
def test_the_number_of_parameters_is_known_without_torch(name, parameters):
    job = compose_job("data=synthetic_images", f"model={name}", "gpus=1", "comm=fake", "cluster.device_memory_gib=1000")
    with torch.device("meta"):
        model = models.build(job.model, job.data.seq_len)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert counted == models.family_of(job.model).parameters(job.model) == (parameters or counted)


def test_flops_are_those_that_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    job = compose_job("experiment=flux_laptop", "gpus=1", "model.attention=math")
    model, seq_len, text_len = models.build(job.model, job.data.seq_len), job.data.seq_len, job.model.text_len
    image = seq_len - text_len
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(1, image, job.model.patch_width), torch.randn(1, text_len, job.model.text_dim),
              torch.randn(1, job.model.pooled_dim), torch.rand(1), torch.zeros(1, image, 3)).sum().backward()
    first = 2 * (image * job.model.patch_width + text_len * job.model.text_dim + 256 + job.model.pooled_dim) * job.model.dim
    counted = counter.get_total_flops() + first  # inputs have no gradient, and so no matmul for it
    assert models.family_of(job.model).flops(job.model, seq_len, 0) * seq_len == pytest.approx(counted, rel=0.01)
