"""Convert models with experts: the same logits in transformers in both directions; experts as single tensors, packed,
and in float8; refusals.
"""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.checkpoint import convert
from titan_hydra.core.checkpoint.folder import Folder, load_hf
from titan_hydra.core.models import build, family_of
from titan_hydra.core.models.deepseek_v3.config import DeepSeekV3Config, Yarn
from titan_hydra.core.models.hf import meta_state
from titan_hydra.core.models.qwen3_moe.config import Qwen3MoeConfig

from .conversion import assert_transformers_agrees, exported, load, loud_model, some_tokens, titan_checkpoint

COMMON = {
    "name": "small",
    "vocab_size": 99,
    "dim": 64,
    "n_layers": 3,
    "n_heads": 4,
    "ffn_dim": 100,
    "norm_eps": 1e-6,
    "max_seq_len": 256,
}
YARN = Yarn(factor=4.0, original_max_seq_len=32, temperature=0.7)


def qwen(**changes):
    values = {
        "family": "qwen3_moe",
        "n_kv_heads": 2,
        "head_dim": 32,
        "rope_theta": 1e6,
        "n_experts": 12,
        "experts_per_token": 3,
        "expert_dim": 48,
    }
    return Qwen3MoeConfig(**COMMON | values | changes)


def deepseek(**changes):
    values = {
        "family": "deepseek_v3",
        "n_kv_heads": 4,
        "rope_theta": 1e4,
        "n_experts": 12,
        "experts_per_token": 3,
        "expert_dim": 48,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "router": "sigmoid",
        "routed_scaling_factor": 2.5,
        "n_group": 3,
        "topk_group": 2,
        "router_bias_update_rate": 1e-3,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    }
    return DeepSeekV3Config(**COMMON | values | changes)


CONFIGS = {
    "qwen": qwen(),
    "qwen, dense first, plain scores, tied": qwen(first_k_dense_replace=1, norm_topk_prob=False, tie_embeddings=True),
    "deepseek": deepseek(),
    "deepseek, yarn": deepseek(yarn=YARN),
    "deepseek, plain queries, one group, eps": deepseek(q_lora_rank=0, n_group=1, topk_group=1, norm_eps=1e-3),
}


def imported(source, target):
    """Return the model of a Hugging Face folder, imported by `titan checkpoint import`."""
    titan_checkpoint("import", source, target)
    return load(build(convert.read_model_config(target), 128), target)


def change(folder, **values):
    """Change keys of a folder's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def rewrite(folder, change):
    """Replace the tensors in the one file of a folder by the result of `change`."""
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_computes_the_same_logits(name, tmp_path):
    model, folder = exported(CONFIGS[name], tmp_path)
    assert_transformers_agrees(
        model, folder, "Qwen3MoeForCausalLM" if name.startswith("qwen") else "DeepseekV3ForCausalLM"
    )


@pytest.mark.parametrize("kind", ["qwen", "deepseek, yarn"])
def test_transformers_own_folder_can_be_imported(kind, tmp_path):
    """transformers writes newer names into config.json for the number of experts and for the positions."""
    transformers = pytest.importorskip("transformers")
    _, folder = exported(CONFIGS[kind], tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = imported(tmp_path / "theirs", tmp_path / "checkpoint")
    assert type(ours.config) is type(CONFIGS[kind])
    assert ours.config.arithmetic() == CONFIGS[kind].arithmetic()
    with torch.no_grad():
        torch.testing.assert_close(ours(some_tokens()), theirs(some_tokens()).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_round_trip_is_bitwise(name, tmp_path):
    model, folder = exported(CONFIGS[name], tmp_path)
    back = imported(folder, tmp_path / "checkpoint").state_dict()
    assert back.keys() == model.state_dict().keys()
    assert all(torch.equal(back[key], value) for key, value in model.state_dict().items())


def test_biases_of_routers_stay_float32(tmp_path):
    """A bias changes by 1e-3 in a step; in bfloat16, adding this to 0.5 changes nothing."""
    model, folder = exported(deepseek(), tmp_path, "bfloat16")
    assert (
        load_file(folder / "model.safetensors")["model.layers.1.mlp.gate.e_score_correction_bias"].dtype
        == torch.float32
    )
    assert load_file(folder / "model.safetensors")["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16
    titan_checkpoint("import", folder, tmp_path / "checkpoint", "--dtype", "bfloat16")
    reader = convert.Reader(tmp_path / "checkpoint")
    bias = model.layers["1"].feed_forward.router.bias
    assert torch.equal(reader.tensor("layers.1.feed_forward.router.bias", bias.shape, torch.float32), bias)


@pytest.mark.parametrize("config", [qwen(), deepseek()], ids=["qwen", "deepseek"])
def test_experts_are_written_one_by_one_in_their_order(config, tmp_path):
    model, folder = exported(config, tmp_path)
    tensors, experts = load_file(folder / "model.safetensors"), model.layers["2"].feed_forward.experts
    for number in range(12):  # sorted as texts, 10 would come before 2
        for theirs, ours in (("gate_proj", experts.w1), ("down_proj", experts.w2), ("up_proj", experts.w3)):
            assert torch.equal(tensors[f"model.layers.2.mlp.experts.{number}.{theirs}.weight"], ours[number])


def packed(tensors):
    """Return the tensors in the layout that transformers 5 has in memory: one tensor for the first and third matrices
    of all experts, one for the second.
    """
    blocks = {name.split(".experts.")[0] + ".experts." for name in tensors if ".experts." in name}
    rest = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for block in blocks:
        gate, up, down = (
            torch.stack([tensors[f"{block}{number}.{name}.weight"] for number in range(12)])
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        rest |= {f"{block}gate_up_proj": torch.cat((gate, up), 1), f"{block}down_proj": down}
    return rest


@pytest.mark.parametrize("config", [qwen(), deepseek()], ids=["qwen", "deepseek"])
def test_packed_experts_can_be_read(config, tmp_path):
    model, folder = exported(config, tmp_path)
    rewrite(folder, packed)
    back = imported(folder, tmp_path / "checkpoint").state_dict()
    assert all(torch.equal(back[key], value) for key, value in model.state_dict().items())


def in_float8(block, exact):
    """Return a function that stores matrices in float8 with a scale for each block, except those that DeepSeek leaves
    unconverted. The values after this rounding are put into `exact`.
    """

    def stored(tensors):
        result = dict(tensors)
        for name, tensor in tensors.items():
            if tensor.dim() < 2 or any(word in name for word in ("embed_tokens", "lm_head", "mlp.gate.")):
                exact[name] = tensor
                continue
            rows, columns = tensor.shape
            padded = F.pad(tensor, (0, -columns % block[1], 0, -rows % block[0]))
            # [down, block rows, across, block columns]
            tiles = padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
            scale = tiles.abs().amax((1, 3), keepdim=True) / 448
            small = (tiles / scale).to(torch.float8_e4m3fn)
            exact[name] = (small.float() * scale).flatten(2, 3).flatten(0, 1)[:rows, :columns]
            result[name] = (
                small.view(torch.uint8)
                .flatten(2, 3)
                .flatten(0, 1)[:rows, :columns]
                .contiguous()
                .view(torch.float8_e4m3fn)
            )
            result[f"{name}_scale_inv"] = scale[:, 0, :, 0].contiguous()
        return result

    return stored


@pytest.fixture
def float8(tmp_path):
    """Return a folder in DeepSeek's float8 format, and the values that it represents, by the names of its tensors."""
    _, folder = exported(deepseek(), tmp_path)
    exact = {}
    rewrite(folder, in_float8((16, 24), exact))
    change(folder, quantization_config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 24]})
    return folder, exact


def test_float8_in_blocks_can_be_read(float8, tmp_path):
    folder, exact = float8
    side = Folder(folder).hf
    titan_checkpoint("import", folder, tmp_path / "checkpoint", "--dtype", "float32")
    reader, rounded = convert.Reader(tmp_path / "checkpoint"), 0
    for name, tensor in meta_state(deepseek()).items():
        for theirs, part in side.parts(name, reader.tensor(name, tensor.shape, torch.float32)).items():
            assert torch.equal(part, exact[theirs]), theirs
            rounded += not torch.equal(part, part.bfloat16().float())
    assert rounded > 100
    # if no dtype is given, weights become bfloat16; norms and biases keep their dtype
    titan_checkpoint("import", folder, tmp_path / "plain")
    entries = convert.Reader(tmp_path / "plain").metadata.state_dict_metadata
    assert entries["model.layers.1.feed_forward.experts.w1"].properties.dtype == torch.bfloat16
    assert entries["model.layers.1.feed_forward.router.bias"].properties.dtype == torch.float32


def test_any_part_of_a_tensor_can_be_read(float8, tmp_path):
    """A rank's part may be some of the experts or some rows of each expert, and need not begin at the edge of a block."""
    folder, exact = float8
    plain = exported(deepseek(), tmp_path / "plain")[1]
    rewrite(plain, packed)
    names = [f"model.layers.1.mlp.experts.{number}.up_proj.weight" for number in range(12)]
    wholes = {folder: torch.stack([exact[name] for name in names])}
    wholes[plain] = loud_model(deepseek()).layers["1"].feed_forward.experts.w3.detach()
    for source, whole in wholes.items():
        for box in (
            (0, 0, 0, 12, 48, 64),
            (3, 0, 0, 2, 48, 64),
            (10, 17, 0, 2, 14, 64),
            (0, 5, 30, 12, 20, 33),
            (4, 0, 0, 0, 48, 64),
        ):
            begin, size = box[:3], box[3:]
            target = torch.full(size, torch.nan)
            Folder(source).read("layers.1.feed_forward.experts.w3", whole.shape, begin, target)
            assert torch.equal(target, whole[tuple(slice(at, at + many) for at, many in zip(begin, size, strict=True))])


def test_the_blocks_that_predict_further_tokens_have_deepseeks_names(tmp_path):
    model, folder = exported(deepseek(mtp=2), tmp_path)
    tensors, block = load_file(folder / "model.safetensors"), "model.layers.4."
    for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "self_attn.kv_b_proj", "mlp.experts.0.up_proj"):
        assert f"{block}{name}.weight" in tensors
    assert torch.equal(tensors[f"{block}embed_tokens.weight"], model.tok_embeddings.weight)
    assert torch.equal(tensors["model.layers.3.shared_head.head.weight"], model.output.weight)
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 2
    again = imported(folder, tmp_path / "checkpoint")
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name


def test_the_blocks_that_predict_further_tokens_may_be_missing(tmp_path):
    model, folder = exported(deepseek(), tmp_path)
    rewrite(folder, lambda tensors: tensors | {"model.layers.3.eh_proj.weight": torch.zeros(64, 128)})
    with pytest.raises(ConfigError, match=r"model\.layers\.3\.eh_proj\.weight has no place in the model"):
        titan_checkpoint("import", folder, tmp_path / "checkpoint")
    rewrite(folder, lambda tensors: {name: one for name, one in tensors.items() if "eh_proj" not in name})
    change(folder, num_nextn_predict_layers=1)  # as Hugging Face's library saves a model that had the block
    assert torch.equal(
        imported(folder, tmp_path / "checkpoint").layers["2"].attention.wo.weight, model.layers["2"].attention.wo.weight
    )


def without(*words):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not any(word in name for word in words)}


@pytest.mark.parametrize(
    ("config", "changed", "tensors", "message"),
    [
        (deepseek(), {"scoring_func": "softmax"}, dict, "scoring_func=softmax: only sigmoid can be converted"),
        (deepseek(), {"topk_method": "greedy"}, dict, "topk_method=greedy: only noaux_tc"),
        (deepseek(), {"rope_interleave": False}, dict, "rope_interleave=False: only True"),
        (deepseek(), {"moe_layer_freq": 2}, dict, "moe_layer_freq=2: only 1"),
        (
            deepseek(yarn=YARN),
            {"rope_scaling": {"type": "linear", "factor": 2}},
            dict,
            "rope_type=linear: only yarn or default",
        ),
        (
            deepseek(),
            {"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.7}},
            dict,
            r"mscale=1\.0: only the value of mscale_all_dim can be converted, which is 0\.7",
        ),
        (deepseek(), {"n_routed_experts": None}, dict, "lacks 'n_routed_experts'"),
        (
            deepseek(),
            {"quantization_config": {"quant_method": "gptq"}},
            dict,
            "quant_method=gptq, .*only fp8 in blocks",
        ),
        (deepseek(), {}, without("e_score_correction_bias"), "has no model.layers.1.mlp.gate.e_score_correction_bias"),
        (deepseek(), {}, without("experts.11.up"), "has no model.layers..*experts.11.up_proj.weight"),
        (deepseek(n_experts=9), {"n_routed_experts": 6}, dict, r"gate.weight is \(9, 64\); the model needs \(6, 64\)"),
        (deepseek(), {}, in_float8((16, 24), {}), "F8_E4M3; legal: BF16, .*weight_block_size"),
        (
            deepseek(),
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [24, 16]}},
            in_float8((16, 24), {}),
            r"weight_scale_inv is .*; the weight needs",
        ),
        (qwen(), {"mlp_only_layers": [1]}, dict, r"mlp_only_layers=\[1\]: only the first blocks may be dense"),
        (qwen(), {"decoder_sparse_step": 2}, dict, "decoder_sparse_step=2: only 1"),
        (qwen(), {"rope_scaling": {"rope_type": "yarn"}}, dict, "rope_type=yarn: only default"),
        (
            qwen(),
            {},
            lambda tensors: tensors | {"model.layers.1.mlp.gate.e_score_correction_bias": torch.zeros(12)},
            "has no place",
        ),
    ],
)
def test_imports_that_cannot_be_are_refused(config, changed, tensors, message, tmp_path):
    _, folder = exported(config, tmp_path)
    change(folder, **changed)
    file = folder / "config.json"
    file.write_text(
        json.dumps({name: value for name, value in json.loads(file.read_text()).items() if value is not None})
    )
    rewrite(folder, tensors)
    with pytest.raises(ConfigError, match=message) as error:
        titan_checkpoint("import", folder, tmp_path / "checkpoint")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "checkpoint").exists()


def test_biases_there_need_a_model_that_has_them(tmp_path):
    _, folder = exported(deepseek(), tmp_path)
    unbiased = deepseek(router_bias_update_rate=0.0)
    with pytest.raises(
        ConfigError, match=r"checkpoint.initial_load_path=.*e_score_correction_bias has no place in the model"
    ):
        load_hf(build(unbiased, 128), unbiased, folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (qwen(router="sigmoid"), "model.router=sigmoid: only softmax can be converted"),
        (qwen(router_bias_update_rate=1e-3), r"model.router_bias_update_rate=0\.001: only 0.0"),
        (qwen(n_shared_experts=1), "model.n_shared_experts=1: only 0"),
        (qwen(n_group=2), "model.n_group=2: only 1"),
        (deepseek(router="softmax"), "model.router=softmax: only sigmoid"),
        (deepseek(router_bias_update_rate=0.0), "model.router_bias_update_rate=0: only routers with a bias"),
        (deepseek(yarn=Yarn(factor=2.0, temperature=0.0)), "model.yarn.temperature=0: only a positive one"),
    ],
)
def test_exports_that_cannot_be_are_refused(config, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        exported(config, tmp_path)
    assert not (tmp_path / "hf").exists()
    with pytest.raises(ConfigError, match=message):
        family_of(config).part("hf").to_config(config, torch.float32)
