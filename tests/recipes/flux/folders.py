"""Write tiny random encoders into a folder with the structure of the published FLUX.1."""

import json

import pytest
import torch

LETTERS = [chr(code) for code in range(33, 127)] + ["\u0120"]
MERGES = ("r e", "re d</w>", "c a", "ca t</w>")
CLIP_WORDS = [
    *LETTERS,
    *(f"{letter}</w>" for letter in LETTERS),
    "re",
    "red</w>",
    "ca",
    "cat</w>",
    "<|startoftext|>",
    "<|endoftext|>",
]
T5_WORDS = ["<pad>", "</s>", "<unk>", "\u2581red", "\u2581cat", "\u2581", *LETTERS]
BEGIN, END = len(CLIP_WORDS) - 2, len(CLIP_WORDS) - 1
ROOM = 24  # tokens of a caption that CLIP reads
WIDTH = 24


def write_encoders(folder, end=2, dtype=torch.float32, shift=0.1159):
    """Write CLIP, T5, an autoencoder with four channels and a factor of 2, and the tokenizers. `end` is the end of text
    that CLIP's config.json names: FLUX.1's file says 2, as all such files of its time do.
    """
    transformers = pytest.importorskip(
        "transformers", reason="transformers, which writes and reads the encoders, is not installed"
    )
    diffusers = pytest.importorskip(
        "diffusers", reason="diffusers, which writes and reads the autoencoder, is not installed"
    )
    t5 = transformers.T5EncoderModel(
        transformers.T5Config(
            vocab_size=len(T5_WORDS),
            d_model=WIDTH,
            d_kv=8,
            d_ff=40,
            num_layers=2,
            num_heads=3,
            feed_forward_proj="gated-gelu",
        )
    )
    clip = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            vocab_size=len(CLIP_WORDS),
            hidden_size=WIDTH,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=3,
            max_position_embeddings=ROOM,
            bos_token_id=BEGIN,
            eos_token_id=end,
        )
    )
    autoencoder = diffusers.AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=0.3611,
        shift_factor=shift,
    )
    torch.manual_seed(0)
    for name, module in (("text_encoder_2", t5), ("text_encoder", clip), ("vae", autoencoder)):
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        module.to(dtype).save_pretrained(folder / name)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer/vocab.json").write_text(json.dumps({piece: number for number, piece in enumerate(CLIP_WORDS)}))
    (folder / "tokenizer/merges.txt").write_text("#version: 0.2\n" + "\n".join(MERGES))
    scores = [(piece, 0.0 if piece.startswith("<") else -1.0 - (len(piece) == 1)) for piece in T5_WORDS]
    transformers.T5Tokenizer(vocab=scores, extra_ids=0).save_pretrained(folder / "tokenizer_2")
