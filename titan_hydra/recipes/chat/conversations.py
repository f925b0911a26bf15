"""Conversations in files of JSON lines: find where each row begins, and check what a row contains. Imports no torch."""

import functools
import json
import mmap
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np

from titan_hydra.config.files import PACKED
from titan_hydra.data.files import UNREADABLE, opened, place_in
from titan_hydra.data.shards import BadShard, BadShards

ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names of the roles
# keys of a message's reasoning in data files; templates use one of the first two
REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True)
class Conversation:
    """Messages, each a dict with `role` and `content`, and the functions that the assistant may call."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]

    @functools.cached_property
    def everything(self) -> str:
        """Messages and tools as one JSON text."""
        return json.dumps([self.messages, self.tools], ensure_ascii=False)


class ConversationFiles:
    """The rows of some files, numbered over all files; blank lines do not count. Files are mapped into memory; compressed
    files are decompressed.

    With `most`, at most that many lines of each file are read.
    """

    def __init__(self, files: list[Path], bad: BadShards, most: int | None = None):
        self.files, self.contents, self.starts, self.numbers = files, [], [], []
        for file in files:
            try:
                content, ends = _open(file, most)
            except UNREADABLE as error:
                bad.add(BadShard(file, f"{file}: cannot be read: {error}"))
                content, ends = b"", np.zeros(1, dtype=np.int64)
            rows = [row for row in range(len(ends) - 1) if not content[ends[row] : ends[row + 1]].isspace()]
            self.contents.append(content)
            self.starts.append(ends)
            self.numbers.append(np.array(rows, dtype=np.int64))
        self.ends = list(accumulate(map(len, self.numbers)))

    def __len__(self) -> int:
        return self.ends[-1]

    def row(self, number: int) -> tuple[str, bytes]:
        """Return the place of a row, as file:line, and its bytes."""
        file, place = place_in(self.ends, number)
        line = self.numbers[file][place]
        start, end = self.starts[file][line : line + 2]
        return f"{self.files[file]}:{line + 1}", self.contents[file][start:end]


def _open(file: Path, most: int | None) -> tuple[bytes | mmap.mmap, np.ndarray]:
    """Return the content of a file and the offsets of its lines, with the end of the last line."""
    with opened(file) as stream:
        packed = file.suffix in PACKED
        lines = [*islice(stream, most)] if packed else islice(stream, most)
        ends = np.fromiter(accumulate(map(len, lines), initial=0), dtype=np.int64)
        if packed:
            return b"".join(lines), ends
        return (mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if ends[-1] else b""), ends


def parse(line: bytes) -> Conversation:
    """Return the conversation of a row. Raises ValueError if the row has none; the message states what is wrong.

    A row has `messages` of `role` and `content`, or ShareGPT's `conversations` of `from` and `value`; `tools` is
    optional.
    """
    row = record_of(line)
    messages = row.get("messages", row.get("conversations"))
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            "no list of messages under 'messages' (or 'conversations')"
            + (", but " + ", ".join(map(repr, row))) * bool(row)
        )
    return conversation(messages, row.get("tools"))


def record_of(line: bytes) -> dict[str, Any]:
    """Return a row as a dict. Raises ValueError if the row is not a JSON object."""
    try:
        row = json.loads(line)
    except RecursionError as error:
        raise ValueError("not a JSON line: nested too deeply") from error
    except ValueError as error:  # also raised for a line that is not UTF-8
        raise ValueError(f"not a JSON line: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"not a record but {type(row).__name__}")
    return row


def conversation(messages: list[Any], tools: Any = None) -> Conversation:
    """Return a conversation from the `messages` and `tools` of a row. Raises ValueError if one of these is unusable."""
    return Conversation([_message(message, number) for number, message in enumerate(messages, start=1)], _tools(tools))


def _message(message: Any, number: int) -> dict[str, Any]:
    """Return a message with role, content and, if present, reasoning and calls, under the keys that templates use."""
    if not isinstance(message, dict):
        raise ValueError(f"message {number} is {type(message).__name__}, not a record")
    role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
    if not isinstance(role, str) or not role:
        raise ValueError(f"message {number} has no role")
    calls = message.get("tool_calls") or []
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        content = "".join(part["text"] for part in content)
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise ValueError(f"message {number} has {type(content).__name__} as content, not text")
    found = {"role": ROLES.get(role, role), "content": content}
    if reasoning := next((message[key] for key in REASONING if message.get(key)), None):
        if not isinstance(reasoning, str):
            raise ValueError(f"message {number} has {type(reasoning).__name__} as reasoning, not text")
        found |= {"reasoning_content": reasoning, "thinking": reasoning}
    if not isinstance(calls, list):
        raise ValueError(f"message {number} has {type(calls).__name__} as tool_calls, not a list")
    others = {key: value for key, value in message.items() if key in ("name", "tool_call_id")}
    return found | others | ({"tool_calls": [_call(call, number) for call in calls]} if calls else {})


def _call(call: Any, number: int) -> dict[str, Any]:
    """Return a function call with its arguments as a dict, because a template would quote arguments in JSON text again."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"message {number} has a call without the name of a function")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"message {number} calls {function['name']} with arguments that are not JSON") from error
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _tools(tools: Any) -> list[dict[str, Any]]:
    """Return the functions (tools) of a row; some files hold them as JSON text."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise ValueError("its tools are not JSON") from error
    if not isinstance(tools or [], list) or not all(isinstance(tool, dict) for tool in tools or []):
        raise ValueError("its tools are not a list of records")
    return tools or []
