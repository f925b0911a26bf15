"""Generate text with the model of a checkpoint, in one process. There is no cache: for each new token, a forward runs
over all tokens before it.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from titan_hydra.core import models
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.checkpoint.convert import DTYPES
from titan_hydra.core.checkpoint.folder import Folder
from titan_hydra.core.checkpoint.opened import Opened
from titan_hydra.core.checkpoint.reader import Merged, Reader
from titan_hydra.core.data.facts import Facts
from titan_hydra.core.job.config.model import Model
from titan_hydra.core.models.hf import in_dtype
from titan_hydra.core.models.init import reset_buffers

from .world import exact_float32

# Generation settings that change which tokens are drawn, or where a text ends, and that are not applied here. False, 0
# and 1 change nothing; the last five have an effect on sampling alone.
OTHER_SETTINGS = (
    *("repetition_penalty", "encoder_repetition_penalty", "diversity_penalty", "exponential_decay_length_penalty"),
    *("no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"),
    *("forced_bos_token_id", "forced_eos_token_id", "force_words_ids", "constraints", "stop_strings", "guidance_scale"),
    *("min_length", "min_new_tokens", "num_beams", "penalty_alpha", "dola_layers", "watermarking_config"),
    *("min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
)
OF_SAMPLING = OTHER_SETTINGS[-5:]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: from softmax(logits / temperature) over the `top_k` likeliest tokens (0: all), and of these
    over the fewest whose probabilities add up to `top_p`. With temperature 0, the likeliest token is taken.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


def sampling_of(facts: Facts, temperature: float | None, top_k: int | None, top_p: float | None) -> Sampling:
    """Return how to draw tokens: as given, else as the model's generation settings say, if they are for sampling. Print
    which further settings of the model are not applied.
    """
    of_model = facts.generation if facts.generation.get("do_sample") else {}
    stated = [key for key, value in facts.generation.items() if value and (value is True or value != 1)]
    if others := [key for key in stated if key in OTHER_SETTINGS and (of_model or key not in OF_SAMPLING)]:
        print(f"warning: not applied of the model's generation settings: {', '.join(others)}", file=sys.stderr)
    plain = Sampling()
    return Sampling(
        of_model.get("temperature", plain.temperature) if temperature is None else temperature,
        of_model.get("top_k") or plain.top_k if top_k is None else top_k,
        of_model.get("top_p") or plain.top_p if top_p is None else top_p,
    )


def generate(
    opened: Opened, ids: list[int], max_tokens: int, sampling: Sampling, seed: int, dtype: str, special: bool = True
) -> Iterator[str]:
    """Yield the text that follows the tokens `ids`, in pieces of whole characters. The text ends before the first token
    that ends a generation of the model, or after `max_tokens` tokens. Without `special`, special tokens are left out.
    """
    config, tokenizer = opened.config, opened.tokenizer
    seq_len = len(ids) + max_tokens
    if seq_len > config.max_seq_len:
        raise ConfigError(
            f"{len(ids)} tokens of the prompt and {max_tokens} more are over model.max_seq_len {config.max_seq_len}"
        )
    model = load_model(opened.reader, config, seq_len, dtype)
    ends, left_out = {tokenizer.eos_id, *opened.facts.stops}, set() if special else set(tokenizer.special.values())
    new: list[int] = []
    text = ""
    for token in continuation(model, ids, max_tokens, sampling, seed, tokenizer.vocab_size):
        if token in ends:
            break
        if token in left_out:
            continue
        new.append(token)
        if not (longer := tokenizer.decode(new)).endswith("\ufffd"):  # U+FFFD: the last character lacks bytes
            yield longer[len(text) :]
            text = longer
    yield tokenizer.decode(new)[len(text) :]


def load_model(reader: Reader | Merged | Folder, config: Model, seq_len: int, dtype: str) -> nn.Module:
    """Build the whole model of a checkpoint or export in `dtype`, on the GPU if there is one, in eval mode. This changes
    `config`, the model section of the checkpoint.
    """
    config.attention = "auto"  # chosen anew, because this machine may not have the run's attention kernel
    with torch.device("meta"):
        model = models.build(config, seq_len)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[dtype])  # buffers keep their dtype, as positions are always float32
    model.to_empty(device=device_here())
    reset_buffers(model)
    state = model.state_dict(keep_vars=True)  # with buffers, such as a router's bias
    reader.dtypes(state)  # checks a folder as a whole: no other tensors, one matrix for tied embeddings
    for name, tensor in state.items():
        tensor.data.copy_(reader.tensor(name, tensor.shape, in_dtype(tensor, DTYPES[dtype])))
    return model.eval()


def device_here() -> torch.device:
    """Return this process's GPU, or the CPU if there is none. Also make float32 as exact as in a run."""
    exact_float32()
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@torch.no_grad()
def continuation(
    model: nn.Module, ids: list[int], count: int, sampling: Sampling, seed: int, vocab_size: int
) -> Iterator[int]:
    """Yield the tokens that follow `ids`, one by one. Rows of the head beyond `vocab_size` stand for no token."""
    tokens = torch.tensor([ids], device=next(model.parameters()).device)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        token = pick(model(tokens)[0, -1, :vocab_size].float().cpu(), sampling, generator)
        yield token
        tokens = torch.cat([tokens, tokens.new_tensor([[token]])], dim=1)


def pick(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw a token as `sampling` says."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    values, tokens = logits.topk(min(sampling.top_k or len(logits), len(logits)))
    chances = (values / sampling.temperature).softmax(-1)
    chances[chances.cumsum(-1) - chances >= sampling.top_p] = 0  # the likeliest token always stays
    return int(tokens[torch.multinomial(chances, 1, generator=generator)])
