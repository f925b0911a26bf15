"""FLUX has the right sizes and computes the same function as diffusers' model; weights can be converted in both
directions.
"""

import contextlib
import json

import pytest
import torch
from functorch.compile import make_boxed_func
from safetensors.torch import load_file
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from titan_hydra import cli
from titan_hydra.core import models
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.checkpoint.convert import import_hf
from titan_hydra.core.checkpoint.folder import load_hf
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.recipes.flux.config import FluxConfig
from titan_hydra.recipes.flux.model import Flux


@pytest.mark.parametrize(
    ("name", "parameters"), [("flux_debug", None), ("flux_schnell", 11_891_178_560), ("flux_dev", 11_901_408_320)]
)
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
        model(
            torch.randn(1, image, job.model.patch_width),
            torch.randn(1, text_len, job.model.text_dim),
            torch.randn(1, job.model.pooled_dim),
            torch.rand(1),
            torch.zeros(1, image, 3),
        ).sum().backward()
    first = (
        2 * (image * job.model.patch_width + text_len * job.model.text_dim + 256 + job.model.pooled_dim) * job.model.dim
    )
    counted = counter.get_total_flops() + first  # inputs have no gradient, so there is no matmul for it
    assert models.family_of(job.model).flops(job.model, seq_len, 0) * seq_len == pytest.approx(counted, rel=0.01)


def theirs(**keys):
    """Return a tiny random model of diffusers."""
    diffusers = pytest.importorskip("diffusers", reason="diffusers, the reference for FLUX, is not installed")
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        pooled_projection_dim=20,
        axes_dims_rope=(4, 6, 6),
        **keys,
    )
    for parameter in model.parameters():  # in diffusers' models modulations do not begin at 0, but biases do
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def inputs(samples=2, side=3, tokens=5):
    """Return latents, text, pooled, time and positions for `theirs`."""
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    positions = torch.stack((torch.zeros(side, side), rows, columns), dim=-1).view(-1, 3)
    return (
        torch.randn(samples, side * side, 16),
        torch.randn(samples, tokens, 24),
        torch.randn(samples, 20),
        torch.rand(samples),
        positions,
    )


@pytest.mark.parametrize("guided", [False, True])
def test_it_computes_what_diffusers_computes_and_weights_go_there_and_back(guided, tmp_path):
    reference = theirs(guidance_embeds=guided)
    reference.save_pretrained(tmp_path / "transformer")
    config = FluxConfig(
        name="there",
        family="flux",
        vocab_size=1,
        dim=32,
        n_layers=5,
        double_layers=2,
        n_heads=2,
        n_kv_heads=2,
        rope_theta=1e4,
        rope_first=4,
        channels=4,
        text_len=5,
        text_dim=24,
        pooled_dim=20,
        guidance=3.5 if guided else None,
    )
    model = Flux(config, 14)
    load_hf(model, config, tmp_path / "transformer")
    latents, text, pooled, time, positions = inputs()
    guidance = torch.tensor([1.0, 3.5]) if guided else None
    expected = reference(latents, text, pooled, time, positions, torch.zeros(5, 3), guidance).sample
    actual = model(latents, text, pooled, time, positions.expand(2, -1, -1), guidance)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    expected.square().sum().backward()
    actual.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    names = models.family_of(config).part("hf").of(config)
    for name, parameter in model.named_parameters():
        scale = parameter.grad.abs().max().item()
        torch.testing.assert_close(parameter.grad, gradients.pop(names.name(name)), rtol=1e-4, atol=1e-5 * scale)
    assert not gradients
    assert cli.main(["checkpoint", "import", str(tmp_path / "transformer"), str(tmp_path / "ours")]) == 0
    assert cli.main(["checkpoint", "export", str(tmp_path / "ours"), str(tmp_path / "back"), "--dtype", "float32"]) == 0
    before, after = (
        load_file(tmp_path / folder / "diffusion_pytorch_model.safetensors") for folder in ("transformer", "back")
    )
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert type(reference).from_pretrained(tmp_path / "back").config.guidance_embeds is guided


def test_what_cannot_be_converted_is_one_line(tmp_path):
    theirs().save_pretrained(tmp_path / "transformer")
    file = tmp_path / "transformer/config.json"
    plain = json.loads(file.read_text())
    for key, value, reason in (
        ("patch_size", 2, "patch_size=2: only 1 can be converted"),
        ("axes_dims_rope", [4, 4, 8], "axes_dims_rope=[4, 4, 8]: only [4, 4, 4] can be converted"),
    ):
        file.write_text(json.dumps(plain | {key: value}))
        with pytest.raises(ConfigError) as error:
            import_hf(tmp_path / "transformer", tmp_path / key)
        assert str(error.value) == f"{file}: {reason}"


class Strides(TorchDispatchMode):
    """Record the strides by which torch would look up the graph of cuDNN's backward (q, k, v), and those on which this
    graph also depends (output, gradient).
    """

    def __init__(self):
        super().__init__()
        self.seen = {}

    def look(self, function, args):
        if "scaled_dot_product" in str(function) and "backward" in str(function):
            gradient, q, k, v, out = ((tuple(x.shape), x.stride()) for x in args[:5])
            self.seen.setdefault((q, k, v), []).append((out, gradient))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.look(function, args)
        return function(*args, **(kwargs or {}))

    def backend(self):
        """Return a compiler back end that looks at the operators inside graphs, which a dispatch mode does not see."""

        def look(graph, inputs):
            for node in graph.graph.nodes:
                self.look(node.target, [arg.meta.get("val") for arg in node.args if hasattr(arg, "meta")])
            return make_boxed_func(graph)

        return aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph), bw_compiler=look)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_kernels_that_take_the_same_queries_take_gradients_of_one_layout(compiled):
    """For these kernels torch keeps one graph of cuDNN's backward. If the gradients had two kinds of strides, half of
    them would be wrong.
    """
    job = compose_job(
        "data=synthetic_images", "model=flux_debug", "gpus=1", "model.n_layers=3", "model.double_layers=1"
    )
    config, tokens, text = job.model, 16, job.model.text_len
    model = models.build(config, tokens + text)
    strides = Strides()
    for block in model.layers.values() if compiled else ():
        block.compile(backend=strides.backend(), fullgraph=True)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    with contextlib.nullcontext() if compiled else strides:
        model(
            torch.randn(1, tokens, config.patch_width),
            torch.randn(1, text, config.text_dim),
            torch.randn(1, config.pooled_dim),
            torch.rand(1),
            torch.zeros(1, tokens, 3),
        ).square().sum().backward()
    (pairs,) = strides.seen.values()
    assert len(pairs) >= 2 and len(set(pairs)) == 1 and pairs[0][0] == pairs[0][1], pairs
