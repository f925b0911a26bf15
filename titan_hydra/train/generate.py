"""Generate text with the model of a checkpoint, in one process. There is no cache: for each new token, a forward runs
over all tokens before it.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from titan_hydra import models
from titan_hydra.base.errors import ConfigError
from titan_hydra.checkpoint.convert import DTYPES, read_model_config, read_tokenizer_config, reader_of
from titan_hydra.checkpoint.folder import Folder
from titan_hydra.checkpoint.reader import Merged, Reader
from titan_hydra.config.model import Model
from titan_hydra.data import tokenizer
from titan_hydra.data.tokenizer import Tokenizer
from titan_hydra.models.hf import in_dtype
from titan_hydra.models.init import reset_buffers

from .world import exact_float32


def generate(
    checkpoint: Path,
    beginning: Callable[[Path, Tokenizer], list[int]],
    ends: Callable[[Tokenizer], set[int]],
    max_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    dtype: str,
) -> Iterator[str]:
    """Yield the text that follows the tokens from `beginning(checkpoint, tokenizer)`, in pieces of whole characters.
    The text ends before the first token in `ends(tokenizer)`, or after `max_tokens` tokens.
    """
    config = read_model_config(checkpoint)
    words = tokenizer.load(read_tokenizer_config(checkpoint))
    ids, last = beginning(checkpoint, words), ends(words)
    seq_len = len(ids) + max_tokens
    if seq_len > config.max_seq_len:
        raise ConfigError(
            f"{len(ids)} tokens of the prompt and {max_tokens} more are over model.max_seq_len {config.max_seq_len}"
        )
    model = load_model(reader_of(checkpoint), config, seq_len, dtype)
    new: list[int] = []
    text = ""
    for token in continuation(model, ids, max_tokens, temperature, top_k, seed):
        if token in last:
            break
        new.append(token)
        if not (longer := words.decode(new)).endswith("\ufffd"):  # U+FFFD: the last character lacks bytes
            yield longer[len(text) :]
            text = longer
    yield words.decode(new)[len(text) :]


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
    model: nn.Module, ids: list[int], count: int, temperature: float, top_k: int, seed: int
) -> Iterator[int]:
    """Yield the tokens that follow `ids`, one by one."""
    tokens = torch.tensor([ids], device=next(model.parameters()).device)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        token = pick(model(tokens)[0, -1].float().cpu(), temperature, top_k, generator)
        yield token
        tokens = torch.cat([tokens, tokens.new_tensor([[token]])], dim=1)


def pick(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """Draw a token from softmax(logits / temperature) over the `top_k` likeliest tokens (0: over all). With temperature
    0, take the likeliest.
    """
    if temperature == 0:
        return int(logits.argmax())
    values, tokens = logits.topk(min(top_k or len(logits), len(logits)))
    return int(tokens[torch.multinomial((values / temperature).softmax(-1), 1, generator=generator)])
