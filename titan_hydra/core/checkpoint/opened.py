"""Open the model of a run, a checkpoint or a Hugging Face folder: its weights, and what it carries beside them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.data.facts import Facts
from titan_hydra.core.data.tokenizer import Tokenizer, of_facts
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.model import Model
from titan_hydra.core.job.run.checkpoints import find_checkpoint, find_section, is_hf

from .carried import facts_at
from .convert import read_model_config, reader_of
from .folder import Folder
from .reader import Merged, Reader


@dataclass(frozen=True)
class Opened:
    """A model that can be loaded. `seq_len` is the run's data.seq_len; None for a Hugging Face folder."""

    config: Model
    reader: Reader | Merged | Folder
    facts: Facts
    tokenizer: Tokenizer
    seq_len: int | None


def open_model(source: Path, file: Path | None = None) -> Opened:
    """Open a model that takes text. `file` is its tokenizer's file, if the user has named one. Raises ConfigError for
    other models, and if the tokenizer is not known.
    """
    if is_hf(source):
        folder = Folder(source)
        config, reader, seq_len = folder.config, folder, None
    else:
        source = find_checkpoint(source)
        config, reader = read_model_config(source), reader_of(source)
        seq_len = find_section("data", source)[1].get("seq_len")
    if (takes := family_of(config).takes) != "tokens":
        raise ConfigError(f"{source}: model.family={config.family}: takes {takes}, not text alone")
    facts = facts_at(source)
    return Opened(config, reader, facts, of_facts(facts, file), seq_len)
