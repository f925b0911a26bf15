"""Check that the text of a conversation has all that its row says. Imports no torch."""

import json
import re
from collections.abc import Iterator
from typing import Any

from .conversations import Conversation

THINK, END_OF_THINK = "<think>", "</think>"


def inline_reasoning(content: str) -> tuple[str, str] | None:
    """Return reasoning and answer of a content that begins with reasoning; None if there is none in it. As in the output
    of a model whose prompt ends with <think>, the opening mark may be missing.
    """
    before, mark, answer = content.partition(END_OF_THINK)
    reasoning = before.lstrip().removeprefix(THINK)
    if not mark or THINK in reasoning:
        return None
    return reasoning.strip("\n"), answer.lstrip("\n")


def refuse_unprinted(conversation: Conversation, text: str) -> None:
    """Raise ValueError if the text lacks a content, the reasoning behind the last question, a call, or the tools. A
    template may leave out the reasoning before the last question.
    """
    for tool in conversation.tools:
        name = tool.get("function", tool).get("name") if isinstance(tool.get("function", tool), dict) else None
        if isinstance(name, str) and _end(name, text) is None:
            raise ValueError(f"the template does not print the tool {name}")
    question, begin = last_question(conversation), 0
    for number, message in enumerate(conversation.messages):
        for kind, piece in _pieces(message, number > question):
            # the system's text may stand anywhere, and a template may print arguments in another order
            end = _end(piece, text, begin if kind in ("content", "reasoning") and message["role"] != "system" else 0)
            if end is None:
                raise ValueError(f"the template does not print the {kind} of message {number + 1}")
            if kind == "content" and message["role"] != "system":
                begin = end


def forgotten(conversation: Conversation, text: str) -> int:
    """Return the number of messages before the last question whose reasoning the text lacks."""
    question = last_question(conversation)
    return sum(
        _end(piece, text) is None
        for message in conversation.messages[: question + 1]
        for kind, piece in _pieces(message, True)
        if kind == "reasoning"
    )


def last_question(conversation: Conversation) -> int:
    """Return the place of the last message of the user; -1 if there is none."""
    return max(
        (number for number, message in enumerate(conversation.messages) if message["role"] == "user"), default=-1
    )


def _pieces(message: dict[str, Any], thinks: bool) -> Iterator[tuple[str, str]]:
    """Yield the texts of a message with their names; its reasoning only if it `thinks`."""
    inline = inline_reasoning(message["content"]) if message["role"] == "assistant" else None
    reasoning, content = inline or (message.get("reasoning_content", ""), message["content"])
    if thinks:
        yield "reasoning", reasoning
    yield "content", content
    for call in message.get("tool_calls", ()):
        yield "call", call["function"]["name"]
        arguments = call["function"].get("arguments")
        for value in arguments.values() if isinstance(arguments, dict) else ():
            if isinstance(value, str):
                yield "arguments of a call", value


def _end(piece: str, text: str, begin: int = 0) -> int | None:
    """Return where a piece, perhaps quoted for JSON, ends in the text behind `begin`; None if it is not there. If only
    blanks and punctuation differ, it counts as being there, and its end as `begin`.
    """
    piece = piece.strip()
    for form in (piece, json.dumps(piece, ensure_ascii=False)[1:-1], json.dumps(piece)[1:-1]):
        if (start := text.find(form, begin)) >= 0:
            return start + len(form)
    letters, letters_of_text = (re.sub(r"[\W_]+", "", part) for part in (piece, text[begin:]))
    return begin if letters and letters in letters_of_text else None
