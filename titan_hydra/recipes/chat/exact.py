"""Find the learned tokens of conversations from their text, for cases against float64. Supports only Llama 3's
template, and no tools.
"""

import json
import re
from pathlib import Path

import torch
from torch import Tensor

from titan_hydra.core.data.tokenizer import load
from titan_hydra.core.job.config.schema import Job
from titan_hydra.instruments.verify.reference import Routed, Weights, logs_of_labels

EMBEDDED = Path(__file__).parent / "assets" / "train.jsonl"
HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
# an answer of the assistant, with the mark that ends it
ANSWER = re.compile(re.escape(HEADER.format("assistant")) + r"(.*?<\|eot_id\|>)", re.DOTALL)


def loss_of_answers(weights: Weights, batch: Weights, job: Job, routed: Routed) -> tuple[Tensor, int]:
    """Return the summed cross-entropy of the tokens of the assistant's answers, and their number."""
    labels = labels_of(batch, job)
    return -logs_of_labels(weights, batch, labels, job, routed).sum(), int((labels >= 0).sum())


def labels_of(batch: Weights, job: Job) -> Tensor:
    """Return the labels [batch, seq] of conversations; -1 for a label that does not count. Raises ValueError if a
    document is no conversation of the file.
    """
    words, labels = load(job.tokenizer), torch.full(batch["tokens"].shape, -1)
    file = getattr(job.data, "path", None)  # data=embedded_chat has none
    rows = [json.loads(line) for line in Path(file or EMBEDDED).read_bytes().splitlines()]
    known = [in_llama3_template(row["messages"]) for row in rows if "tools" not in row]
    for row, (tokens, documents) in enumerate(zip(batch["tokens"], batch["documents"], strict=True)):
        for document in range(int(documents.max()) + 1):
            inside = (documents == document).nonzero().flatten().tolist()
            if set(ids := tokens[inside].tolist()) == {words.eos_id}:
                continue  # padding
            text = words.decode(ids)
            if (full := next((conversation for conversation in known if conversation.startswith(text)), None)) is None:
                raise ValueError(f"{text!r} is no conversation of the data")
            # the label of a sample's last token is the token that follows in the conversation
            ids += words.locate(full).ids[len(ids) : len(ids) + 1] if inside[-1] + 1 == len(tokens) else []
            ends = [len(words.decode(ids[: number + 1])) for number in range(len(ids))]
            spans = [match.span(1) for match in ANSWER.finditer(full)]
            for number in range(1, len(ids)):
                if any(ends[number - 1] < end and ends[number] > begin for begin, end in spans):
                    labels[row, inside[number - 1]] = ids[number]
    return labels


def in_llama3_template(messages: list[dict[str, str]]) -> str:
    """Return a conversation in Llama 3's template."""
    turns = (HEADER.format(message["role"]) + message["content"].strip() + "<|eot_id|>" for message in messages)
    return "".join(("<|begin_of_text|>", *turns))
