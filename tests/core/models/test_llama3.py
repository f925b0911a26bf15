"""Test the model in one process: stages compose, documents do not see each other, a tied head stays tied, and a block
compiles without a graph break.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.models import build
from titan_hydra.core.models.init import init_weights
from titan_hydra.core.models.layers import SDPA, rotate


def model_of(config, seq_len=32):
    with torch.device("meta"):
        model = build(config, seq_len)
    model.to_empty(device="cpu")
    draw(model, config)
    return model


def draw(model, config):
    """Draw initial weights that are large enough for attention and positions to show in the logits."""
    init_weights(model, config, seed=0)
    for parameter in model.layers.parameters():
        parameter.data.mul_(5 if parameter.dim() > 1 else 1)


def some_tokens(batch=2, seq=32, seed=0):
    return torch.randint(0, 99, (batch, seq), generator=torch.Generator().manual_seed(seed))


def gradients(model, tokens):
    """Return every parameter's whole gradient; the loss is the mean cross-entropy of the next token."""
    logits = model(tokens)
    F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
    return {
        name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for name, p in model.named_parameters()
    }


def test_names_are_the_papers(tiny):
    model = model_of(tiny(n_layers=1))
    block = [
        "attention.wq",
        "attention.wk",
        "attention.wv",
        "attention.wo",
        "feed_forward.w1",
        "feed_forward.w2",
        "feed_forward.w3",
        "attention_norm",
        "ffn_norm",
    ]
    assert list(model.state_dict()) == [
        "tok_embeddings.weight",
        *(f"layers.0.{name}.weight" for name in block),
        "norm.weight",
        "output.weight",
    ]
    assert isinstance(model.layers["0"].attention.sdpa, SDPA)


def test_a_token_sees_no_later_one(tiny):
    model, tokens = model_of(tiny()), some_tokens()
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 99
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20], after[:, 20])


def test_stages_compose_to_the_same_logits(tiny):
    whole, tokens = model_of(tiny()), some_tokens()
    first, middle, last = (copy.deepcopy(whole) for _ in range(3))
    for stage, keep in [(first, "0"), (middle, "1"), (last, "2")]:
        for layer in set(stage.layers) - {keep}:
            del stage.layers[layer]
    first.norm = first.output = middle.tok_embeddings = middle.norm = middle.output = last.tok_embeddings = None
    assert torch.equal(last(middle(first(tokens))), whole(tokens))
    assert {name for stage in (first, middle, last) for name in stage.state_dict()} == set(whole.state_dict())


def test_given_positions_are_used(tiny):
    model, tokens = model_of(tiny(factor=8.0)), some_tokens()
    counting = torch.arange(32).expand(2, 32)
    assert torch.equal(model(tokens, counting), model(tokens))
    assert not torch.allclose(model(tokens, counting * 3 % 32), model(tokens), atol=1e-3)


def test_documents_do_not_see_each_other(tiny):
    model = model_of(tiny())
    lengths = [[5, 20, 7], [32]]
    tokens = some_tokens()
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    packed = model(tokens, positions, ends=torch.tensor([[5, 25, 32], [32, 32, 32]], dtype=torch.int32))
    for row, parts in enumerate(lengths):
        for part, logits in zip(tokens[row].split(parts), packed[row].split(parts), strict=True):
            torch.testing.assert_close(model(part[None])[0], logits, atol=1e-5, rtol=0)
    assert not torch.allclose(model(tokens)[0, 5:], packed[0, 5:], atol=1e-3)


@pytest.mark.parametrize("backend", ["auto", "flash", "math"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_queries_share_key_value_heads(backend, kv_heads, tiny):
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, 16, 8, dtype=torch.float64, requires_grad=True) for heads in (4, kv_heads, kv_heads)
    )
    repeated = [x.repeat_interleave(4 // kv_heads, 1) for x in (k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(q, *repeated, is_causal=True)
    actual = SDPA(backend)(q, k, v)
    torch.testing.assert_close(actual, expected)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (actual, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_attention_that_the_cpu_lacks_is_refused(tiny):
    with pytest.raises(
        ConfigError, match=r"model.attention=cudnn: does not exist on the CPU; one of auto, flash, math"
    ):
        model_of(tiny(attention="cudnn"))(some_tokens())


def test_unknown_family_is_refused(tiny):
    with pytest.raises(ConfigError, match=r"model.family=llama9: no such model; nearest legal: llama3"):
        build(tiny(family="llama9"), 8)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rope_scaling_keeps_fast_frequencies_and_stretches_slow_ones(factor, tiny):
    plain, scaled = (model_of(tiny(factor=f, dim=256)).frequencies() for f in (1.0, factor))
    wavelengths = 2 * torch.pi / plain
    ratio = plain / scaled
    torch.testing.assert_close(ratio[wavelengths < 32 / 4], torch.ones_like(ratio[wavelengths < 32 / 4]))
    torch.testing.assert_close(ratio[wavelengths > 32], torch.full_like(ratio[wavelengths > 32], factor))
    between = ratio[(wavelengths > 32 / 4) & (wavelengths < 32)]
    assert len(between) and ((between > 1) & (between < factor)).all()


def test_rotary_table_is_one_and_in_no_checkpoint(tiny):
    model = model_of(tiny())
    assert [name for name, _ in model.named_buffers()] == ["rotary"]
    assert not any("rotary" in name for name in model.state_dict())


def test_positions_are_gathered_once_for_all_layers(tiny):
    """Otherwise every layer would gather from the table twice (maths.md, P6)."""
    model, tokens, gathered = model_of(tiny()), some_tokens(), []

    class Gathers(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            gathered.extend([function] * (function is torch.ops.aten.index.Tensor))
            return function(*args, **(kwargs or {}))

    with Gathers():
        model(tokens, torch.arange(32).expand(2, 32))
    assert len(gathered) == 1


def test_rotation_is_in_fp32_and_rounds_once(tiny):
    table, x = model_of(tiny()).rotary, torch.randn(1, 32, 4, 16)
    rounded = rotate(x.bfloat16(), table)
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, rotate(x.bfloat16().float(), table).bfloat16())
    assert torch.equal(rotate(x[:, :8], table), rotate(x, table)[:, :8])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("attention", ["auto", "flash", "math"])
def test_a_block_compiles_whole(attention, packed, tiny):
    """When the number of documents changes for the first time, torch compiles a second graph, which serves every later
    number.
    """
    torch.compiler.reset()  # torch remembers from blocks of other models that the number changes
    model = model_of(tiny(n_layers=1, attention=attention))
    block, compiled = model.layers["0"], copy.deepcopy(model.layers["0"])
    counter = CompileCounterWithBackend("aot_eager")
    compiled.compile(fullgraph=True, backend=counter)
    for places in ([[7, 32], [32, 32]], [[1, 2, 30, 32], [31, 32, 32, 32]], [[32], [32]]) if packed else (None,):
        x = torch.randn(2, 32, 64)
        documents = None if places is None else model.documents(torch.tensor(places, dtype=torch.int32), x)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        block(a, model.rotary, documents).square().sum().backward()
        compiled(b, model.rotary, documents).square().sum().backward()
        torch.testing.assert_close(a.grad, b.grad)
    assert counter.frame_count == (2 if packed and attention != "math" else 1)


def test_a_tied_head_has_one_weight(tiny):
    model = model_of(tiny(tie_embeddings=True))
    assert "output.weight" not in model.state_dict()
    assert model.output.weight is model.tok_embeddings.weight
    assert model.output.weight.device.type == "cpu"  # it was created on the meta device
    copied = copy.deepcopy(model)
    assert copied.output.weight is copied.tok_embeddings.weight
    assert copied.output.weight is not model.output.weight
    untied = model_of(tiny())
    untied.load_state_dict(model.state_dict() | {"output.weight": model.tok_embeddings.weight})
    assert torch.equal(untied(some_tokens()), model(some_tokens()))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layout", ["fsdp", "fsdp_reshard", "tp"])
def test_gradients_on_two_ranks_are_those_of_one(layout, tied, tiny, on_ranks):
    config, tokens = tiny(tie_embeddings=tied), some_tokens()
    expected = gradients(model_of(config), tokens)

    def task(rank):
        mesh = init_device_mesh("cpu", (2,))
        with torch.device("meta"):
            model = build(config, 32)
        if layout == "tp":
            parallelize_module(
                model,
                mesh,
                {
                    "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
                    "output": ColwiseParallel(output_layouts=Replicate()),
                },
            )
            for block in model.layers.values():
                parallelize_module(block, mesh, {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")})
                parallelize_module(block, mesh, {"attention.wo": RowwiseParallel()})
        else:
            for block in model.layers.values():
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh, reshard_after_forward=layout == "fsdp_reshard")
        model.to_empty(device="cpu")
        draw(model, config)
        # every rank has the whole batch, so FSDP's mean over ranks is the gradient itself
        actual = gradients(model, tokens)
        assert actual.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(
                actual[name], gradient, rtol=1e-4, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
            )

    on_ranks(2, task)
