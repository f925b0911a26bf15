"""Read the files that wandb writes offline: blocks of 32 KiB of records, each with checksum, length and kind (whole,
first, middle or last part).
"""

import json
from collections.abc import Iterator
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record


def records(file: Path) -> Iterator[Record]:
    """Return the records of a run-ID.wandb file."""
    content, position, record = file.read_bytes(), 7, b""
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:  # too few bytes for a header
            position += 32768 - position % 32768
            continue
        length, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield Record.FromString(record)
            record = b""


def rows(file: Path) -> list[dict]:
    """Return the logged rows in their order, with `_step`."""
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records(file)
        if record.HasField("history")
    ]
