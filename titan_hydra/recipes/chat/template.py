"""Chat templates: how a conversation becomes text, and which characters of it the assistant has generated.

A template is a Jinja program that comes with a tokenizer, from any author, so it runs in a sandbox. {% generation %}
tags in it mark the assistant's text. Without tags, the assistant's text is found by comparison. The conversation is
rendered up to an answer, with the generation prompt, and again with the answer. The first text must be the beginning of
the second. Texts are compared instead of tokens, because the tokens of the first text need not be the first tokens of
the second.
"""

import contextlib
import errno
import functools
import json
import re
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.data.facts import read_facts, special_tokens
from titan_hydra.core.data.files import check_unicode
from titan_hydra.core.data.tokenizer import BOS_NAMES, EOS_NAMES
from titan_hydra.core.job.config import schema
from titan_hydra.core.job.config.fault import bad_value
from titan_hydra.core.job.config.files import home, similar, tokenizer_file

from .conversations import RESERVED, Conversation
from .printed import END_OF_THINK, THINK, inline_reasoning, refuse_unprinted
from .sources import TemplateSource

BUILT_IN = {file.stem: file for file in sorted((Path(__file__).parent / "assets/templates").glob("*.jinja"))}
# marks around the assistant's text: noncharacters of Unicode, which texts do not contain
BEGIN, END = (
    "\ufdd0",
    "\ufdd1",
)
TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Templates get this fixed date, as a run must not depend on the present day. It is the default in Llama 3's template.
TODAY = date(2024, 7, 26)
MOST_MEMORY = 1 << 28  # bytes that trying a template may take
LARGEST = 10_000_000  # the largest number, or number of characters, that a template may compute by * or **

Spans = list[tuple[int, int]]


class Generation(Extension):
    """The tag {% generation %} ... {% endgeneration %}: its text gets a mark before and after it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

    def marked(self, caller: Callable[[], str]) -> str:
        """Return the text of the block between the marks."""
        return BEGIN + caller() + END


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which also refuses products that are longer than any conversation."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute a product or a power if it is small enough. (Jinja's * also repeats a text.)"""
        sizes = [len(value) if isinstance(value, str | list) else abs(value) for value in (left, right)]
        if sizes[0] * sizes[1] > LARGEST or (operator == "**" and sizes[1] > 64):
            raise jinja2.sandbox.SecurityError(f"a result of `{operator}` is larger than {LARGEST:,}")
        return super().call_binop(context, operator, left, right)


class TookTooLong(BaseException):
    """A template did not end in time. This is not an Exception, as Template.render treats every Exception as a refusal
    by the template.
    """


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TookTooLong if the block takes longer, and MemoryError if it takes more than MOST_MEMORY: a text can be
    doubled in many ways. This works only in the main thread, as no other thread handles signals.
    """

    def stop(*_: object) -> None:
        raise TookTooLong

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(FileNotFoundError):  # Linux only
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        allowed = min([used + MOST_MEMORY, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)])
        resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)


class Template:
    """A chat template, with the special tokens of its tokenizer by name, and further arguments."""

    def __init__(self, where: str, source: str, names: dict[str, str], options: dict[str, Any] | None = None):
        """Compile the template. `where`, its key and value, is for messages. Raises ConfigError if the template is not
        Jinja.
        """
        self.where, self.source, self.names, self.tagged = where, source, names, bool(TAG.search(source))
        self.options = options or {}
        extensions = [Generation, "jinja2.ext.loopcontrols"]
        environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": TODAY.strftime}
        try:
            self.compiled = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"{where}: line {error.lineno}: {error.message}") from error

    def render(self, conversation: Conversation, prompt: bool = False) -> str:
        """Return the text of a conversation, with marks in place of the tags. If `prompt` is true, the text ends with
        the generation prompt.

        Raises ValueError if the template does not accept the conversation, ConfigError if the template violates the
        sandbox.
        """
        names_of_row = {
            "messages": conversation.messages,
            "tools": conversation.tools or None,
            "add_generation_prompt": prompt,
        }
        try:
            return self.compiled.render(self.options | conversation.options | self.names | names_of_row)
        except jinja2.sandbox.SecurityError as error:
            raise ConfigError(f"{self.where}: it is not allowed in a template: {error}") from error
        except Exception as error:  # a template is a program, which may raise anything
            raise ValueError(f"the template refuses it: {str(error) or type(error).__name__}") from error

    def prompt(self, messages: list[dict[str, Any]]) -> str:
        """Return the text after which the assistant answers."""
        return _plain(self.render(Conversation(messages, []), prompt=True))

    def spans(self, conversation: Conversation, train_on: str) -> tuple[str, Spans]:
        """Return the text of a conversation and the ranges of characters to learn. Raises ValueError if the
        conversation cannot be used or the text lacks a part of it, ConfigError if the template does not show which text
        is the assistant's.
        """
        if BEGIN in conversation.everything or END in conversation.everything:
            raise ValueError("it holds U+FDD0 or U+FDD1, which are no characters")
        conversation = self.fitted(conversation)
        marked = self.render(conversation)
        text = _plain(marked)
        check_unicode(text)
        turns, learned = _turns(conversation, train_on)
        if train_on == "all":
            spans = [(0, len(text))]
        elif self.tagged:
            spans = self._tagged(conversation, marked, turns, learned)
        else:
            spans = [self._difference(conversation, turn, text) for turn in learned]
        refuse_unprinted(conversation, text)
        return text, spans

    def _tagged(self, conversation: Conversation, marked: str, turns: list[int], learned: list[int]) -> Spans:
        """Return the ranges between tags that belong to the learned ones of the assistant's turns."""
        spans = _spans(marked)
        if learned != turns:
            # the number of ranges up to each turn, as a turn may have several
            ends = [len(_spans(self.render(conversation.before(turn)))) for turn in turns] + [len(spans)]
            spans = [
                span
                for place, turn in enumerate(turns)
                if turn in learned
                for span in spans[ends[place] : ends[place + 1]]
            ]
        return spans

    def fitted(self, conversation: Conversation) -> Conversation:
        """Return a conversation with reasoning beside the content instead of in it, if the template needs that."""
        if not self.splits_reasoning:
            return conversation
        messages = []
        for message in conversation.messages:
            inline = inline_reasoning(message["content"]) if message["role"] == "assistant" else None
            if inline and not message.get("reasoning_content"):
                message = message | {"reasoning_content": inline[0], "thinking": inline[0], "content": inline[1]}
            messages.append(message)
        return replace(conversation, messages=messages)

    @functools.cached_property
    def splits_reasoning(self) -> bool:
        """Whether the template prints reasoning that is beside the content, but not as it is in the content."""
        thought, said = "One of many.", "Said."
        beside = {"content": said, "reasoning_content": thought, "thinking": thought}
        inline = {"content": f"{THINK}\n{thought}\n{END_OF_THINK}\n\n{said}"}
        try:
            texts = [
                _plain(self.render(Conversation([{"role": "user", "content": "?"}, {"role": "assistant"} | one], [])))
                for one in (beside, inline)
            ]
        except (ValueError, ConfigError):
            return False
        return thought in texts[0] and (thought not in texts[1] or texts[1].count(END_OF_THINK) != 1)

    def _difference(self, conversation: Conversation, turn: int, text: str) -> tuple[int, int]:
        """Return the range of a turn's message in the text of the conversation, by comparison of two texts. The range
        excludes the whitespace after the end mark.
        """
        messages = conversation.messages
        before = self.render(conversation.before(turn), prompt=True)
        through = text if turn == len(messages) - 1 else self.render(conversation.before(turn + 1))
        if not (text.startswith(through) and through.startswith(before)):
            built_in = ", ".join(BUILT_IN)
            raise ConfigError(
                f"{self.where}: it has no {{% generation %}} tags, and the conversation does not begin with its part before "
                f"message {turn + 1}, for example as the template drops earlier reasoning. So the assistant's tokens are unknown. "
                f"Take train_on=last or all, or a template with the tags; the package has {built_in}"
            )
        return len(before), len(through.rstrip())


def _turns(conversation: Conversation, train_on: str) -> tuple[list[int], list[int]]:
    """Return the places of the assistant's messages, and of those that are learned. Raises ValueError if there is none,
    or if a message states something else than `train_on` allows.
    """
    messages, stated = conversation.messages, dict(enumerate(conversation.learned))
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    for place, message in enumerate(messages):
        if stated.get(place) and place not in turns:
            raise ValueError(f"message {place + 1} states that it is learned, and is the {message['role']}'s")
        if stated.get(place) is False and train_on == "all":
            raise ValueError(f"message {place + 1} states that it is not learned, and train_on=all learns every token")
    if not turns and train_on != "all":
        raise ValueError("it has no message of the assistant")
    learned = [turn for turn in (turns[-1:] if train_on == "last" else turns) if stated.get(turn) is not False]
    if not learned and train_on != "all":
        raise ValueError("nothing to learn in it: the assistant's messages state that they are not learned")
    return turns, learned


def _plain(marked: str) -> str:
    return marked.replace(BEGIN, "").replace(END, "")


def _spans(marked: str) -> Spans:
    """Return the ranges between marks, as positions in the text without marks."""
    spans, place = [], 0
    for part in re.split(f"({BEGIN}.*?{END})", marked, flags=re.S):
        end = place + len(_plain(part))
        if part.startswith(BEGIN):
            spans.append((place, end))
        place = end
    return spans


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Format JSON for templates as transformers does: with unsorted keys, and without escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def load_template(key: str, source: TemplateSource, tokenizer: schema.Tokenizer) -> Template:
    """Load the template of a source: a built-in one, a file, or the tokenizer's own. Raises ConfigError if there is
    none.
    """
    name = source.chat_template or ("llama3" if tokenizer.name == "embedded" else None)
    if name is None:
        name, text = _of_tokenizer(key, tokenizer_file(tokenizer))
    else:
        text = _read(key, name)
    names, options = special_names(tokenizer), source.chat_template_kwargs
    for option in options:
        reserved = option in (*names, *RESERVED)
        if reserved or not re.search(rf"\b{re.escape(option)}\b", text):
            reason = "is set by the data" if reserved else f"the template {name} has no such variable"
            raise ConfigError(f"{key}.chat_template_kwargs.{option}: {reason}")
    return Template(f"{key}.chat_template={name}", text, names, options)


def special_names(config: schema.Tokenizer) -> dict[str, str]:
    """Return the special tokens by the names that templates use: `bos_token`, `eos_token` and others."""
    if config.name != "hf":
        return {"bos_token": BOS_NAMES[0], "eos_token": EOS_NAMES[0]}
    file = tokenizer_file(config)
    if named := special_tokens(read_facts(file.parent).words):
        return named
    if not file.is_file():
        return {}  # a rule of the tokenizer refuses it
    added = {token["content"] for token in json.loads(file.read_text(encoding="utf-8")).get("added_tokens", [])}
    usual = {"bos_token": BOS_NAMES, "eos_token": EOS_NAMES}
    return {
        key: name for key, names in usual.items() if (name := next((name for name in names if name in added), None))
    }


def _read(key: str, name: str) -> str:
    """Return the text of a template: one of the package by its name, or a file. Raises ConfigError if it cannot be
    read.
    """
    file = BUILT_IN.get(name, home(name))
    try:
        if file.exists() and not file.is_file():
            raise OSError(errno.EINVAL, "not a file")  # reading a pipe would block until it has a writer
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        near = similar(name) or tuple(BUILT_IN)
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise bad_value(f"{key}.chat_template", name, reason, *near) from error


def _of_tokenizer(key: str, file: Path) -> tuple[str, str]:
    """Return name and text of the template in a tokenizer's folder."""
    template_file, config = file.with_name("chat_template.jinja"), file.with_name("tokenizer_config.json")
    if template_file.is_file():
        return str(template_file), _read(key, str(template_file))
    try:
        found = json.loads(config.read_text(encoding="utf-8")).get("chat_template") if config.is_file() else None
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{key}.chat_template=null: {config} cannot be read: {error}") from error
    if isinstance(found, list):  # a list of several templates, by name
        found = next((entry["template"] for entry in found if entry.get("name") == "default"), None)
    if not isinstance(found, str):
        raise ConfigError(
            f"{key}.chat_template=null: no template came with {file}: neither {template_file.name} nor one in {config.name} is "
            f"beside it; one of {', '.join(BUILT_IN)}"
        )
    return str(config), found
