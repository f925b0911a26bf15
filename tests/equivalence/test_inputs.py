"""What all layouts of a job have in common is checked apart from the code that makes it: the distribution of initial
weights, and the order of samples. The mutants of `python -m tests.equivalence.mutants` show what else the float64 reference notices.
"""

import torch

from titan_hydra.core import data, models
from titan_hydra.core.data.batch import Batch
from titan_hydra.core.models.init import init_weights
from titan_hydra.experiments.compose.compose import compose_job, later_wins
from titan_hydra.instruments.verify.case import BASE
from titan_hydra.instruments.verify.inputs import Order, odd_starts


def test_a_tensor_that_starts_from_another_distribution_is_counted():
    job = compose_job(*later_wins(*BASE, "model.n_layers=2"))
    model = models.build(job.model, job.data.seq_len)
    init_weights(model, job.model, job.seed)
    start = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert odd_starts(start, job) == 0
    start["layers.1.attention.wo.weight"] *= 2**0.5
    start["layers.0.ffn_norm.weight"] += 0.1
    assert odd_starts(start, job) == 2


def changed(batch, **tensors):
    return Batch(batch.tensors | tensors, batch.dims)


def test_samples_that_come_again_or_do_not_go_on_are_counted():
    packed = ("data=embedded", "model.vocab_size=4096", "data.document_mask=false", "data.global_batch=4")
    job = compose_job(*later_wins(*BASE, *packed))
    loader = data.build(job, 0, 1)
    first, second = loader.next(), loader.next()
    loader.close()
    order = Order(job)
    assert [order.faults(batch) for batch in (first, second)] == [0, 0]
    order = Order(job)
    late = changed(second, tokens=torch.cat((second["tokens"][:, 1:], second["labels"][:, -1:]), 1))
    assert [order.faults(batch) for batch in (first, late)] == [0, 4], "a token is lost between two samples"
    assert order.repeated(first) == 4
    assert Order(job).repeated(changed(first, tokens=first["tokens"][:1].expand(4, -1))) == 3
