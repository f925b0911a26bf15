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
        "how a conversation becomes text: a Jinja file, or one of the package's, chatml, gemma, llama3, mistral, phi or "
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
