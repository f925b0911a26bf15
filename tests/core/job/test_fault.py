"""Test how values are written for a person, a shell, or Hydra."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from titan_hydra.core.job.config.fault import as_value, suggest

TEXTS = [
    "plain",
    "a b",
    " a",
    "",
    "1",
    "1e3",
    "true",
    "null",
    "nan",
    "a,b",
    "[a]",
    "{a: 1}",
    "range(1,3)",
    "it's",
    'say "so"',
    "a\\b",
    "a\\\\b",
    "end\\",
    "end\\\\",
    "\\'",
    "\\\\'",
    "'",
    "''",
    '"',
    "/runs/a b's/step-1",
    "x=1",
    "a:b",
    "#1",
    "tab\there",
    "é",
]


@pytest.mark.parametrize("text", TEXTS)
def test_hydra_reads_a_written_text_as_it_was(text):
    value = OverridesParser.create().parse_override(f"key={as_value(text)}").value()
    assert getattr(value, "text", value) == text


def test_a_word_is_suggested_once():
    assert suggest("metrics.wandb_notes", ["metrics.wandb.tags", "metrics.wandb.tags"]) == ("metrics.wandb.tags",)
