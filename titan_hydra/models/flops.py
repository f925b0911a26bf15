"""The number of a model's parameters and the FLOPs of a token, computed from its config alone."""
from titan_hydra.config.load import ffn_width
from titan_hydra.config.schema import Model


def count_parameters(config: Model) -> int:
    """Return the number of parameters; a tied weight counts once."""
    key_value = config.dim // config.n_heads * config.n_kv_heads
    layer = 2 * config.dim + 2 * config.dim**2 + 2 * config.dim * key_value + 3 * config.dim * ffn_width(config)
    embeddings = config.vocab_size * config.dim * (1 if config.tie_embeddings else 2)
    return embeddings + config.n_layers * layer + config.dim


def flops_per_token(config: Model, seq_len: int) -> int:
    """Return the FLOPs of forward and backward for one token, counted as TorchTitan does: 6 per weight, 12 * layers * dim * seq_len for
    attention.

    An embedding is a look-up and costs nothing, unless it is also the head. No causal discount, no recomputation.
    """
    lookups = 0 if config.tie_embeddings else config.vocab_size * config.dim
    head_dim = config.dim // config.n_heads
    return 6 * (count_parameters(config) - lookups) + 12 * config.n_layers * config.n_heads * head_dim * seq_len
