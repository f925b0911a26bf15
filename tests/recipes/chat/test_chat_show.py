"""`titan data show` prints a row with its mask, and totals of all rows."""

import json

import pytest

from tests.core.data.test_unknown import ROWS, letters, warned
from tests.experiments.report.test_changes import what_differs
from titan_hydra import cli
from titan_hydra.core.job.config.registry import DATA_SOURCES

__all__ = ["letters"]
TALK = {"messages": [{"role": "user", "content": ROWS[-1]}, {"role": "assistant", "content": "A"}]}


def test_a_conversation_is_shown_with_what_is_learned(capsys):
    assert cli.main(["data", "show", "data=embedded_chat", "--row", "3"]) == 0
    shown = capsys.readouterr().out
    assert ">>>The capital of Iceland is Reykjavik.<|eot_id|><<<<|start_header_id|>user" in shown
    assert "369 conversations: 0 cannot be used, 0 have more than data.seq_len=256 + 1 tokens" in shown
    assert (
        "about 82 samples an epoch" in shown
        and "20.5 steps with data.global_batch=4" in shown
        and "learned, %  conversations" in shown
    )
    assert not shown.endswith("\n\n")


def test_what_cannot_be_used_is_counted(tmp_path, capsys):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    rows = [
        json.dumps({"messages": turns}),
        "{",
        json.dumps({"messages": [*turns, *turns * 9]}),
        json.dumps({"messages": turns[:1]}),
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    words = ["data", "show", "data=chat", f"data.path={tmp_path}/a.jsonl", "data.seq_len=64"]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert "4 conversations: 2 cannot be used, 1 have more than data.seq_len=64 + 1 tokens" in shown
    assert f"  {tmp_path}/a.jsonl:4: it has no message of the assistant" in shown
    assert cli.main([*words, "--row", "2"]) == 2
    assert capsys.readouterr().err.startswith(f"{tmp_path}/a.jsonl:2: not a JSON line")


def shows_what_is_unknown(words, file, letters, capsys):
    """Rows of a file with letters that the tokenizer does not know give a warning, which `titan data show` prints too."""
    words = (
        *words,
        f"data.path={file}",
        "data.chat_template=chatml",
        "data.document_mask=true",
        "tokenizer=hf",
        f"tokenizer.path={letters}",
    )
    (line,) = warned(*words)
    assert "unknown" in line and "'g', 't'" in line
    assert cli.main(["data", "show", *words]) == 0
    shown = capsys.readouterr().out
    assert "% unknown to the tokenizer\n" in shown and f"warning: {line}\n" in shown


def test_what_the_tokenizer_does_not_know_is_a_warning(tmp_path, letters, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(TALK))
    shows_what_is_unknown(("data=chat", "objective=sft"), file, letters, capsys)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            [],
            "data.name=embedded: only sources that pack rows into samples can be shown; one of "
            + ", ".join(name for name, record in DATA_SOURCES.items() if "trained" in record.gives),
        ),
        (["data=embedded_chat", "--row", "370"], "--row=370: there are 369 conversations; nearest legal: 369"),
        (["data=chat"], "data.path=null: data=chat needs it"),
    ],
)
def test_bad_input_is_one_line(capsys, words, line):
    assert cli.main(["data", "show", *words]) == 2
    assert capsys.readouterr().err.strip() == line


def test_the_report_knows_what_its_keys_change(flat):
    expected = {"data.train_on": {"learning"}, "data.chat_template": {"learning"}}
    assert {key: what_differs(flat, key) for key in expected} == expected
