"""The keys of the sources of conversations."""

from __future__ import annotations

from dataclasses import dataclass

from titan_hydra.config.field import key
from titan_hydra.config.ranges import PATH
from titan_hydra.config.source import FileSource, Source


@dataclass
class TemplateSource(Source):
    chat_template: str | None = key(
        None,
        "template that makes text of a conversation: a Jinja file, or one of chatml, gemma, llama3, mistral, phi and "
        "qwen3; null: the tokenizer's own",
        PATH,
    )


@dataclass
class ConversationSource(TemplateSource):
    train_on: str = key(
        "assistant",
        "the tokens that are learned: all of the assistant's messages, its last message, or all tokens",
        choices=("assistant", "last", "all"),
    )


@dataclass
class ChatSource(ConversationSource, FileSource):
    pass
