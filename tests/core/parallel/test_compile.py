"""Test torch.compile by blocks: one compilation for all equal blocks, with any checkpointing, and no name of a
parameter changes.
"""

import gzip
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.profiler import profile

from titan_hydra.core import models
from titan_hydra.core.job.config import from_dict
from titan_hydra.core.job.config.schema import ActivationCheckpoint, Compile
from titan_hydra.core.models.init import init_weights
from titan_hydra.core.models.moe import Experts
from titan_hydra.core.parallel import activation_checkpoint, compile
from titan_hydra.core.parallel.mesh import Mesh
from titan_hydra.core.train.objectives.language import cross_entropy
from titan_hydra.experiments.compose.compose import compose_job

JOB = compose_job(
    "precision=fp32",
    "model.dim=32",
    "model.n_layers=4",
    "model.n_heads=4",
    "model.n_kv_heads=2",
    "model.vocab_size=64",
    "data=synthetic",
    "data.seq_len=16",
    "parallelism=single",
)
ALONE = Mesh(JOB.parallelism, None, None, None, None)


@pytest.fixture
def counter():
    """A back end that counts the graphs that it is given to compile."""
    torch.compiler.reset()
    yield CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()


def build(ac, backend, config=JOB.model):
    with torch.device("meta"):
        model = models.build(config, 16)
    names = [name for name, _ in model.named_parameters()]
    job = replace(
        JOB,
        model=config,
        ac=from_dict(ActivationCheckpoint, {"name": ac}),
        compile=Compile("block", backend) if backend else Compile("off"),
    )
    activation_checkpoint.apply(model, ALONE, job)
    compile.apply(model, ALONE, job)
    model.to_empty(device="cpu")
    init_weights(model, config, seed=0)
    assert [name for name, _ in model.named_parameters()] == names
    return model


@pytest.mark.parametrize(
    ("ac", "kinds"), [("none", 1), ("full", 1), ("op", 1), ("lean", 1), ("layer", 2), ("memory_budget", 1)]
)
def test_equal_blocks_are_compiled_once(counter, ac, kinds):
    model = build(ac, counter)
    for _ in range(2):
        model(torch.zeros(2, 16, dtype=torch.int64)).sum().backward()
    assert counter.frame_count == kinds
    assert model.tok_embeddings.weight.grad is not None


@pytest.mark.parametrize("ac", ["none", "full", "op"])
@pytest.mark.parametrize(("name", "kinds"), [("qwen3_moe_debug", 5), ("deepseek_v3_debug", 7)])
def test_of_sparse_blocks_every_part_is_compiled_once(counter, name, kinds, ac):
    """The parts are attention, scores, plan, experts and sum; DeepSeek-V3 also has shared experts and a dense block.
    Gradients equal those of eager code, and no additional matmuls are recomputed.
    """
    config = compose_job(
        f"model={name}",
        "precision=fp32",
        "data=synthetic",
        "data.seq_len=16",
        "parallelism=single",
        "model.dim=32",
        "model.n_layers=3",
        "model.expert_dim=16",
    ).model
    counters.clear()
    model, eager = build(ac, counter, config), build(ac, None, config)
    matmuls = []
    for one in (model, eager) * 2:
        loss = one(torch.arange(32).view(2, 16)).logsumexp(-1).sum()
        with profile() as seen:  # a profiler and not a dispatch mode, under which torch compiles nothing
            loss.backward()
        matmuls.append(sum(event.name == "aten::mm" for event in seen.events()))
    assert counter.frame_count == kinds and not counters["graph_break"]
    assert 0 < matmuls[2] <= matmuls[3]
    for (where, weight), other in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, other.grad, rtol=1e-4, atol=1e-6, msg=where)


def test_experts_are_compiled_once_for_all_numbers_of_tokens(counter):
    """Under ep the number differs for every layer and step. A rank may have no tokens; the compiler treats 0 and 1 as
    special cases.
    """
    config = compose_job("model=qwen3_moe_debug", "precision=fp32", "data=synthetic", "parallelism=single").model
    experts = Experts(config)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    plain = Experts(config)
    plain.load_state_dict(experts.state_dict())
    experts.compile(fullgraph=True, backend=counter, dynamic=True)
    for tokens in (7, 12, 5, 9, 2, 0, 31):
        counts = torch.bincount(torch.arange(tokens) * 3 % config.n_experts, minlength=config.n_experts).int()
        rows, order = torch.randn(tokens, config.dim, requires_grad=True), torch.randperm(tokens).int()
        inverse = order.argsort().int()
        found, expected = (
            torch.autograd.grad(one(rows, order, inverse, counts).square().sum(), [rows, *one.parameters()])
            for one in (experts, plain)
        )
        torch.testing.assert_close(found, expected)
    assert counter.frame_count == 2


@pytest.mark.slow
@pytest.mark.parametrize("ac", ["op", "lean"])
def test_parts_that_write_into_given_tensors_are_checkpointed_right(ac, counter):
    """inductor's code writes into given tensors, and is called where operators' results are saved. This once raised "a
    tensor that was saved has been mutated".
    """
    config = compose_job(
        "model=qwen3_moe_debug", "model.n_layers=1", "precision=fp32", "data=synthetic", "data.seq_len=16"
    ).model
    gradients = []
    for chosen, backend in (("none", "eager"), (ac, "inductor")):
        model = build(chosen, backend, config)
        model(torch.arange(32).view(2, 16)).square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    plain, found = gradients
    assert all((found[name] - plain[name]).norm() < 1e-5 * plain[name].norm() for name in plain)


def test_the_loss_is_compiled_too_and_only_where_asked(counter):
    loss = compile.function(cross_entropy, Compile("block", counter))
    logits, labels = torch.randn(2, 4, 8), torch.arange(8).view(2, 4)
    torch.testing.assert_close(loss(logits, labels), cross_entropy(logits, labels))
    assert counter.frame_count == 1
    assert compile.function(cross_entropy, Compile("off")) is cross_entropy


def test_the_back_end_is_the_configurations():
    with pytest.raises(Exception, match="no_such_back_end"):
        build("none", "no_such_back_end")(torch.zeros(1, 16, dtype=torch.int64))


@pytest.mark.slow
def test_a_whole_model_communicates_a_block_at_a_time(tmp_path):
    """Two blocks of 9 parameters, embedding, norm and head need 21 gathers and reductions, which become a few messages."""
    words = (
        "debug=tiny",
        "parallelism=fsdp",
        "parallelism.backend=simple_fsdp",
        "compile=model",
        "gpus=2",
        "cluster=local",
        "checkpoint=off",
        "profiling=on",
        "profiling.first_step=4",
        "profiling.steps=1",
        "steps=5",
    )
    subprocess.run([sys.executable, "launch.py", *words, f"paths.runs={tmp_path}"], check=True, capture_output=True)
    with gzip.open(next(tmp_path.glob("*/attempts/1/profile/trace_0.json.gz"))) as file:
        names = [event["name"] for event in json.load(file)["traceEvents"]]
    for operator in ("_c10d_functional::all_gather_into_tensor", "_c10d_functional::reduce_scatter_tensor"):
        assert 3 <= sum(name.startswith(operator) for name in names) <= 6, operator
