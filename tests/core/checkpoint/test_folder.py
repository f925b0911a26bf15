"""What a Hugging Face folder says is computed as transformers computes it, or refused by name: positions, heads, weights,
the biases of routers.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from titan_hydra import cli
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.checkpoint.folder import Folder
from titan_hydra.core.job.config import schema, to_dict
from titan_hydra.core.models.hf import hf_of, meta_state, rope_of
from titan_hydra.core.models.llama3.config import Llama3Config, RopeScaling
from titan_hydra.core.models.qwen3.config import Qwen3Config
from titan_hydra.core.train.generate import load_model

from .conversion import exported, loud_model, save_run
from .test_convert_experts import YARN, deepseek, qwen

DENSE = {"name": "small", "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 96, "max_seq_len": 256}
FAMILIES = {
    "llama3": Llama3Config(vocab_size=99, rope_scaling=RopeScaling(factor=8.0, original_max_seq_len=32), **DENSE),
    "qwen3": Qwen3Config(family="qwen3", vocab_size=99, head_dim=16, **DENSE),
    "qwen3_moe": qwen(),
    "deepseek_v3": deepseek(yarn=YARN),
}
STRETCHED = {
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {"factor": 2.0, "short_factor": [1.0] * 8, "long_factor": [1.0] * 8},
}


def config_of(name):
    config = FAMILIES[name]
    return hf_of(config).to_config(config, torch.float32)


def read(data, name, tmp_path):
    return hf_of(FAMILIES[name]).from_config(data, tmp_path / "config.json")


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("spelled", ["type", "rope_type"])
def test_positions_are_read_in_every_spelling_or_refused(name, place, spelled, tmp_path):
    data = config_of(name)
    known = data.pop("rope_scaling") or {}
    theta = data.pop("rope_theta")
    rope = {key: value for key, value in known.items() if key not in ("type", "rope_type")}
    rope |= {spelled: known.get("rope_type", "default")}
    spellings = [{"rope_theta": theta, place: rope}]
    if place == "rope_parameters":
        spellings += [{place: rope | {"rope_theta": theta}}, {place: rope, "rope_theta": theta, "rope_scaling": rope}]
    for spelling in spellings:
        assert read(data | spelling, name, tmp_path).arithmetic() == FAMILIES[name].arithmetic()
    for kind, more in STRETCHED.items():
        if kind != known.get("rope_type"):
            with pytest.raises(ConfigError, match=f"rope_type={kind}: only .*default can be converted"):
                read(data | {"rope_theta": theta, place: {spelled: kind} | more}, name, tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rope_scaling": {"factor": 4.0}}, "factor=4.0 of the rotary positions, without a rope_type"),
        ({"rope_scaling": {"type": "default", "rope_type": "yarn"}}, "rope_type of the .* is default and also yarn"),
        ({"rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]}}, "mrope_section"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "rope_theta of the .* and also"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "of full_attention alone"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: only 1.0"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"use_sliding_window": True, "sliding_window": 16}, "sliding_window=(16|True): only (None|False)"),
        ({"use_sliding_window": None, "sliding_window": 16}, "sliding_window=16: only None"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"is_causal": False}, "is_causal=False: only True"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ({"rope_parameters": ["yarn"]}, "rotary positions of .*yarn.*only a table"),
    ],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_no_family_computes_is_refused_by_all(name, changed, message, tmp_path):
    data = config_of(name)
    if {"rope_scaling", "rope_parameters"} & changed.keys():
        data |= {"rope_scaling": None}
    kept = {key: value for key, value in (data | changed).items() if key != "use_sliding_window" or value is not None}
    with pytest.raises(ConfigError, match=message):
        read(kept, name, tmp_path)


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("llama3", {"rms_norm_eps": None}, "model.norm_eps"),
        ("qwen3", {"rms_norm_eps": "small"}, "model.norm_eps"),
        ("qwen3", {"rms_norm_eps": -1e-5}, "model.norm_eps=-1e-05: must be more than 0"),
        ("qwen3_moe", {"tie_word_embeddings": None}, "model.tie_embeddings"),
        ("llama3", {"max_position_embeddings": None}, "model.max_seq_len"),
        ("llama3", {"vocab_size": None}, "model.vocab_size"),
        ("llama3", {"rope_theta": "large"}, "another type"),
        ("llama3", {"hidden_size": [64]}, "another type|model.dim"),
        ("deepseek_v3", {"n_group": None}, "model.n_group"),
        ("deepseek_v3", {"n_group": 5}, "n_group"),
        ("deepseek_v3", {"routed_scaling_factor": None}, "model.routed_scaling_factor"),
        ("deepseek_v3", {"first_k_dense_replace": None}, "model.first_k_dense_replace"),
    ],
)
def test_values_of_other_types_are_refused(name, changed, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_of(name) | changed))
    with pytest.raises(ConfigError, match=message):
        Folder(tmp_path)


@pytest.mark.parametrize(
    "content", ["[]", "null", "[" * 100_000, '{"weight_map": []}', "{}", '{"weight_map": {"a": 1}}']
)
def test_files_without_a_table_are_refused(content, tmp_path):
    config = json.dumps(config_of("llama3"))
    for name in ("config.json", "model.safetensors.index.json"):
        if name != "config.json" or not content.startswith("{"):
            (tmp_path / "config.json").write_text(config)
            (tmp_path / name).write_text(content)
            with pytest.raises(ConfigError, match=f"{name}: "):
                Folder(tmp_path)


def test_positions_without_a_word_are_plain(tmp_path):
    assert rope_of({}, tmp_path) == {"rope_type": "default"}


def head(folder, change):
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = change(tensors["model.embed_tokens.weight"].clone())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_tied_embeddings_are_one_matrix_wherever_weights_are_read(tmp_path):
    config = Llama3Config(vocab_size=9000, tie_embeddings=True, **DENSE)  # rows in several pieces
    _, folder = exported(config, tmp_path)
    head(folder, lambda weight: weight)
    assert load_model(Folder(folder), config, 16, "float32")
    head(folder, lambda weight: torch.cat([weight[:-1], weight[-1:] + 1e-3]))
    with pytest.raises(ConfigError, match=r"lm_head.weight differs from the embedding.* tie_word_embeddings=false"):
        load_model(Folder(folder), config, 16, "float32")
    assert cli.main(["checkpoint", "import", str(folder), str(tmp_path / "imported")]) == 2
    assert not (tmp_path / "imported").exists()


def nan(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def another_index(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, folder / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def adapters(folder):
    (folder / "adapter_config.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (nan, "model.layers.1.mlp.down_proj.weight has values in float32 that are not finite"),
        (another_index, "model.safetensors and model.safetensors.index.json, which names other files"),
        (adapters, "adapter_config.json: adapters cannot be converted"),
    ],
)
def test_weights_that_are_not_what_they_seem_are_refused(damage, message, tmp_path):
    _, folder = exported(FAMILIES["llama3"], tmp_path)
    damage(folder)
    with pytest.raises(ConfigError, match=message):
        source = Folder(folder)
        load_model(source, source.config, 16, "float32")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_its_export_and_transformers_score_alike(name, tmp_path, capsys):
    """Biases of routers are drawn at random (conversion.loud_model); they are buffers, which are read as weights are."""
    transformers = pytest.importorskip("transformers")
    config = type(FAMILIES[name])(**vars(FAMILIES[name]) | {"vocab_size": 4096, "max_seq_len": 128})
    save_run(loud_model(config), config, tmp_path / "run")
    sections = {"model": to_dict(config), "tokenizer": to_dict(schema.Tokenizer(name="embedded"))}
    (tmp_path / "run/config.json").write_text(json.dumps(sections))
    texts = ["The function returns a tensor.", "Every rank reads its own shard.", "x = [1]"]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert cli.main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    capsys.readouterr()
    found = []
    for place in ("run", "hf"):
        assert (
            cli.main(["generate", "scores", str(tmp_path / place), str(tmp_path / "texts.jsonl"), "--context", "64"])
            == 0
        )
        found.append([json.loads(line)["nats"] for line in capsys.readouterr().out.splitlines()])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    losses = []
    for text in texts:
        ids = torch.tensor([[*words(text)["input_ids"], words.eos_token_id]])
        with torch.no_grad():
            logs = theirs(ids[:, :-1]).logits.double().log_softmax(-1)
        losses.append(-logs.gather(-1, ids[:, 1:, None]).sum().item())
    assert found[0] == pytest.approx(losses, rel=1e-5) and found[1] == pytest.approx(losses, rel=1e-5)
    assert any("router.bias" in key for key in meta_state(config)) == (name == "deepseek_v3")
