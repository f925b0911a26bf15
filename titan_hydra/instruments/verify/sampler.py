"""Draw random legal jobs. They combine degrees, schedules, odd shapes, experts, masks and optimizers in ways that the
matrix lacks. Imports no torch.
"""

import math
import random
from collections.abc import Iterator

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.fault import divisors
from titan_hydra.experiments.compose.compose import compose_job, later_wins

from .case import BASE, LATENT, MOE, SAMPLES, SCHEDULES, Case

# A float32 run differs from a float64 reference by rounding alone. Muon orthogonalizes in bfloat16, whose rounding
# grows over the steps: even one process differed by 8e-5 in its loss and by 0.3 in a weight.
EXACT = {"loss": 2e-6, "norm": 5e-5, "gradients": 1e-5, "weights": 2e-3, "reference": "float64"}
# The gradient of a router is a small sum of large terms: even one process differed from the reference by 9.8e-6.
SPARSE = EXACT | {"gradients": 2e-5}
MUON = EXACT | {"loss": 3e-4, "norm": 3e-3, "weights": 0.8}
# bfloat16 layouts against one process in bfloat16, where the measured band is what judges, or in float64, which shows a
# bias of bfloat16. Eight layers with tied embeddings differed by 2e-4 of the loss and 2e-2 of the norm in one process.
BF16 = {"loss": 1e-3, "norm": 1e-1, "gradients": 1e-1, "weights": 0.6}
BF16_COARSE = {"loss": 6e-3, "norm": 1e-1, "gradients": 1e-1, "weights": 0.6, "reference": "float64"}


def draw_jobs(number: int, seed: int, ranks: tuple[int, ...] = (1, 2, 3, 4, 6, 8)) -> Iterator[Case]:
    """Yield `number` random cases. A job that breaks a rule is drawn again. Within one version of the package, a seed
    always gives the same cases.
    """
    dice = random.Random(seed)
    for index in range(number):
        while not legal(case := draw_case(dice, index, dice.choice(ranks))):
            pass
        yield case


def legal(case: Case) -> bool:
    """Whether the case's job passes the rules."""
    try:
        compose_job(*later_wins(*BASE, *case.base, *case.overrides))
    except ConfigError:
        return False
    return True


def draw_case(dice: random.Random, index: int, ranks: int) -> Case:
    """Draw a case. Its job may break a rule."""
    degrees = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp"), 1)
    while (left := ranks // math.prod(degrees.values())) > 1:
        degrees[dice.choice(list(degrees))] *= 3 if left % 2 else 2
    local_batch = dice.choice((1, 2, 4, 6, 8))
    global_batch = min(local_batch * degrees["dp_replicate"] * degrees["dp_shard"] * dice.choice((1, 1, 2, 3)), 48)
    optimizer, precision = dice.choice(("adamw", "adamw", "sgd", "muon")), dice.choice(("fp32", "fp32", "fp32", "bf16"))
    if sparse := dice.random() < 0.4:  # fewer than 40 % of the cases have experts, as rules refuse more of these jobs
        # Jobs with experts compute in float32, as rounding to bfloat16 would route some tokens to other experts.
        optimizer, precision = dice.choice(("adamw", "sgd")), "fp32"
        degrees["ep"] = dice.choice(divisors(degrees["dp_shard"] * degrees["cp"] * degrees["tp"])[1:] or (1,))
    if precision == "bf16":
        global_batch *= -(-SAMPLES // global_batch)
    layout = (
        f"gpus={ranks}",
        "parallelism=single",
        *(f"parallelism.{name}={degree}" for name, degree in degrees.items() if degree > 1),
        *technique(dice, degrees),
        f"data.local_batch={local_batch}",
    )
    # A loss in chunks rounds the gradient of bfloat16 logits at another place than the plain one, so the reference of a
    # layout in bfloat16 has the same loss.
    loss = tuple(loss_override for loss_override in layout if loss_override.startswith("loss") and precision == "bf16")
    layout = tuple(loss_override for loss_override in layout if loss_override not in loss)
    shape = _experts(dice) if sparse else _shape(dice)
    keys = learning(dice, optimizer, precision)
    base = (*shape, *keys, *loss, f"precision={precision}", f"data.global_batch={global_batch}")
    tolerances = (
        dice.choice((BF16, BF16_COARSE))
        if precision == "bf16"
        else MUON
        if optimizer == "muon"
        else SPARSE
        if sparse
        else EXACT
    )
    maskable = degrees["cp"] == 1 or "parallelism.cp_rotate=ulysses" in layout
    return Case(
        f"random {index}",
        ranks,
        layout,
        base,
        uneven_mask=dice.random() < 0.5,
        documents=maskable and dice.random() < 0.3,
        **tolerances,
    )


def _shape(dice: random.Random) -> tuple[str, ...]:
    """Draw the shapes of a model and a sequence length, most of them unusual."""
    heads, shared = dice.choice(((6, 2), (8, 4), (12, 4), (4, 1), (4, 4)))
    return (
        f"model.n_heads={heads}",
        f"model.n_kv_heads={shared}",
        f"model.dim={heads * dice.choice((4, 8, 12, 16))}",
        f"model.n_layers={dice.choice((2, 4, 5, 8))}",
        f"model.vocab_size={dice.choice((97, 256, 331, 512))}",
        "model.ffn_dim=null",
        f"model.multiple_of={dice.choice((1, 4, 24, 32))}",
        f"model.tie_embeddings={dice.choice((True, False))}",
        f"model.rope_scaling.factor={dice.choice((1.0, 8.0))}",
        "model.rope_scaling.original_max_seq_len=32",
        f"data.seq_len={dice.choice((24, 48, 64, 72, 96))}",
    )


def _experts(dice: random.Random) -> tuple[str, ...]:
    """Draw the shapes of a model with experts, and a sequence length."""
    groups, family = dice.choice((1, 2, 4)), dice.choice((MOE, LATENT))
    yarn = (
        "model.yarn.factor=8",
        "model.yarn.original_max_seq_len=16",
        f"model.yarn.temperature={dice.choice((0.7, 1.0))}",
    )
    return (
        *family,
        *(yarn if family is LATENT and dice.random() < 0.5 else ()),
        f"model.dim={dice.choice((32, 48, 64))}",
        f"model.expert_dim={dice.choice((8, 24, 48))}",
        f"model.n_layers={dice.choice((2, 4))}",
        f"model.first_k_dense_replace={dice.choice((0, 1))}",
        f"model.n_experts={groups * dice.choice((4, 6))}",
        f"model.experts_per_token={dice.choice((2, 3))}",
        f"model.n_group={groups}",
        f"model.topk_group={max(1, groups // 2)}",
        f"model.n_shared_experts={dice.choice((0, 1, 2))}",
        f"model.router={dice.choice(('softmax', 'sigmoid'))}",
        f"model.norm_topk_prob={dice.choice((True, False))}",
        f"model.routed_scaling_factor={dice.choice((1.0, 2.5))}",
        f"model.router_bias_update_rate={dice.choice((0.0, 0.001))}",
        f"model.sequence_balance={dice.choice((0.0, 0.01))}",
        f"model.vocab_size={dice.choice((97, 256))}",
        f"data.seq_len={dice.choice((24, 48))}",
    )


def learning(dice: random.Random, optimizer: str, precision: str) -> tuple[str, ...]:
    """Draw the keys of an optimizer, and a learning rate schedule.

    With the larger rate, SGD would move the weight of a norm, which is about 1, by about one bfloat16 number. Rounding
    would then decide for a few elements which number the model computes with.
    """
    rate = {"sgd": 0.01 if precision == "bf16" else 0.05}.get(optimizer, 0.002)
    return (
        f"optimizer={optimizer}",
        f"optimizer.max_norm={dice.choice((0.1, 1.0, 0.0))}",
        f"optimizer.lr={rate}",
        # AdamW moves an element by the whole rate even if rounding alone decides the sign of its gradient, unless the
        # gradient is below epsilon.
        "optimizer.sgd_momentum=0.9" if optimizer == "sgd" else "optimizer.eps=1e-5",
        f"optimizer.weight_decay={dice.choice((0.0, 0.1, 0.5))}",
        f"optimizer.decay_matrices_only={dice.choice((True, False))}",
        f"lr_scheduler={dice.choice(('wsd', 'cosine', 'constant'))}",
        f"lr_scheduler.warmup_steps={dice.choice((0, 1, 2))}",
        f"seed={dice.randrange(1000)}",
    )


def technique(dice: random.Random, degrees: dict[str, int]) -> Iterator[str]:
    """Draw techniques: backend, activation checkpointing, loss, and the options of each degree above 1."""
    yield f"parallelism.backend={dice.choice(('fsdp2', 'fsdp2', 'simple_fsdp'))}"
    yield f"parallelism.reshard_after_forward={dice.choice(('default', 'default', 'always', 'never'))}"
    yield f"ac={dice.choice(('none', 'none', 'full', 'layer', 'op', 'lean'))}"
    if dice.random() < 0.15:
        yield from ("compile=block", "compile.backend=aot_eager")
    if dice.random() < 0.4:
        yield from ("loss=linear_cross_entropy", f"loss.chunk_tokens={dice.choice((7, 50, 100))}")
    if degrees["tp"] > 1:
        yield from (
            f"parallelism.{name}={dice.choice((True, False))}" for name in ("sequence_parallel", "loss_parallel")
        )
    if degrees["cp"] > 1:
        yield f"parallelism.cp_rotate={(rotate := dice.choice(('allgather', 'alltoall', 'ulysses')))}"
        if rotate != "ulysses":
            yield f"parallelism.cp_load_balance={dice.choice((True, False))}"
    if degrees["pp"] > 1:
        name = dice.choice(SCHEDULES)
        yield f"pp_schedule={name}"
        if name in ("looped_bfs", "interleaved_1f1b", "interleaved_zb"):
            yield f"pp_schedule.stages_per_rank={dice.choice((2, 3))}"
        if dice.random() < 0.3:
            yield f"pp_schedule.microbatches={dice.choice((2, 4, 6, 8))}"
