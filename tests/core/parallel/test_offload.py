"""ac=offload: blocks' inputs are in the host's memory between forward and backward, and the gradients are those of ac=full."""

import torch

from titan_hydra.core import models
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.models.init import init_weights
from titan_hydra.core.parallel import activation_checkpoint
from titan_hydra.core.parallel.offload import Host, Kept
from titan_hydra.experiments.compose.compose import compose_job, compose_unchecked
from titan_hydra.experiments.plan import memory, predict

TINY = ("debug=tiny", "precision=fp32", "data.local_batch=4", "data.global_batch=4")


def gradients(mode: str, monkeypatch) -> tuple[dict[str, torch.Tensor], list[Host]]:
    """Return the gradients after a forward and a backward of two microbatches in this order: 1, 2; 1, 2."""
    hosts = []
    monkeypatch.setattr(activation_checkpoint, "Host", lambda: hosts.append(Host()) or hosts[-1])
    job = compose_job(*TINY, f"ac={mode}")
    model = models.build(job.model, job.data.seq_len)
    init_weights(model, job.model, job.seed)
    activation_checkpoint.apply(model, None, job)
    losses = [model(torch.tensor([[1, 2, 3, first]])).square().mean() for first in (5, 9)]
    waiting = [len(host.waiting) for host in hosts]
    for loss in losses:
        loss.backward()
    assert waiting == [2 * len(model.layers)] * len(hosts)
    return {name: parameter.grad for name, parameter in model.named_parameters()}, hosts


def test_gradients_are_those_of_full_recomputation(monkeypatch):
    (right, none), (found, (host,)) = (gradients(mode, monkeypatch) for mode in ("full", "offload"))
    assert none == [] and not host.waiting  # nothing outlives its backward
    assert all(torch.equal(found[name], gradient) for name, gradient in right.items())


def test_what_has_no_gradient_stays_where_it_is():
    host, table, saved = Host(), torch.ones(3), torch.ones(3, requires_grad=True) * 2
    kept = host.keep(saved)
    assert host.keep(table) is table and isinstance(kept, Kept)
    assert torch.equal(host.bring(kept), saved) and host.bring(table) is table


def test_a_plan_counts_two_inputs_on_the_device_and_all_of_them_on_the_host():
    words = (
        "model=llama3_8b",
        "hardware=h100",
        "parallelism=fsdp",
        "gpus=8",
        "cluster=slurm",
        "data=synthetic",
        "data.seq_len=8192",
    )
    size = 8192 * 4096 * 2
    full, offload = (
        freeze(compose_unchecked(*words, "data.local_batch=1", f"ac={mode}")) for mode in ("full", "offload")
    )
    terms = [{term.name: term.bytes for term in memory.peak(job).terms} for job in (full, offload)]
    assert "inputs from the host" not in terms[0] and terms[1]["inputs from the host"] == 2 * size
    assert memory.SAVED not in terms[1] and memory.on_the_host(offload) == 32 * size
    assert predict.notes(full) == [] and "2.00 GiB" in predict.notes(offload)[0]
