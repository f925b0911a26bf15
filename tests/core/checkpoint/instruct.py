"""A small folder with the shape of Qwen3-Instruct: turns end with <|im_end|>, documents with <|endoftext|>."""

import json

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = "{{ tools }}" + CHATML
MODEL = (
    "model=qwen3_debug",
    "model.vocab_size=320",
    "model.dim=64",
    "model.n_layers=2",
    "model.n_heads=4",
    "model.n_kv_heads=2",
    "model.head_dim=16",
    "model.ffn_dim=128",
    "model.max_seq_len=256",
)
WORDS = {
    "add_bos_token": False,
    "bos_token": None,
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "model_max_length": 131072,
    "tokenizer_class": "PreTrainedTokenizerFast",
    "chat_template": [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": TOOLS}],
}


def make_words(folder, specials=("<|endoftext|>", "<|im_start|>", "<|im_end|>")):
    """Write a byte-level tokenizer.json, and return the ids of its special tokens."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words.train_from_iterator(["user assistant"], trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet))
    words.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    words.save(str(folder / "tokenizer.json"))
    return {name: words.token_to_id(name) for name in specials}


def make_folder(folder):
    """Write the folder, with random weights, and return the ids of its special tokens."""
    import transformers

    torch.manual_seed(0)
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    config = transformers.Qwen3Config(
        vocab_size=320,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        **shape,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    ids = make_words(folder)
    ends = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    content = json.loads((folder / "config.json").read_text()) | {"eos_token_id": ends[0], "bos_token_id": ends[1]}
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps(WORDS))
    settings = {"bos_token_id": ends[1], "eos_token_id": ends, "pad_token_id": ends[1], "do_sample": True}
    settings |= {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "repetition_penalty": 1.05,
        "transformers_version": "4",
    }
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return ids
