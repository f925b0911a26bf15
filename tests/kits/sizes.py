"""Small models with experts and without, for tests of rooms that stand below instruments."""

BASE = (
    "precision=fp32",
    "model.dim=64",
    "model.n_layers=4",
    "model.n_heads=8",
    "model.n_kv_heads=4",
    "model.vocab_size=512",
    "data=synthetic",
    "data.seq_len=32",
    "data.global_batch=16",
    "lr_scheduler.warmup_steps=2",
    "checkpoint=off",
)
MOE = ("model=qwen3_moe_debug", "model.head_dim=16", "model.expert_dim=64", "model.router_bias_update_rate=1e-3")
LATENT = (
    "model=deepseek_v3_debug",
    "model.n_kv_heads=8",
    "model.n_experts=8",
    "model.experts_per_token=2",
    "model.expert_dim=32",
)
