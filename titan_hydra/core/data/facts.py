"""What a model's folder says beside its weights: one record, which a run carries, and which its exports and the commands
that generate or score text use. Imports no torch.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import ConfigError

TOKENIZER, GENERATION, MODEL = "tokenizer_config.json", "generation_config.json", "config.json"
TEMPLATE, TEMPLATES = "chat_template.jinja", "additional_chat_templates"
DEFAULT = "default"  # name of the usual chat template of a folder
OF_LIBRARY = (
    "transformers_version",
    "_from_model_config",
)  # keys of generation_config.json that say nothing of a model


@dataclass
class Facts:
    """The content of the files beside a model's weights. `generation["eos_token_id"]` holds the ids that end a
    generation; the id that ends a document may be another one, and is `tokenizer["eos_id"]`.
    """

    words: dict[str, Any] = field(default_factory=dict)  # tokenizer_config.json, without chat templates
    generation: dict[str, Any] = field(default_factory=dict)  # generation_config.json
    ids: dict[str, Any] = field(default_factory=dict)  # token ids of config.json
    templates: dict[str, str] = field(default_factory=dict)  # chat templates by name
    # The tokenizer whose ids the weights have learned: name, path, sha256, bos_id, eos_id. Without `path`, the file is
    # not known; {}: the weights have learned no text.
    tokenizer: dict[str, Any] = field(default_factory=dict)

    @property
    def stops(self) -> list[int]:
        """The ids of tokens that end a generation."""
        return listed(self.generation.get("eos_token_id"), self.ids.get("eos_token_id"))


def read_facts(folder: Path) -> Facts:
    """Read what a folder says, except about the tokenizer's ids. Raises ConfigError if a file is not JSON."""
    of_tokenizer, of_map = json_object_in(folder / TOKENIZER), json_object_in(folder / "special_tokens_map.json")
    of_tokenizer = {key: value for key, value in of_map.items() if key not in of_tokenizer} | of_tokenizer
    templates = _templates(of_tokenizer.pop("chat_template", None) or json_object_in(folder / "chat_template.json"))
    for file in [folder / TEMPLATE, *sorted((folder / TEMPLATES).glob("*.jinja"))]:
        if file.is_file():
            templates[DEFAULT if file.name == TEMPLATE else file.stem] = file.read_text(encoding="utf-8")
    model, generation = json_object_in(folder / MODEL), json_object_in(folder / GENERATION)
    ids: dict[str, Any] = {key: model[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in model}
    return Facts(of_tokenizer, {key: generation[key] for key in generation if key not in OF_LIBRARY}, ids, templates)


def json_object_in(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file; {} if it does not exist. Raises ConfigError if it holds no JSON object."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: not a JSON object")
    return content


def _templates(stated: Any) -> dict[str, str]:
    """Return the chat templates of a tokenizer_config.json by name: it has one, or a list of named ones."""
    if isinstance(stated, str):
        return {DEFAULT: stated}
    if isinstance(stated, dict):  # chat_template.json
        return _templates(stated.get("chat_template"))
    named = [entry for entry in stated or [] if isinstance(entry, dict)]
    return {entry["name"]: entry["template"] for entry in named if {"name", "template"} <= entry.keys()}


def token_of(tokenizer_config: dict[str, Any], key: str) -> str | None:
    """Return a special token of a tokenizer_config.json, such as `eos_token`, which may be a text or a record."""
    token = tokenizer_config.get(key)
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) and token else None


def special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Return all special tokens of a tokenizer_config.json by the names that templates use."""
    return {
        key: token for key in tokenizer_config if key.endswith("_token") and (token := token_of(tokenizer_config, key))
    }


def is_digest(text: str | None) -> bool:
    """Whether a text is a SHA-256; a header of somebody's own ids may have another text in its place."""
    return bool(text and re.fullmatch("[0-9a-f]{64}", text))


def listed(*ids: Any) -> list[int]:
    """Return token ids, each of which is a number, a list of numbers or None, as one list without repeats."""
    flat = [part for id_or_ids in ids for part in (id_or_ids if isinstance(id_or_ids, list) else [id_or_ids])]
    return list(dict.fromkeys(part for part in flat if isinstance(part, int) and not isinstance(part, bool)))
