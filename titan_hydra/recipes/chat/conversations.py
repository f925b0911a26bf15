"""What a row of conversations contains: check it, and bring it into the form that templates use. Imports no torch."""

import functools
import json
from dataclasses import dataclass, field
from typing import Any

from titan_hydra.core.data.files import json_of, record_of
from titan_hydra.core.data.records import Record

from .forms import messages_of

# other names of the roles, as in ShareGPT's files
ROLES = {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("observation", "tool_response", "function"), "tool"),
}
SYSTEM = ("system", "system_prompt")  # columns with the text of a first message
CALLS = ("function_call", "tool_call")  # roles of messages whose content is a call of the assistant's
# keys of a message's reasoning in data files; templates use one of the first two
REASONING = ("reasoning_content", "thinking", "reasoning")
FLAGS = ("weight", "train", "training")  # keys of whether a message is learned
RESERVED = ("messages", "tools", "add_generation_prompt")  # variables of a template that come from the row
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
OWN = ("role", "from", "content", "value", "tool_calls", "function_call", *REASONING, *FLAGS)


@dataclass(frozen=True)
class Conversation:
    """Messages, each a dict with `role` and `content`, and the functions that the assistant may call. `learned` has for
    each message whether the row states that it is learned, or is not; `options` are arguments of the template.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    learned: tuple[bool | None, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def everything(self) -> str:
        """Messages, tools and options as one JSON text."""
        return json.dumps([self.messages, self.tools, self.options], ensure_ascii=False, default=str)

    def before(self, message: int) -> "Conversation":
        """Return the conversation up to a message."""
        return Conversation(self.messages[:message], self.tools, self.learned[:message], self.options)


def parse(record: Record) -> Conversation:
    """Return the conversation of a row. Raises ValueError if the row has none; the message states what is wrong.

    A row has `messages` of `role` and `content`, ShareGPT's `conversations` of `from` and `value`, or a question and its
    answer (see forms.py); `tools`, `system` and `chat_template_kwargs` are optional.
    """
    row = record_of(record)
    messages = messages_of(row)
    if isinstance(messages, str):
        messages = _json(messages, "no list of messages: they are a text that is not JSON")
    if not isinstance(messages, list) or not messages:
        raise ValueError("no list of messages: they are no list, or an empty one")
    return conversation(messages, row)


def conversation(messages: list[Any], row: dict[str, Any]) -> Conversation:
    """Return a conversation from messages, and from what a row has beside them. Raises ValueError if one of these is
    unusable.
    """
    _refuse_media(row, "the row")
    checked = [_message(message, number) for number, message in enumerate(messages, start=1)]
    learned = [_learned(message, number) for number, message in enumerate(messages, start=1)]
    if (system := _system(row)) and not (checked and checked[0] == system):
        if checked and checked[0]["role"] == "system":
            raise ValueError("its 'system' is another text than its first message, the system's")
        checked, learned = [system, *checked], [None, *learned]
    options = row.get("chat_template_kwargs") or {}
    if isinstance(options, str):
        options = _json(options, "its chat_template_kwargs are not JSON")
    if not isinstance(options, dict):
        raise ValueError(f"its chat_template_kwargs are {type(options).__name__}, not a record")
    if wrong := next((name for name in RESERVED if name in options), None):
        raise ValueError(f"its chat_template_kwargs have {wrong!r}, which comes from the row itself")
    return Conversation(checked, _tools(row), tuple(learned), options)


def _system(row: dict[str, Any]) -> dict[str, Any] | None:
    """Return the system message of a row, which may stand under several keys. Raises ValueError if they differ."""
    texts_by_key = {key: row[key] for key in SYSTEM if row.get(key) is not None}
    for key, text in texts_by_key.items():
        if not isinstance(text, str):
            raise ValueError(f"its {key!r} is {type(text).__name__}, not text")
    texts = {text for text in texts_by_key.values() if text.strip()}
    if len(texts) > 1:
        raise ValueError(f"its {' and '.join(map(repr, texts_by_key))} differ")
    return {"role": "system", "content": texts.pop()} if texts else None


def _refuse_media(record: dict[str, Any], where: str) -> None:
    if medium := next((key for key in MEDIA if record.get(key)), None):
        raise ValueError(f"{where} has {medium!r}, which no template prints as text; data=image_text reads images")


def _message(message: Any, number: int) -> dict[str, Any]:
    """Return a message with role, content and, if present, reasoning and calls, under the keys that templates use. Other
    keys are kept for the template.
    """
    if not isinstance(message, dict):
        raise ValueError(f"message {number} is {type(message).__name__}, not a record")
    role, content = (
        message.get("role", message.get("from")),
        message.get("content", message.get("value")),
    )
    if not isinstance(role, str) or not role:
        raise ValueError(f"message {number} has no role")
    _refuse_media(message, f"message {number}")
    calls, call = message.get("tool_calls") or [], message.get("function_call")
    if role in CALLS:
        role, call, content = "assistant", content, None
    calls, call = (
        _json(given, f"message {number} has a call that is not JSON") if isinstance(given, str) else given
        for given in (calls, call)
    )
    if call:  # a message's only call, or a list of all its calls
        if calls:
            raise ValueError(f"message {number} has calls in two places")
        calls = call if isinstance(call, list) else [call]
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        content = "".join(part["text"] for part in content)
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise ValueError(f"message {number} has {type(content).__name__} as content, not text")
    message_out = {"role": ROLES.get(role, role), "content": content}
    if stated := [message[key] for key in REASONING if message.get(key)]:
        reasoning = stated[0]
        if any(other != reasoning for other in stated):
            raise ValueError(f"message {number} has two different reasonings")
        if not isinstance(reasoning, str):
            raise ValueError(f"message {number} has {type(reasoning).__name__} as reasoning, not text")
        message_out |= {"reasoning_content": reasoning, "thinking": reasoning}
    if not isinstance(calls, list):
        raise ValueError(f"message {number} has {type(calls).__name__} as tool_calls, not a list")
    others = {key: value for key, value in message.items() if key not in OWN and value is not None}
    return message_out | others | ({"tool_calls": [_call(call, number) for call in calls]} if calls else {})


def _learned(message: dict[str, Any], number: int) -> bool | None:
    """Return whether a message states that it is learned, or is not; None: it states nothing."""
    if message.get("train_detail") or message.get("training_detail"):
        raise ValueError(
            f"message {number} has 'train_detail'; only whole messages can be left out, by 'train' or 'weight'"
        )
    stated = {key: message[key] for key in FLAGS if message.get(key) is not None}
    for key, value in stated.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise ValueError(f"message {number} has {key!r} {value!r}, neither 0 (not learned) nor 1")
    if len(set(map(bool, stated.values()))) > 1:
        raise ValueError(f"message {number} states both that it is learned and that it is not")
    return next(map(bool, stated.values()), None)


def _json(text: str, otherwise: str) -> Any:
    try:
        return json_of(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(otherwise) from error


def _call(call: Any, number: int) -> dict[str, Any]:
    """Return a function call with its arguments as a dict, because a template would quote arguments in JSON text again."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"message {number} has a call without the name of a function")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _json(arguments, f"message {number} calls {function['name']} with arguments that are not JSON")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _tools(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the functions (tools) of a row; some files hold them as JSON text, or without their type as `functions`."""
    functions = []
    for key in ("tools", "functions"):
        tools = row.get(key) or []
        if isinstance(tools, str):
            tools = _json(tools, f"its {key} are not JSON") if tools.strip() else []
        if not isinstance(tools or [], list) or not all(isinstance(tool, dict) for tool in tools or []):
            raise ValueError(f"its {key} are not a list of records")
        functions += [{"type": "function", "function": tool} for tool in tools] if key == "functions" else tools or []
    return functions
