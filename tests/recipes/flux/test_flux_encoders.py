"""The text encoders and the autoencoder of FLUX compute what those of transformers and diffusers compute, with tiny
random weights.
"""

import json

import pytest
import torch

from titan_hydra.base.errors import ConfigError
from titan_hydra.recipes.flux.autoencoder import Autoencoder
from titan_hydra.recipes.flux.clip import Clip
from titan_hydra.recipes.flux.encoders import read_frozen, words_of
from titan_hydra.recipes.flux.t5 import T5

CPU = torch.device("cpu")


def drawn(model):
    """Return a model with random parameters, including norms and biases."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def test_t5(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers, the reference for T5, is not installed")
    config = transformers.T5Config(vocab_size=50, d_model=24, d_kv=8, d_ff=40, num_layers=3, num_heads=3, feed_forward_proj="gated-gelu")
    theirs = drawn(transformers.T5EncoderModel(config))
    theirs.save_pretrained(tmp_path)
    tokens = torch.randint(50, (2, 300))  # longer than the largest distance that has a bucket of its own
    with torch.no_grad():
        expected = theirs(tokens).last_hidden_state
    torch.testing.assert_close(read_frozen(T5, tmp_path, CPU)(tokens), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("end", [2, 41])
def test_clip(tmp_path, end):
    transformers = pytest.importorskip("transformers", reason="transformers, the reference for CLIP, is not installed")
    config = transformers.CLIPTextConfig(
        vocab_size=50,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=3,
        max_position_embeddings=12,
        eos_token_id=end,
    )
    theirs = drawn(transformers.CLIPTextModel(config))
    theirs.save_pretrained(tmp_path)
    tokens = torch.tensor([[40, 3, 5, 49, 41, 41, 41], [40, 7, 41, 49, 1, 2, 3]])
    with torch.no_grad():
        expected = theirs(tokens).pooler_output
    torch.testing.assert_close(read_frozen(Clip, tmp_path, CPU)(tokens), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("quant", [False, True])
def test_autoencoder(tmp_path, quant):
    diffusers = pytest.importorskip("diffusers", reason="diffusers, the reference for the autoencoder, is not installed")
    theirs = drawn(
        diffusers.AutoencoderKL(
            block_out_channels=(8, 8, 16),
            down_block_types=("DownEncoderBlock2D",) * 3,
            up_block_types=("UpDecoderBlock2D",) * 3,
            layers_per_block=2,
            latent_channels=4,
            norm_num_groups=4,
            use_quant_conv=quant,
            use_post_quant_conv=quant,
            scaling_factor=0.3611,
            shift_factor=0.1159,
        )
    )
    theirs.save_pretrained(tmp_path)
    ours, images = read_frozen(Autoencoder, tmp_path, CPU), torch.rand(2, 3, 24, 16) * 2 - 1
    with torch.no_grad():
        expected = theirs.encode(images).latent_dist
        mean, std = ours.encode(images)
        torch.testing.assert_close(mean, (expected.mean - 0.1159) * 0.3611, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(std, expected.std * 0.3611, rtol=1e-5, atol=1e-5)
        image = theirs.decode(mean / 0.3611 + 0.1159).sample
        torch.testing.assert_close(ours.decode(mean), image, rtol=1e-5, atol=1e-5 * image.abs().max().item())


def test_clips_words_are_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers, the reference for CLIP's tokenizer, is not installed")
    letters = [chr(code) for code in range(33, 127)] + ["\u0120"]
    merges = ["r e", "re d</w>", "c a", "ca t</w>", "1 2</w>"]
    pieces = [*letters, *(f"{letter}</w>" for letter in letters), "re", "red</w>", "ca", "cat</w>", "12</w>"]
    pieces += ["<|startoftext|>", "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({piece: number for number, piece in enumerate(pieces)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges))
    theirs, ours = transformers.CLIPTokenizer.from_pretrained(tmp_path), words_of(tmp_path)
    for text in ("A red cat", "  the  CAT's 12 reds!?", "cat, cat;cat", "it's"):
        assert ours.encode(text).ids == theirs(text, add_special_tokens=False).input_ids, text


def test_what_cannot_be_read_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        read_frozen(T5, tmp_path, CPU)
    config = {
        "vocab_size": 5,
        "d_model": 4,
        "d_kv": 2,
        "d_ff": 4,
        "num_layers": 1,
        "num_heads": 2,
        "relative_attention_num_buckets": 32,
        "layer_norm_epsilon": 1e-6,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"shared\.weight is nothing; its config\.json asks for \(5, 4\)"):
        read_frozen(T5, tmp_path, CPU)
    with pytest.raises(ConfigError, match=r"has neither a tokenizer\.json nor a vocab\.json"):
        words_of(tmp_path)
