"""The rows of a list in lists/: what each of them measures, and the row as overrides of titan_hydra."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import yaml

LISTS = Path(__file__).with_name("lists")
# dim, layers, heads, key/value heads, feed-forward width, vocabulary. The head has weights of its own, as in
# TorchTitan's model.
SHAPES = {
    "8b": (4096, 32, 32, 8, 14336, 128256),
    "3b": (3072, 28, 24, 8, 8192, 128256),
    "1b": (2048, 16, 32, 8, 8192, 128256),
    "160m": (768, 12, 12, 12, 2048, 50304),
    "debug": (256, 4, 4, 2, 768, 4096),
    "30b_a3b": (2048, 48, 32, 4, 6144, 151936),
    "debug_experts": (256, 4, 4, 2, 768, 4096),
}
# for Qwen3: width of a head, number of experts, experts of a token, width of an expert
EXPERTS = {"30b_a3b": (128, 128, 8, 768), "debug_experts": (64, 8, 2, 384)}
RECIPES = {"rowwise": "float8_rowwise", "tensorwise": "float8_tensorwise", "bf16": "bf16", "fp32": "fp32"}
PLAIN = ("bf16", "fp32")  # formats in which a CPU computes; the others are emulated there


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement. Keys that both tools have share one name; `overrides` are for titan_hydra only, `wrap` is for
    TorchTitan only.

    `against` names a row of the same list; the ratio is this row's tokens per second divided by that row's.
    """

    name: str
    tool: str  # titan_hydra or torchtitan
    shape: str
    seq_len: int
    batch: int
    layers: int = 0  # 0: as in the shape
    against: str = ""
    precision: str = "bf16"  # or fp32, rowwise, rowwise_with_gw_hp, tensorwise
    ac: str = "none"
    compile: bool = True
    steps: int = 20
    window: int = 5  # steps of a measurement; the first window is left out, and the median of the others counts
    lr: float = 3e-4  # both warm up for 2 steps; at 2e-3, losses of random tokens rise
    # native: TorchTitan 0.2.2 without FSDP; fsdp: FSDP2 over one rank too, as TorchTitan 0.3 always does
    wrap: str = "native"
    float8_all_gather: bool = False
    overrides: tuple[str, ...] = ()
    balanced: bool = False  # experts are chosen in turn: debug.balance_experts
    cpu: bool = False
    needs: float = 0  # GiB of the card; read() sets it

    @property
    def experts(self) -> tuple[int, ...]:
        """Return width of a head, number of experts, experts of a token, and width of an expert; () for Llama 3."""
        return EXPERTS.get(self.shape, ())

    @property
    def dimensions(self) -> tuple[int, ...]:
        """Return dim, layers, heads, key/value heads, feed-forward width, vocabulary."""
        dim, layers, *rest = SHAPES[self.shape]
        return dim, self.layers or layers, *rest


def read(name: str, changes: dict[str, Any], memory: float = math.inf) -> list[Row]:
    """Return the rows of a list on a card with this memory, in GiB. Raise SystemExit(2) if it cannot be read."""
    file = Path(name) if name.endswith(".yaml") else LISTS / f"{name}.yaml"
    try:
        content = yaml.safe_load(file.read_text())
        rows = content.pop("rows")
        found = [Row(**on_card({**content, **row, **changes}, memory)) for row in rows]
        for row in found:
            if row.against and row.against not in [other.name for other in found]:
                raise ValueError(f"{row.name}: no row is called {row.against}")
            row.dimensions  # noqa: B018 - raises where the shape is unknown
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        lists = ", ".join(sorted(path.stem for path in LISTS.glob("*.yaml")))
        print(
            f"{file}: cannot be read as a list of rows ({type(error).__name__}: {error}); there are: {lists}",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    return found


def on_card(settings: dict[str, Any], memory: float) -> dict[str, Any]:
    """Choose each setting that follows the card's memory: {0: 6, 120: 12} is 6, and 12 from 120 GiB on. If the card has
    less than the least of these numbers, the row needs this number.
    """
    found = settings | {"overrides": tuple(settings.get("overrides", ()))}
    needs = 0
    for key, value in settings.items():
        if isinstance(value, dict):
            needs = max(needs, min(value))
            found[key] = value[max((least for least in value if least <= memory), default=min(value))]
    return found | {"needs": needs}


def tiny(row: Row) -> Row:
    """Return the same row in a size that takes seconds."""
    shape = "debug_experts" if row.experts else "debug"
    return dataclasses.replace(row, shape=shape, layers=2, seq_len=64, batch=min(row.batch, 2), steps=6, window=2)


def overrides(row: Row) -> list[str]:
    """Return the row as overrides of titan_hydra."""
    dim, layers, heads, kv_heads, width, vocabulary = row.dimensions
    emulated = row.cpu and row.precision not in PLAIN
    precision = [f"precision={RECIPES.get(row.precision, 'float8_rowwise')}"]
    if row.precision == "rowwise_with_gw_hp":
        precision.append("precision.recipe=rowwise_with_gw_hp")
    wanted = [
        "cluster=inline",
        "parallelism=single",
        "data=synthetic",
        "checkpoint=off",
        f"model={'qwen3_moe_debug' if row.experts else 'llama3_debug'}",
        f"model.dim={dim}",
        f"model.n_layers={layers}",
        f"model.n_heads={heads}",
        f"model.n_kv_heads={kv_heads}",
        f"model.ffn_dim={width}",
        f"model.vocab_size={vocabulary}",
        f"data.seq_len={row.seq_len}",
        f"data.local_batch={row.batch}",
        f"steps={row.steps}",
        f"metrics.log_every={row.window}",
        f"optimizer.lr={row.lr}",
        "lr_scheduler.warmup_steps=2",
        f"ac={row.ac}",
        *precision,
        *(["precision.emulate=true"] if emulated else []),
        *sparse(row),
        *(["compile=block"] if row.compile and not emulated else []),
        *(["compile.backend=aot_eager"] if row.compile and row.cpu and not emulated else []),
    ]
    given = {override.partition("=")[0] for override in row.overrides}
    return [override for override in wanted if override.partition("=")[0] not in given] + list(row.overrides)


def sparse(row: Row) -> list[str]:
    """Return the row's experts as overrides."""
    keys = ("model.head_dim", "model.n_experts", "model.experts_per_token", "model.expert_dim")
    return [
        *(f"{key}={value}" for key, value in zip(keys, row.experts, strict=False)),
        *["debug.balance_experts=true"] * row.balanced,
    ]
