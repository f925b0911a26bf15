"""The chat template of a run: the one that its weights have learned, or that came with them."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.data import tokenizer
from titan_hydra.core.data.facts import DEFAULT, Facts, special_tokens
from titan_hydra.core.job.config import schema

from .conversations import Conversation
from .sources import TemplateSource
from .template import BUILT_IN, Template, load_template

ASKED = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def template_of_facts(facts: Facts) -> Template:
    """Return the chat template that a run carries. Raises ConfigError if it has none."""
    if DEFAULT not in facts.templates:
        raise ConfigError(
            "the model has no chat template: neither its training data nor the folder that it came from has one"
        )
    return Template("the model's chat template", facts.templates[DEFAULT], special_tokens(facts.words))


def template_and_stop(
    source: dict[str, Any], located: Callable[[str], str], keys: schema.Tokenizer
) -> tuple[str, int | None]:
    """Return the chat template of a source, and the id of the token that ends an answer in it; None if an answer ends
    with plain text. `located` makes the source's paths absolute.
    """
    name, options = source.get("chat_template"), source.get("chat_template_kwargs") or {}
    if name and name not in BUILT_IN:
        name = located(name)
    template = load_template("data", TemplateSource("chat", name, options), keys)
    return _set(options) + template.source, _last_learned(template, tokenizer.load(keys))


def _set(options: dict[str, Any]) -> str:
    """Return the beginning of a template that gives its further variables the values that the run has learned."""
    return "".join(
        f"{{%- if {name} is not defined -%}}{{%- set {name} = {'none' if value is None else json.dumps(value)} -%}}{{%- endif -%}}"
        for name, value in options.items()
    )


def _last_learned(template: Template, learned: tokenizer.Tokenizer) -> int | None:
    """Return the last token of an answer that is learned, if it is one of the tokenizer's added tokens."""
    try:
        text, spans = template.spans(Conversation(ASKED, []), "assistant")
    except (ValueError, ConfigError):  # the template wants other conversations
        return None
    found = learned.locate(text)
    end = max((end for _, end in spans if text[:end].strip()), default=0)
    end = len(text[:end].rstrip())
    last = np.flatnonzero((found.begins < end) & (found.ends <= end))
    if not len(last) or found.ids[last[-1]] not in (learned.eos_id, *learned.added.values()):
        return None
    return int(found.ids[last[-1]])
