"""Plant known faults, one at a time, in a copy of the package. Each must be found by `titan verify --random`, a case of
the matrix, or a test. The faults come from an audit, and from bugs in experts that users of other frameworks reported;
the last ones show which faults a measured band still finds.

    python tests/equivalence/planted.py [NAME]

Each line of FAULTS has a file, the original text, the text that replaces it, and the case or test that must fail;
without a case or test, a random job must fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FAULTS = {
    "a local batch is divided by its own tokens": (
        "train/trainer.py",
        "(part, count, last=",
        "(part, self.objective.count(part.tensors) * len(parts) * self.mesh.data_ranks, last=",
    ),
    "weights become NaN after step 2": (
        "train/trainer.py",
        "        self.drop_gradients()\n        formats",
        "        self.drop_gradients()\n        self.steps = getattr(self, 'steps', 0) + 1\n"
        "        for weight in self.model.parameters():\n"
        "            weight.data.mul_(float('nan') if self.steps == 2 else 1)\n        formats",
    ),
    "FSDP sums gradients in the compute dtype": ("parallel/data.py", "reduce_dtype=reduce", "reduce_dtype=compute"),
    "another epsilon on all layouts": (
        "models/layers.py",
        "self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)",
        "self.attention_norm = nn.RMSNorm(config.dim, eps=1e-3)",
    ),
    "the norm misses the last pipeline rank": (
        "parallel/gradients.py",
        "    dist.all_reduce(total)\n",
        "    total *= pipeline is None or pipeline.rank() < pipeline.size() - 1\n    dist.all_reduce(total)\n",
    ),
    "positions are off by one on a context-parallel rank": (
        "train/objectives/language.py",
        "batch[name] for name in (",
        "(batch[name] + (name == 'positions') * "
        "(torch.distributed.get_rank() % self.job.parallelism.cp)) % self.job.data.seq_len for name in (",
    ),
    "rotary positions are shifted on a tensor-parallel rank": (
        "train/trainer.py",
        "        init_weights(stage, job.model, job.seed)\n",
        "        init_weights(stage, job.model, job.seed)\n        stage.rotary.copy_(stage.rotary.roll(parts.mesh.coordinate('tp'), 0))\n",
    ),
    "FSDP averages gradients": (
        "parallel/data.py",
        "            part.set_gradient_divide_factor(1.0)\n            part.set_force_sum_reduction_for_comms(True)\n",
        "            pass\n",
    ),
    "gradients of norms are not summed over tensor-parallel ranks": (
        "parallel/norm.py",
        "(Partial() if self.split else Replicate())",
        "Replicate()",
    ),
    "a vocabulary's offset is rounded down": (
        "parallel/loss_head.py",
        "* -(-weight.shape[0] // mesh.size())",
        "* (weight.shape[0] // mesh.size())",
    ),
    "norms are in no optimizer": (
        "train/optimizer.py",
        "        (matrices if",
        "        if parameter.ndim == 1:\n            continue\n        (matrices if",
    ),
    "layouts forget the weight decay": (
        "train/optimizer.py",
        "weight_decay=config.weight_decay,\n        fused",
        "weight_decay=config.weight_decay * (torch.distributed.get_world_size() == 1),\n        fused",
    ),
    "gradients of norms pile up": (
        "train/trainer.py",
        "            optimizer.zero_grad()\n",
        "            kept = [(p, p.grad) for group in optimizer.param_groups for p in group['params'] if p.ndim == 1]\n"
        "            optimizer.zero_grad()\n            for p, gradient in kept:\n                p.grad = gradient\n",
    ),
    "the loss of bfloat16 is 2 % too large": (
        "train/objectives/language.py",
        'ignore_index=IGNORED, reduction="sum")',
        'ignore_index=IGNORED, reduction="sum") * (1.02 if logits.dtype == torch.bfloat16 else 1)',
    ),
}
UNITS = "kernels/float8_units.py"
FAULTS |= {
    "a scale is not divided out of the gradients of weights": (
        UNITS,
        "    return multiply(columns, inputs,",
        "    return multiply((columns[0], torch.ones_like(columns[1])), inputs,",
        "float8 fused against torchao",
    ),
    "the gradient of SwiGLU's halves is cast with the scale of the other": (
        "kernels/float8.py",
        "*cast_columns(y, bits.amax(0)), ",
        "*cast_columns(y, bits.amax(0).roll(y.shape[1] // 2)), ",
        "float8 fused against torchao",
    ),
    "a norm that is computed later has no weight": (
        "parallel/formats/fused.py",
        "Normed(x, self.weight, self.eps)",
        "Normed(x, self.weight.detach() * 0 + 1, self.eps)",
        "tests/parallel/test_fused.py::test_a_block_is_as_near_to_float32_as_torchaos",
    ),
}
WHOLE, EXPERTS = "parallel/whole.py", "parallel/experts.py"
KEPT = "tests/parallel/test_experts.py::test_the_host_waits_once_for_each_layer_and_gathers_start_before"
FAULTS |= {
    "a router's gradient is not summed over tensor-parallel ranks": (
        WHOLE,
        "gradient=Partial())",
        "gradient=Replicate())",
        "qwen3_moe, tp 2, ep 2",
    ),
    "the gradient of the key that all heads share is not summed": (
        WHOLE,
        "run_check=False).to_local(grad_placements=[Partial()])",
        "run_check=False).to_local(grad_placements=[Replicate()])",
        "deepseek_v3, tp 2, ep 1",
    ),
    "expert gradients are divided by the ep ranks": (
        EXPERTS,
        "Travel.apply(rows, route.back, route.there)",
        "Travel.apply(rows, route.back, lambda gradient: route.there(gradient) / self.group.size())",
        "qwen3_moe, fsdp 2, ep 2",
    ),
    "rows that arrive stay in the order of their ranks": (
        EXPERTS,
        "    moves = ends.view_as(counts) -",
        "    moves = 0 * ends.view_as(counts) - 0 *",
        "qwen3_moe, fsdp 2, ep 2",
    ),
    "tokens are counted in every forward": (
        "models/moe.py",
        "        ctx.sums, ctx.shape = sums, shares.shape\n",
        "        ctx.sums, ctx.shape = sums, shares.shape\n        sums[0].add_(counts)\n",
        "deepseek_v3, fsdp 2, ep 2, ac full",
    ),
    "biases follow the tokens of one rank": (
        EXPERTS,
        "        dist.all_reduce(sums, group=mesh.stage)\n",
        "        pass\n",
        "deepseek_v3, fsdp 2, ep 2",
    ),
    "the loss of balance counts a rank's part of the sequence": (
        EXPERTS,
        "            dist.all_reduce(x, group=group)\n",
        "            pass\n",
        "deepseek_v3, tp 2, ep 2",
    ),
    "the loss of balance is twice as large": (
        EXPERTS,
        "layer.router.scale = 1 /",
        "layer.router.scale = 2 /",
        "tests/equivalence/test_reference.py",
    ),
    "a recomputation exchanges the numbers of tokens again": (
        "parallel/activation_checkpoint.py",
        'partial(keeping, options.get("context_fn"))} if sparse',
        "None} if False",
        KEPT,
    ),
    "experts are gathered after the wait": ("parallel/data.py", "    if mesh.degrees.ep > 1:\n", "    if mesh.degrees.ep > 99:\n", KEPT),
    "gradients of experts without tokens are what the memory held": (
        "kernels/grouped.py",
        "if not fills_empty_groups(rows.device)",
        "if False",
        "tests/models/test_moe.py::test_gradients_that_a_kernel_does_not_write_are_zero",
    ),
    "packed experts have gate and up exchanged": (
        "checkpoint/folder.py",
        '"gate_proj.weight": ("gate_up_proj", 0, 2),\n    "up_proj.weight": ("gate_up_proj", 1, 2)',
        '"gate_proj.weight": ("gate_up_proj", 1, 2),\n    "up_proj.weight": ("gate_up_proj", 0, 2)',
        "tests/checkpoint/test_convert_experts.py",
    ),
    "pairs of rotary positions are halves": (
        "models/deepseek_v3/model.py",
        "return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)",
        "return x",
        "tests/checkpoint/test_convert_experts.py",
    ),
    "text is left whole on context-parallel ranks": (
        "recipes/flux/diffusion.py",
        '"text": Dims(sequence=1)',
        '"text": Dims()',
        "tests/recipes/flux/test_diffusion.py::test_every_layout_learns_what_one_process_learns",
    ),
}
MUON = "train/muon.py"
# the fixed bounds of these cases let some of these faults pass
FAULTS |= {
    f"{name}, {case}": (*fault, case)
    for name, fault, *cases in (
        (
            "layouts forget the weight decay",
            FAULTS["layouts forget the weight decay"],
            "float8 rowwise, fsdp 2",
            "float8 tensorwise, tp 2",
            "bf16, fsdp 2, accumulation 2",
            "bf16, tp 2, sequence parallel on",
        ),
        (
            "layouts have another epsilon of AdamW",
            ("train/optimizer.py", "eps=config.eps,", "eps=config.eps + 1e-4 * (torch.distributed.get_world_size() > 1),"),
            "float8 rowwise, fsdp 2",
            "float8 rowwise, tp 2",
            "qwen3_moe, fsdp 2, ep 2, float8 fused",
            "bf16, tp 2, sequence parallel on",
        ),
        (
            "Muon's rate is that of a shard",
            (MUON, 'options["adjust_lr_fn"], matrix.shape[-2:])', 'options["adjust_lr_fn"], local_part(matrix).shape[-2:])'),
            "hsdp 4, muon",
        ),
        (
            "Muon on layouts has no Nesterov momentum",
            (MUON, 'lerp(momentum, options["momentum"])', 'lerp(momentum, options["momentum"] if self.group is None else 1)'),
            "qwen3_moe, fsdp 2, ep 2, muon",
        ),
    )
    for case in cases
}
FAULTS |= {
    "gradients of adapters are summed over tensor-parallel ranks in their own dtype": (
        "parallel/lora.py",
        "read_whole(parameter, self.reduce_dtype, Partial())",
        "read_whole(parameter, parameter.dtype, Partial())",
        "tests/parallel/test_tensor.py::test_adapters_gradients_are_summed_over_ranks_in_the_reduce_dtype",
    ),
    "a validation is the mean of the local batches' means": (
        "train/trainer.py",
        "torch.stack([summed.double(), self.objective.count(part.tensors).double()])",
        "torch.stack([summed.double() / self.objective.count(part.tensors), torch.ones((), dtype=torch.float64)])",
        "tests/recipes/chat/test_sft.py::test_validation_is_the_mean_over_held_out_tokens_on_any_layout",
    ),
}
OWN = "tests/parallel/test_own_modules.py"
FAULTS |= {
    "a ring drops an attention kernel of one's own": (
        "parallel/context.py",
        "if record.ring and type(attention.sdpa) is not SDPA:",
        "if False:",
        f"{OWN}::test_a_ring_refuses_an_attention_kernel_that_it_would_replace",
    ),
    "LoRA's base stays float32 under tensor parallelism": (
        "parallel/lora.py",
        "owner.register_parameter(name, nn.Parameter(parameter.detach().to(dtype), requires_grad=False))",
        "parameter.requires_grad_(False).data = parameter.data.to(dtype)",
        "tests/train/test_lora.py::test_the_base_is_held_in_the_compute_dtype_and_the_plan_counts_that",
    ),
    "LoRA's base stays float32 under tensor parallelism, bf16": (
        "parallel/lora.py",
        "owner.register_parameter(name, nn.Parameter(parameter.detach().to(dtype), requires_grad=False))",
        "parameter.requires_grad_(False).data = parameter.data.to(dtype)",
        "bf16, lora, tp 2",
    ),
    "the loss of balance is multiplied by tokens over labels": (
        "train/trainer.py",
        "        parts = batch.split(self.job.data.local_batch)\n",
        "        parts = batch.split(self.job.data.local_batch)\n"
        "        for part in [part for part in self.model.modules() if hasattr(part, 'router')]:\n"
        "            part.router.scale = 1 / count.item()\n",
        "tests/parallel/test_experts.py::test_balance_counts_tokens_and_finite_steps",
    ),
    "an export is bfloat16 whatever is stored": (
        "checkpoint/convert.py",
        "dtype or stored.get(name)) for",
        "dtype or torch.bfloat16) for",
        "tests/checkpoint/test_convert.py::test_an_export_keeps_the_stored_number_format",
    ),
    "the chunked loss's gradient is 2 % too large in bfloat16": (
        "kernels/cross_entropy.py",
        "logits[rows] = part.scatter_add_(1, targets[rows] * here[rows], -weights[rows] * here[rows])",
        "logits[rows] = part.scatter_add_(1, targets[rows] * here[rows], -weights[rows] * here[rows])"
        " * (1.02 if logits.dtype == torch.bfloat16 else 1)",
        "bf16 linear_cross_entropy against fp32",
    ),
    "gradients of vectors are 4 % too large on layouts": (
        "parallel/masters.py",
        "master.grad, copy.grad = copy.grad, None",
        "master.grad, copy.grad = copy.grad * (1.04 if copy.ndim == 1 and torch.distributed.get_world_size() > 1 else 1), None",
        "tests/recipes/image_text/test_image_text.py::test_layouts_learn_the_same_in_bf16",
    ),
}
# Verifies a few random jobs at a time, and ends with status 1 at the first job that is wrong.
VERIFY = """
import sys
from titan_hydra.verify.many import MANY
from titan_hydra.verify.matrix import MATRIX
from titan_hydra.verify.sampler import draw_jobs
from titan_hydra.verify.verify import verify
if __name__ == "__main__":
    cases = [case for case in (*MATRIX, *MANY) if case.name == sys.argv[1]] or list(draw_jobs(60, seed=int(sys.argv[1])))
    for first in range(0, len(cases), 6):
        for outcome in verify(cases[first : first + 6], steps=4):
            if not outcome.passed:
                print("red at", outcome)
                sys.exit(1)
"""


def plant(folder: Path, file: str, right: str, wrong: str) -> None:
    """Return a copy of the package in `folder` with one fault."""
    for name in ("titan_hydra", "conf", "sweeps", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    target = folder / "titan_hydra" / file
    text = target.read_text()
    assert text.count(right) == 1, f"{file} has {text.count(right)} places for the fault: {right!r}"
    target.write_text(text.replace(right, wrong))
    (folder / "verify_some.py").write_text(VERIFY)


def found(fault: tuple[str, ...], seed: int = 1) -> str:
    """Return in words how a fault was found; empty if no test failed. An exception on the ranks counts as a failure."""
    file, right, wrong, *where = fault
    command = ["verify_some.py", where[0] if where else str(seed)]
    in_test = bool(where) and where[0].startswith("tests/")
    if in_test:
        command = ["-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", "--tb=no", where[0]]
    with tempfile.TemporaryDirectory() as name:
        plant(Path(name), file, right, wrong)
        run = subprocess.run(
            [sys.executable, *command],
            cwd=name,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": name, "OMP_NUM_THREADS": "1"},
        )
    # pytest's other statuses are those of a test that it did not find or could not collect
    assert not in_test or run.returncode < 2, run.stdout + run.stderr
    return "" if run.returncode == 0 else (run.stdout.strip() or run.stderr.strip()).splitlines()[-1]


if __name__ == "__main__":
    for name, fault in FAULTS.items():
        if all(word in name for word in sys.argv[1:]):
            print(f"{name}: {found(fault) or 'GREEN'}", flush=True)
