"""A model that trains in seconds and has what layouts split, for tests of rooms that stand below instruments."""

BASE = (
    "precision=fp32",
    "model.dim=64",
    "model.n_layers=4",
    "model.n_heads=8",
    "model.n_kv_heads=4",
    "model.ffn_dim=192",
    "model.vocab_size=512",
    "data=synthetic",
    "data.seq_len=32",
    "data.global_batch=16",
    "lr_scheduler.warmup_steps=2",
    "optimizer.lr=2e-3",
    "checkpoint=off",
)
MOE = ("model=qwen3_moe_debug", "model.head_dim=16", "model.expert_dim=64", "model.router_bias_update_rate=1e-3")
LATENT = (
    "model=deepseek_v3_debug",
    "model.q_lora_rank=24",
    "model.kv_lora_rank=16",
    "model.qk_nope_head_dim=16",
    "model.qk_rope_head_dim=8",
    "model.v_head_dim=16",
    "model.n_heads=4",
    "model.n_kv_heads=4",
    "model.n_experts=8",
    "model.experts_per_token=2",
    "model.expert_dim=32",
    "model.sequence_balance=0.01",
)


def later_wins(*overrides: str) -> list[str]:
    """Keep only the last override of each key: Hydra refuses a command line that chooses a group twice."""
    return list({override.partition("=")[0]: override for override in overrides}.values())
