"""The keys of every model family. A family's own keys are in a dataclass that extends these
(titan_hydra/core/models/*/config.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from .fault import Fault, bad_value
from .field import key
from .ranges import COUNT, NAME, POSITIVE, WIDTH, WORD, Interval


@dataclass
class Model:
    name: str = key(..., "name of the option of conf/model", NAME)
    family: str = key(
        "llama3", "model family: a folder of titan_hydra/core/models, or one that train.imports registers", WORD
    )
    vocab_size: int = key(..., "rows of the embedding and of the output head", Interval(1, 2**24))
    dim: int = key(..., "width of the residual stream", WIDTH)
    n_layers: int = key(..., "number of transformer blocks", Interval(1, 10_000))
    n_heads: int = key(..., "number of query heads", WIDTH)
    n_kv_heads: int = key(..., "number of key/value heads; fewer than n_heads gives grouped-query attention", WIDTH)
    head_dim: int | None = key(None, "width of a head; null: dim / n_heads", WIDTH)
    ffn_dim: int | None = key(None, "width of the feed-forward; null: computed by the rule of the model family", WIDTH)
    norm_eps: float = key(1e-5, "epsilon of RMSNorm", Interval(0, 1, open_low=True))
    rope_theta: float = key(500000.0, "base of the rotary frequencies", POSITIVE)
    max_seq_len: int = key(131072, "maximum sequence length of the model, in tokens", COUNT)
    tie_embeddings: bool = key(False, "the output head uses the embedding's weight")
    attention: str = key(
        "auto",
        "SDPA back end; auto and flash do not compute pairs of tokens that the mask of packed documents hides",
        choices=("auto", "cudnn", "flash", "efficient", "math"),
        changes="technique",
    )
    # keys, beside dim, that grow with the model's width; the width of a head does not grow
    widths: ClassVar[tuple[str, ...]] = ("n_heads", "n_kv_heads", "ffn_dim")
    predictions: ClassVar[int] = 1  # number of tokens that are predicted at each place in training
    qk_norm: ClassVar[bool] = False  # whether queries and keys are normalized; each family defines it

    @property
    def sparse(self) -> bool:
        """Whether blocks have this package's experts."""
        return False

    @property
    def expert_count(self) -> int:
        """The number of routed experts of a block, over which parallelism.ep may split them; 0 without experts."""
        return 0

    @property
    def causal(self) -> bool:
        """Whether each token attends only to itself and to earlier tokens."""
        return True

    @property
    def head_width(self) -> int:
        """The width of a head."""
        return self.head_dim or self.dim // self.n_heads

    @property
    def value_width(self) -> int:
        """The width of a head's value."""
        return self.head_width

    @property
    def ffn_width(self) -> int:
        """The width of the feed-forward: ffn_dim if it is set, else 4 * dim. A family may define another default."""
        return self.ffn_dim or 4 * self.dim

    def widened(self, dim: int) -> Self:
        """Return this model with another dim, and its other widths in proportion. Raises ConfigError if one of them would
        not be a whole number.
        """
        now = {name: getattr(self, name) for name in self.widths} | {"ffn_dim": self.ffn_width}
        for name, value in now.items():
            if value * dim % self.dim:
                reason = f"model.{name}={value} at model.dim={self.dim} would not be a whole number"
                raise bad_value("model.dim", dim, reason)
        wide = replace(self, dim=dim, **{name: value * dim // self.dim for name, value in now.items()})
        return replace(wide, head_dim=self.head_width) if wide.head_width != self.head_width else wide

    def arithmetic(self) -> dict[str, Any]:
        """Return, by key, all values that determine which function the weights compute. Weights cannot be exchanged
        between models that differ in such a value.
        """
        others = ("name", "family", "max_seq_len", "attention")
        return {**vars(self), "head_dim": self.head_width, "ffn_dim": self.ffn_width} | dict.fromkeys(others)

    def reduce(self) -> None:
        """Reduce the sizes that other families do not have, in place, for proofs."""

    def faults(self) -> Iterator[Fault]:
        """Yield what is wrong with the family's own keys beyond their ranges."""
        yield from ()
