"""`titan data show`: a conversation with its mask, and what all of them hold."""
import json

import pytest

from titan_hydra import cli


def test_a_conversation_is_shown_with_what_is_learned(capsys):
    assert cli.main(["data", "show", "data=embedded_chat", "--row", "3"]) == 0
    shown = capsys.readouterr().out
    assert ">>>The capital of Iceland is Reykjavik.<|eot_id|><<<<|start_header_id|>user" in shown
    assert "369 conversations: 0 cannot be used, 0 have more than data.seq_len + 1 = 257 tokens" in shown
    assert "about 82 samples an epoch" in shown and "20.5 steps with data.global_batch=4" in shown and "learned, %  conversations" in shown


def test_what_cannot_be_used_is_counted(tmp_path, capsys):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    rows = [json.dumps({"messages": turns}), "{", json.dumps({"messages": [*turns, *turns * 9]}), json.dumps({"messages": turns[:1]})]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    words = ["data", "show", "data=chat", f"data.path={tmp_path}/a.jsonl", "data.seq_len=64"]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert "4 conversations: 2 cannot be used, 1 have more than data.seq_len + 1 = 65 tokens" in shown
    assert f"  {tmp_path}/a.jsonl:4: no message of the assistant's in it" in shown
    assert cli.main([*words, "--row", "2"]) == 2
    assert capsys.readouterr().err.startswith(f"{tmp_path}/a.jsonl:2: not a JSON line")


@pytest.mark.parametrize(("words", "line"), [
    ([], "data.name=embedded: only conversations are shown; nearest legal: chat or embedded_chat"),
    (["data=embedded_chat", "--row", "370"], "--row=370: there are 369 conversations; nearest legal: 369"),
    (["data=chat"], "data.path=null: data=chat needs it"),
])
def test_bad_input_is_one_line(capsys, words, line):
    assert cli.main(["data", "show", *words]) == 2
    assert capsys.readouterr().err.strip() == line
