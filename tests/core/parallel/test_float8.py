"""Test Float8 and MXFP8: which linears are converted, where the formats are refused, and that tensor parallelism uses
the Float8 styles.
"""

import pytest
import torch
from torch import nn

from titan_hydra.core import data, models
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.checkpoint.checkpointer import Checkpointer
from titan_hydra.core.job.run.run import Run
from titan_hydra.core.models import layers
from titan_hydra.core.models.llama3 import sharding
from titan_hydra.core.parallel import formats
from titan_hydra.core.parallel.formats import float8
from titan_hydra.core.parallel.mesh import Mesh
from titan_hydra.core.parallel.plans import Linears
from titan_hydra.core.parallel.whole import Norm
from titan_hydra.core.train.step import Agreement
from titan_hydra.core.train.trainer import build
from titan_hydra.experiments.compose.compose import compose_job, later_wins
from titan_hydra.instruments.verify.case import BASE
from titan_hydra.instruments.verify.verify import trace

EMULATED = ("precision=float8_emulate", "precision.compute_dtype=float32")
GRADIENT = Agreement(torch.ones(()), torch.zeros(2, dtype=torch.float64))  # norm and loss of a step, both finite
TENSORWISE = ("precision=float8_tensorwise", "precision.emulate=true", "precision.compute_dtype=float32")


def job_of(*overrides):
    """Return a job of the acceptance matrix's model."""
    return compose_job(*later_wins(*BASE, *overrides))


def converted(job, device="cpu"):
    """Return the whole model after its converters, on the meta device, and the converters' lines for the log."""
    with torch.device("meta"):
        model = models.build(job.model, job.data.seq_len)
    return model, formats.convert(model, job, Mesh(job.parallelism, None, None, None, None), torch.device(device))


def float8_names(model):
    """Return the names of the linears that became Float8."""
    from torchao.float8.float8_linear import Float8Linear

    return {name for name, module in model.named_modules() if isinstance(module, Float8Linear)}


def test_the_linears_of_all_blocks_are_converted_and_the_report_says_so():
    model, (line,) = converted(job_of(*EMULATED))
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert float8_names(model) == linears - {"output"}
    assert line.startswith("float8 rowwise (emulated): 28 linears converted: layers.*.attention.wq x4")
    assert line.endswith("1 not: output (the head)")


def test_the_report_names_experts():
    _, (line,) = converted(job_of(*EMULATED, "model=qwen3_moe_debug"))
    assert line.endswith(
        "5 not: output (the head), layers.*.feed_forward.experts x4 (grouped matmuls, computed in float32)"
    )


@pytest.mark.parametrize("overrides", [("precision.skip=[]",), ("model.tie_embeddings=true",)])
def test_the_head_is_never_converted(overrides):
    model, (line,) = converted(job_of(*EMULATED, *overrides))
    assert len(float8_names(model)) == 28
    assert type(model.output) in (nn.Linear, layers.TiedOutput)
    assert "output (the head)" in line


def test_names_are_skipped_by_any_part_of_them():
    model, (line,) = converted(job_of(*EMULATED, "precision.skip=[output,wk,layers.0.]"))
    assert float8_names(model) == {
        f"layers.{block}.{name}"
        for block in (1, 2, 3)
        for name in (
            "attention.wq",
            "attention.wv",
            "attention.wo",
            "feed_forward.w1",
            "feed_forward.w2",
            "feed_forward.w3",
        )
    }
    assert "(precision.skip)" in line and "layers.*.attention.wk x4" in line


def test_a_name_to_skip_that_no_linear_has_is_refused():
    with pytest.raises(ConfigError, match=r"precision.skip=wkv: .*one of .*attention.wk"):
        converted(job_of(*EMULATED, "precision.skip=[output,wkv]"))


def test_dimensions_that_are_not_in_steps_of_16_stay_as_they_are():
    model, (line,) = converted(job_of(*EMULATED, "model.ffn_dim=170"))
    assert len(float8_names(model)) == 16
    assert "layers.*.feed_forward.w1 x4" in line and "64 x 170 is not in steps of 16" in line


def test_parameters_keep_names_dtype_and_shape():
    plain, _ = converted(job_of())
    for overrides in (
        EMULATED,
        (*EMULATED, "precision.kernels=fused"),
        TENSORWISE,
        ("precision=mxfp8", "precision.emulate=true"),
    ):
        model, *_ = converted(job_of(*overrides))
        assert [(n, p.shape, p.dtype) for n, p in model.named_parameters()] == [
            (n, p.shape, p.dtype) for n, p in plain.named_parameters()
        ]


@pytest.mark.parametrize(
    ("precision", "text"),
    [
        ("float8_rowwise", "precision=float8_rowwise: .*8.9.*runs on the CPU; nearest legal: precision=float8_emulate"),
        ("float8_tensorwise", "precision=float8_tensorwise: .*nearest legal: precision=float8_emulate"),
        ("mxfp8", "precision=mxfp8: .*10.0.*B200.*runs on the CPU"),
    ],
)
def test_hardware_without_the_format_is_refused(precision, text):
    with pytest.raises(ConfigError, match=text):
        converted(job_of(f"precision={precision}"))


def test_a_gpu_that_is_too_old_is_refused_and_one_that_is_new_enough_not(monkeypatch):
    job = job_of("precision=float8_rowwise")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match=r"a GPU of capability 8\.0"):
        converted(job, "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert len(float8_names(converted(job, "cuda")[0])) == 28


@pytest.mark.parametrize(
    ("capability", "runs"), [((9, 0), False), ((10, 0), True), ((10, 3), True), ((11, 0), False), ((12, 0), False)]
)
def test_mxfp8_runs_on_the_gpus_that_torchao_has_kernels_for(monkeypatch, capability, runs):
    """An RTX PRO 6000 has a higher capability (12.0) than a B200, but torchao has no kernels for it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    job = job_of("precision=mxfp8")
    if runs:
        assert any(line.startswith("mxfp8: ") for line in converted(job, "cuda")[1])
        return
    with pytest.raises(
        ConfigError,
        match=rf"of capability 10\.0 or later and before 11\.0 \(B200 or GB200\), .* {capability[0]}\.0;",
    ):
        converted(job, "cuda")


def test_parts_of_a_matrix_are_in_steps_of_16_too(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    converted(job_of("precision=float8_rowwise", "parallelism=tp", "parallelism.tp=2"), "cuda")
    with pytest.raises(
        ConfigError, match=r"parallelism.tp=4: .* a rank's part of layers.0.attention.wk \(64 x 32\); nearest legal: 2"
    ):
        converted(job_of("precision=float8_rowwise", "parallelism=tp", "parallelism.tp=4"), "cuda")


def test_tensor_parallel_takes_the_float8_styles_where_they_pay():
    """TorchTitan 0.2.2 never uses these styles, because it registers the converter under one name and looks it up under
    another.
    """
    from torchao.float8.float8_tensor_parallel import (
        Float8ColwiseParallel,
        Float8RowwiseParallel,
        PrepareFloat8ModuleInput,
    )

    job = job_of("precision=float8_tensorwise", "parallelism=tp")
    plan = sharding.plan(job.parallelism, Norm(True, torch.float32), float8.linears(job))
    styles = {name: type(style) for name, style in plan.block.items()}
    assert {styles[f"attention.{name}"] for name in ("wq", "wk", "wv")} == {Float8ColwiseParallel}
    assert {styles[f"feed_forward.{name}"] for name in ("w1", "w3")} == {Float8ColwiseParallel}
    assert styles["attention.wo"] is styles["feed_forward.w2"] is Float8RowwiseParallel
    assert styles["attention"] is styles["feed_forward"] is PrepareFloat8ModuleInput
    for plain in (("precision=float8_rowwise",), TENSORWISE, ("precision=bf16",)):
        assert float8.linears(job_of(*plain, "parallelism=tp")) == Linears()


@pytest.fixture
def gathers(monkeypatch):
    """gloo cannot gather Float8, so the bytes are gathered as integers. Return a list with an entry for each such
    gather.
    """
    from torchao.float8 import float8_ops
    from torchao.float8.float8_training_tensor import Float8TrainingTensor

    count = []

    def gather(operator, args, kwargs=None):
        count.append(operator)
        tensor, *rest = args
        data = operator(tensor._data.contiguous().view(torch.uint8), *rest, **(kwargs or {}))
        data = torch.ops._c10d_functional.wait_tensor(data).view(tensor._data.dtype)
        return Float8TrainingTensor(
            data, tensor._scale, tensor._orig_dtype, tensor._linear_mm_config, tensor._gemm_input_role
        )

    monkeypatch.setitem(float8_ops.FLOAT8_OPS_TABLE, torch.ops._c10d_functional.all_gather_into_tensor.default, gather)
    return count


@pytest.mark.parametrize("layout", ["tp", pytest.param("fsdp_tp", marks=pytest.mark.slow)])
def test_float8_styles_gather_float8_and_learn_what_plain_ones_do(layout, gathers, on_ranks, monkeypatch):
    """Under fsdp_tp the weights are gathered as Float8 too, with precomputed scales."""
    ranks = {"tp": 2, "fsdp_tp": 4}[layout]
    job = job_of(
        *TENSORWISE,
        f"parallelism={layout}",
        f"gpus={ranks}",
        "data.local_batch=8",
        "parallelism.tp=2",
        "steps=3",
        f"data.global_batch={4 * ranks}",
    )

    def task(rank):
        device = torch.device("cpu")
        plain = trace(job, device)
        assert not gathers
        monkeypatch.setattr(float8, "linears", lambda job: float8.float8_linears())
        styled = trace(job, device)
        # In the forward, attention and feed-forward gather their input once each; in the backward, the gradients that
        # reach wo and w2 are gathered.
        assert len(gathers) == job.steps * job.model.n_layers * 4
        torch.testing.assert_close(styled.losses, plain.losses, rtol=1e-5, atol=0)
        torch.testing.assert_close(styled.norms, plain.norms, rtol=2e-4, atol=0)

    on_ranks(ranks, task)


def test_scales_are_computed_once_a_step_and_change_nothing(on_ranks, monkeypatch):
    job = job_of(*TENSORWISE, "gpus=2", "parallelism=fsdp", "data.local_batch=8", "steps=4")

    def task(rank):
        device = torch.device("cpu")
        precomputed = trace(job, device)
        trainer = build(job, device)
        trainer.prepare_weights()
        weights = [
            p._local_tensor
            for name, p in trainer.model.named_parameters()
            if p.ndim == 2 and name.startswith("layers.")
        ]
        assert len(weights) == 28 and all(weight._precomputed_scale is not None for weight in weights)
        monkeypatch.setattr(float8, "before_forward", lambda model: None)
        each = trace(job, device)
        assert precomputed.losses == each.losses and precomputed.norms == each.norms

    on_ranks(2, task)


@pytest.mark.parametrize("layout", ("fsdp_tp", "fsdp_pp"))
def test_a_resumed_run_has_the_scales_of_one_that_was_not_interrupted(on_ranks, layout):
    """A scale belongs to a whole weight. Under TP, a scale that FSDP computes while it gathers is that of a part."""
    job = job_of(*TENSORWISE, "gpus=4", f"parallelism={layout}", "data.local_batch=8", "steps=4")

    def task(rank):
        whole, resumed = (trace(job, torch.device("cpu"), then=then) for then in (None, job))
        assert resumed.losses == whole.losses and resumed.norms == whole.norms

    on_ranks(4, task)


def test_a_rank_that_gathers_from_no_other_holds_plain_weights():
    model, _ = converted(job_of(*TENSORWISE))
    assert type(model.layers["0"].attention.wq.weight) is nn.Parameter
    assert type(model.layers["0"].attention.wq.weight.data) is torch.Tensor


def test_a_checkpoint_of_float8_weights_loads_in_every_format(on_ranks, tmp_path):
    jobs = [
        job_of(*precision, "gpus=2", "parallelism=fsdp", "data.local_batch=8", "checkpoint=sync", "optimizer.lr=0.01")
        for precision in (TENSORWISE, ("precision=fp32",), TENSORWISE)
    ]

    def task(rank):
        run = Run(tmp_path, tmp_path, rank, rank, 2)
        weights = []
        for number, job in enumerate(jobs):
            trainer = build(job, torch.device("cpu"))
            checkpointer = Checkpointer(job.checkpoint, run, trainer.model, trainer.optimizers)
            if number == 0:
                loader = data.build(job, rank, 2)
                trainer.forward_backward(loader.next())
                trainer.update(GRADIENT)
                checkpointer.save(1, loader.state())
            else:
                checkpointer.start_from(str(tmp_path / "checkpoints" / "step-00000001"), job.model)
            weights.append({name: p.detach().full_tensor().clone() for name, p in trainer.model.named_parameters()})
        assert checkpointer.resume()[0] == 1
        moment = trainer.optimizers[0].state[trainer.model.layers["0"].attention.wq.weight]["exp_avg"]
        assert moment.full_tensor().norm() > 0
        for other in weights[1:]:
            assert all(torch.equal(other[name], weight) for name, weight in weights[0].items())

    on_ranks(2, task)
    # A process that has not imported torchao could not unpickle its classes.
    shards = list(tmp_path.glob("checkpoints/step-00000001/*.distcp"))
    assert shards and not any(b"torchao" in shard.read_bytes() for shard in shards)
