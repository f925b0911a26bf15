"""The keys of the sources of conversations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from titan_hydra.core.job.config.field import key
from titan_hydra.core.job.config.ranges import PATH
from titan_hydra.core.job.config.source import FileSource, Source


@dataclass
class RowSource(FileSource):
    hub_split: str | None = key(
        None,
        "split of the dataset of the Hugging Face hub, or of the folder in its layout, that `path` names; null: `path` "
        "names files",
        identity="if set",
    )
    hub_subset: str | None = key(None, "configuration of that dataset", identity="if set")
    hub_validation_split: str | None = key(
        None, "split of that dataset that is held out for validation", identity=False, changes="held-out loss"
    )


@dataclass
class TemplateSource(Source):
    chat_template: str | None = key(
        None,
        "template that makes text of a conversation: a Jinja file, or one of chatml, gemma, llama3, mistral, phi and "
        "qwen3; null: the tokenizer's own",
        PATH,
        reads="tokenizer",
    )
    chat_template_kwargs: dict[str, Any] = key(
        dict,
        "further variables of the template, such as {enable_thinking: false}; a row may have its own under the same name",
        identity="if set",
    )


@dataclass
class ConversationSource(TemplateSource):
    train_on: str = key(
        "assistant",
        "the tokens that are learned: all of the assistant's messages, its last message, or all tokens",
        choices=("assistant", "last", "all"),
    )


@dataclass
class ChatSource(ConversationSource, RowSource):
    pass
