"""The keys of a model of the library transformers. What the folder's config.json says is frozen into them when the job is
frozen, so that a run does not depend on the folder later. transformers is imported only then, and on ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.data.facts import MODEL
from titan_hydra.core.job.config.family import Linear, decoder_flops
from titan_hydra.core.job.config.fault import Fault, bad_value, fault_at
from titan_hydra.core.job.config.field import key
from titan_hydra.core.job.config.model import Model
from titan_hydra.core.job.config.ranges import COUNT, PATH, POSITIVE, WIDTH, Interval, Text
from titan_hydra.core.job.config.registry import CP_ROTATIONS

# our keys that exist in a config.json too; a key that is set replaces the file's value
SHARED = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_dim": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
    "tie_embeddings": "tie_word_embeddings",
}
# keys of a config.json that do not change what its weights compute: ids of tokens are facts of a run (facts.json)
BESIDE = (
    "_name_or_path",
    "architectures",
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "model_type",
    "pad_token_id",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
KEPT = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")
LONGEST_HEADER = 100_000_000  # bytes, as safetensors allows
OWN_NAMES = "own_names"  # a key of `beside`: exports have the names that transformers 5 has in memory
RANDOM = ("dropout", "pdrop", "jitter", "layerdrop")  # parts of the names of keys that make a forward random
LONGEST = Text("JSON", longest=1 << 18)
NULL = "; null: what model.path says"


@dataclass
class TransformersConfig(Model):
    path: str | None = key(
        None,
        "folder of a model that the installed transformers knows; its config.json is read once",
        PATH,
        identity=False,
    )
    content: str | None = key(None, "the content of that config.json; filled in by the launcher", LONGEST)
    beside: str | None = key(
        None,
        "what exports need of that folder beside its arithmetic; filled in by the launcher",
        LONGEST,
        identity=False,
    )
    vocab_size: int | None = key(None, f"rows of the embedding and of the output head{NULL}", Interval(1, 2**24))  # type: ignore[assignment]
    dim: int | None = key(None, f"width of the residual stream{NULL}", WIDTH)  # type: ignore[assignment]
    n_layers: int | None = key(None, f"number of transformer blocks{NULL}", Interval(1, 10_000))  # type: ignore[assignment]
    n_heads: int | None = key(None, f"number of query heads{NULL}", WIDTH)  # type: ignore[assignment]
    n_kv_heads: int | None = key(None, f"number of key/value heads{NULL}", WIDTH)  # type: ignore[assignment]
    norm_eps: float | None = key(None, "as config.json says; must not be set", Interval(0, 1))  # type: ignore[assignment]
    rope_theta: float | None = key(None, "as config.json says; must not be set", POSITIVE)  # type: ignore[assignment]
    max_seq_len: int | None = key(None, f"maximum sequence length of the model, in tokens{NULL}", COUNT)  # type: ignore[assignment]
    tie_embeddings: bool | None = key(None, f"the output head uses the embedding's weight{NULL}")  # type: ignore[assignment]

    def frozen(self) -> Self:
        """Return the model with every key filled in from the folder's config.json. Raises ConfigError if there is none,
        or transformers does not know such a model.
        """
        if self.content is None:
            if self.path is None:
                raise bad_value("model.path", None, "names no folder with a config.json")
            for name in ("norm_eps", "rope_theta"):
                if (value := getattr(self, name)) is not None:
                    raise bad_value(
                        f"model.{name}", value, "is what config.json of model.path says; edit it there", None
                    )
            content, beside = contents_of(content_of_folder(self.path), Path(self.path).expanduser())
            return replace(self, content=content, beside=beside).frozen()
        if self.vocab_size is not None and self.tie_embeddings is not None:
            return self
        from .known import library_config

        theirs, keys = library_config(self), {}
        for ours, name in SHARED.items():
            from_folder = getattr(theirs, name, None)
            keys[ours] = getattr(self, ours) if getattr(self, ours) is not None else from_folder
        keys["n_kv_heads"] = keys["n_kv_heads"] or keys["n_heads"]
        for ours in ("vocab_size", "dim", "n_layers", "n_heads"):
            if not isinstance(keys[ours], int):
                raise bad_value("model.path", self.path, f"its config.json has no {SHARED[ours]}")
        keys["max_seq_len"] = keys["max_seq_len"] or 2**24
        keys["tie_embeddings"] = bool(keys["tie_embeddings"])
        rope = getattr(theirs, "rope_parameters", None) or {}
        keys["norm_eps"] = float(getattr(theirs, "rms_norm_eps", None) or Model.norm_eps)
        keys["rope_theta"] = float(rope.get("rope_theta") or getattr(theirs, "rope_theta", None) or Model.rope_theta)
        return replace(self, **keys)

    def reduce(self) -> None:
        """Reduce sizes that other families do not have, for proofs: experts, and a window that must hide some tokens."""
        content = json.loads(self.content or "{}")
        for name, most in REDUCED.items():
            if isinstance(content.get(name), int):
                content[name] = min(content[name], most)
        self.content = json.dumps(content, sort_keys=True)

    def arithmetic(self) -> dict[str, Any]:
        """Return the values of config.json as keys of their own, so that a difference is named."""
        content = json.loads(self.content or "{}")
        without_folder = {
            name: value for name, value in super().arithmetic().items() if name not in ("path", "content", "beside")
        }
        return without_folder | {
            "config": {name: value for name, value in content.items() if name not in SHARED.values()}
        }

    @property
    def model_type(self) -> str:
        """The model's type in its config.json."""
        return str(json.loads(self.content or "{}").get("model_type"))

    @property
    def expert_count(self) -> int:
        """The number of routed experts of a block, as config.json says; 0 without experts."""
        content = json.loads(self.content or "{}")
        return next((content[name] for name in COUNTS if isinstance(content.get(name), int)), 0)

    def faults(self) -> Iterator[Fault]:
        """Nothing in a forward may be random, and transformers chooses the kernels of its models."""
        if self.attention != "auto":
            yield Fault("model.attention", self.attention, "transformers chooses the kernel of its models", ("auto",))
        for name, value in json.loads(self.content or "{}").items():
            if (name, bool(value)) in (("use_bidirectional_attention", True), ("is_causal", False)):
                reason = f"{name}={value} in its config.json: only causal decoders are trained"
                yield Fault("model.path", self.path, reason)
            if any(part in name for part in RANDOM) and isinstance(value, float | int) and value:
                reason = f"{name}={value} in its config.json: random numbers would depend on the layout; nearest legal: 0 there"
                yield Fault("model.path", self.path, reason)


# The model types of the table in docs/transformers.md. Another type could have a norm or a linear that a split does not know,
# compute between its blocks, or let documents see each other, and its gradient would be wrong in silence.
PROVEN = (
    *("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma2", "gemma3_text", "gpt_oss", "phi3"),
    *("glm4", "olmo2"),
)
# Model types whose experts, split over ranks, were compared with one process.
WITH_EXPERTS = ("qwen3_moe", "mixtral", "gpt_oss")
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # names of the number of experts in a config.json
REDUCED = {  # keys of a config.json that proofs reduce, and their largest values there
    "sliding_window": 8,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "query_pre_attn_scalar": 16,
}


def content_of_folder(folder: str) -> dict[str, Any]:
    """Return a folder's config.json, which names the model's type. Raises ConfigError."""
    file = Path(folder).expanduser() / MODEL
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise bad_value("model.path", folder, f"{file.name} there cannot be read as JSON ({reason})") from error
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise bad_value("model.path", folder, "its config.json names no model_type")
    return content


def contents_of(data: dict[str, Any], folder: Path) -> tuple[str, str]:
    """Return the keys of a config.json that decide what its weights compute, with the model's type, and the keys beside
    them that exports keep, both as JSON.
    """
    content = {name: value for name, value in data.items() if name not in BESIDE or name == "model_type"}
    beside = {name: data[name] for name in KEPT if name in data}
    if has_own_names(folder):
        beside[OWN_NAMES] = True
    return json.dumps(content, sort_keys=True), json.dumps(beside, sort_keys=True)


def has_own_names(folder: Path) -> bool:
    """Whether a folder's weights have experts as transformers 5 has them in memory, packed into one tensor."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    try:
        if index.is_file():
            names = json.loads(index.read_text())["weight_map"]
        else:
            with single.open("rb") as file:
                names = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), LONGEST_HEADER)))
        return any(name.endswith((".experts.gate_up_proj", ".experts.down_proj")) for name in names)
    except (OSError, ValueError, KeyError, TypeError, MemoryError):
        return False  # weights that cannot be read are refused where they are loaded


def flops_of_token(config: Any, seq_len: int, parameters: int) -> int | None:
    """Return the FLOPs of a token as for any decoder; None for a model with experts, as not all parameters are used."""
    experts = any("experts" in name for name in json.loads(config.content or "{}"))
    return None if experts else decoder_flops(config, seq_len, parameters)


def faults(job: Any) -> Iterator[Fault]:
    """Yield what a model of transformers cannot be combined with, what its initial weights lack, and why its parts are not
    those of a decoder.
    """
    if job.checkpoint.initial_load_path:
        from .hf import weights_faults

        yield from weights_faults(job)
    try:
        parameters(job.model)
    except ConfigError as error:
        reason = str(error).removeprefix(f"model.path={job.model.path}: ")
        yield Fault("model.path", job.model.path, reason)
    only = "a model of transformers is sharded by FSDP2"
    if job.parallelism.cp > 1 and not CP_ROTATIONS[job.parallelism.cp_rotate].splits_heads:
        reason = "attention of a model of transformers is its own, which gets whole sequences"
        yield fault_at(job, "parallelism.cp_rotate", reason, "ulysses")
    if job.parallelism.backend != "fsdp2":
        yield fault_at(job, "parallelism.backend", only, "fsdp2")
    kind, proven = job.model.model_type, ", ".join(PROVEN)
    said = f"model_type={kind} in config.json of model.path:"
    for degree, name in (("tp", "tensor"), ("pp", "pipeline"), ("cp", "context")):
        if getattr(job.parallelism, degree) > 1 and kind not in PROVEN:
            yield fault_at(job, f"parallelism.{degree}", f"{said} {name} parallelism is proven for {proven}", 1)
    if job.parallelism.ep > 1 and job.model.expert_count and kind not in WITH_EXPERTS:
        reason = f"{said} expert parallelism is proven for {', '.join(WITH_EXPERTS)}"
        yield fault_at(job, "parallelism.ep", reason, 1)
    if job.parallelism.ep > 1 and kind in WITH_EXPERTS:
        yield from faults_of_expert_shards(job)
    if job.parallelism.ep > 1 and job.parallelism.tp > 1:
        yield fault_at(job, "parallelism.ep", "with tp, every rank holds all experts of a model of transformers", 1)
    if job.parallelism.ep > 1 and job.compile.name != "off":
        yield fault_at(
            job, "compile.name", "experts of a model of transformers send their tokens between kernels", "off"
        )
    if job.data.document_mask and kind not in PROVEN:
        yield fault_at(job, "data.document_mask", f"{said} documents of {proven} are proven to be apart", False)
    if job.precision.converter not in (None, "float8", "mxfp8"):
        reason = "linears of a model of transformers were not compared in this format"
        yield fault_at(job, "precision.converter", reason, "float8", "mxfp8", None)
    if job.parallelism.tp > 1 and job.parallelism.sequence_parallel:
        reason = "norms of a model of transformers get whole sequences"
        yield fault_at(job, "parallelism.sequence_parallel", reason, False)


def faults_of_expert_shards(job: Any) -> Iterator[Fault]:
    """FSDP shards the experts of an ep rank by expert if they divide evenly over the ranks that hold them, else by width."""
    from titan_hydra.core.job.ranks import expert_degrees

    from .known import counts_of

    layout, widths = job.parallelism, counts_of(job.model).expert_widths
    ranks, experts = layout.dp_shard * layout.cp * layout.tp, job.model.expert_count

    def even(ep: int) -> bool:
        shards = ranks // ep
        return ep == 1 or not experts // ep % shards or not any(width % shards for width in widths)

    degrees = expert_degrees(job, ranks)
    if layout.ep in degrees and not even(layout.ep):
        reason = (
            f"neither experts nor their widths ({', '.join(map(str, widths))}) divide over {ranks // layout.ep} ranks"
        )
        yield Fault("parallelism.ep", layout.ep, reason, legal=tuple(ep for ep in degrees if even(ep)))


def linears(config: Any) -> tuple[Linear, ...]:
    """Return the linears of a block, for adapters, number formats and predictions."""
    from .known import counts_of

    return counts_of(config).linears if config.content else ()


def parameters(config: Any) -> int:
    """Return the number of parameters."""
    from .known import counts_of

    return counts_of(config).parameters


def kept_by_blocks(job: Any) -> float:
    """Return the bytes per token that a block's forward keeps."""
    from .kept import bytes_kept

    if flops_of_token(job.model, 1, 0) is None:
        from titan_hydra.experiments.plan.shape import NotPredictable

        reason = f"experts of a model_type={job.model.model_type} have no formulas; comm=fake counts a rank's memory"
        raise NotPredictable(f"model.path={job.model.path}: {reason}")
    return bytes_kept(job)
