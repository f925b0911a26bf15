"""TorchTitan's Llama 3 with its own parallelization, on CPUs: Subjects of `titan verify --module`.

Three things are changed, because CPUs need them: its attention is SDPA in place of FlexAttention, its meshes are on CPUs,
and FSDP2 divides gradients by 1 outside the reduction.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.full_dtensor import parallelize_inputs
from torchtitan.distributed.spmd_types import annotate_input_spmd_types
from torchtitan.distributed.utils import clip_grad_norm_, get_spmd_context, set_spmd_backend
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.models.llama3.sharding import set_llama3_sharding_config

from titan_hydra.instruments.verify.subject import Subject

parallel_dims.device_type = "cpu"
DIM, HEADS, VOCABULARY, SAMPLES, LENGTH = 64, 4, 256, 8, 16


def config(sequence_parallel):
    """Return a small Llama 3 with TorchTitan's distributions of initial weights."""
    rope = ComplexRoPE.Config(dim=DIM // HEADS, max_seq_len=64, theta=500000, scaling="llama")
    layers = llama3._build_llama3_layers(
        n_layers=2, dim=DIM, n_heads=HEADS, n_kv_heads=2, hidden_dim=192, rope=rope, fuse_qkv=True, attn_backend="flex"
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    found = Llama3Model.Config(
        dim=DIM,
        vocab_size=VOCABULARY,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=DIM, param_init=llama3._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=DIM, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(in_features=DIM, out_features=VOCABULARY, param_init=llama3._output_linear_init(DIM)),
        layers=layers,
    )
    set_llama3_sharding_config(found, enable_sp=sequence_parallel)
    return found


@dataclass(frozen=True)
class Layout:
    """One of TorchTitan's layouts."""

    replicate: int = 1
    shard: int = 1
    tp: int = 1
    sequence_parallel: bool = True
    backend: str = "partial_dtensor"

    def model(self):
        """Return the whole model on the CPU, with the same weights at every call."""
        model = config(self.sequence_parallel).build()
        torch.manual_seed(1)
        model.init_states()
        return model

    def parallelize(self, model, mesh):
        """Call TorchTitan's parallelize_llama."""
        set_spmd_backend(self.backend)
        dims = ParallelDims(self.replicate, self.shard, 1, self.tp, 1, 1, mesh.size(), self.backend)
        dims.build_mesh()
        model = llama3.parallelize_llama(
            model,
            parallel_dims=dims,
            training=TrainingConfig(mixed_precision_param="float32"),
            parallelism=ParallelismConfig(spmd_backend=self.backend, enable_sequence_parallel=self.sequence_parallel),
            compile_config=CompileConfig(enable=False),
            ac_config=None,
            dump_folder="/tmp",
        )
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
        context = get_spmd_context(parallel_dims=dims)()
        context.__enter__()  # TorchTitan's trainer enters it around each forward and backward
        model.dims, model.context = dims, context
        return model

    def loss(self, model, samples, mesh):
        """Return the sum of the losses divided by the number of tokens of the whole batch, as TorchTitan's trainer
        does.
        """
        tokens, labels = samples["tokens"], samples["labels"]
        if mesh is None:
            return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(0, 1), reduction="sum") / (
                SAMPLES * LENGTH
            )
        if self.backend != "partial_dtensor":
            prepare = parallelize_inputs if self.backend == "full_dtensor" else annotate_input_spmd_types
            tokens, labels, _ = prepare(model.dims, tokens, labels, {})
        return cross_entropy_loss(model(tokens), labels, global_vocab_size=VOCABULARY) / (SAMPLES * LENGTH)

    def subject(self, accumulation=1):
        """Return the Subject."""
        sizes = {"dp_replicate": self.replicate, "dp_shard": self.shard, "tp": self.tp}
        return Subject(
            mesh=sizes,
            model=self.model,
            parallelize=self.parallelize,
            batch=batch,
            loss=self.loss,
            split=("dp_replicate", "dp_shard"),
            losses="sum",
            accumulation=accumulation,
            norm=lambda model, mesh: clip_grad_norm_(list(model.parameters()), 1e9),
        )


def batch(step):
    """Return the tokens and labels of a step."""
    dice = torch.Generator().manual_seed(step)
    return {name: torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=dice) for name in ("tokens", "labels")}


fsdp = Layout(shard=4).subject(accumulation=2)
hsdp = Layout(replicate=2, shard=2).subject()
tp = Layout(tp=2).subject(accumulation=2)
tp_no_sp = Layout(tp=2, sequence_parallel=False).subject()
fsdp_tp = Layout(shard=2, tp=2).subject(accumulation=2)
fsdp_tp_full = Layout(shard=2, tp=2, backend="full_dtensor").subject()
fsdp_tp_spmd = Layout(shard=2, tp=2, backend="spmd_types").subject()
