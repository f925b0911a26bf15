"""Test what the launcher and `titan data show` print about pairs and rollouts, and the new name of `titan data score`."""

import json

from tests.core.data.test_unknown import ROWS, letters
from tests.experiments.report.test_changes import what_differs
from tests.recipes.chat.test_chat_show import shows_what_is_unknown
from titan_hydra import cli

__all__ = ["letters"]
PAIR = {"prompt": ROWS[-1], "chosen": "A", "rejected": "C", "ref_chosen_logps": -3.0, "ref_rejected_logps": -4.0}


def test_pairs_and_rollouts_are_shown(tmp_path, capsys):
    pair = {"prompt": "6 x 7?", "chosen": "42", "rejected": "36", "ref_chosen_logps": -3.0, "ref_rejected_logps": -4.0}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair) + "\n" + json.dumps(pair | {"chosen": 5}))
    assert cli.main(["data", "show", "data=preference", f"data.path={tmp_path}/pairs.jsonl"]) == 0
    shown = capsys.readouterr().out
    assert (
        ">>>42<|eot_id|><<<<|begin_of_text|>" in shown
        and ">>>36<|eot_id|><<<" in shown
        and "2 pairs: 1 cannot be used" in shown
    )
    (tmp_path / "drawn.jsonl").write_text(
        json.dumps({"tokens": [300, 301, 302], "old_logprobs": [-0.4], "advantages": 0.8})
    )
    assert cli.main(["data", "show", "data=rollouts", f"data.path={tmp_path}/drawn.jsonl"]) == 0
    assert (
        "1 rollouts: 0 cannot be used" in (shown := capsys.readouterr().out)
        and "3 tokens, 33.3% of them learned" in shown
    )


def test_what_the_tokenizer_does_not_know_of_pairs_is_a_warning(tmp_path, letters, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(PAIR))
    shows_what_is_unknown(("data=preference", "objective=dpo", "objective.beta=0.1"), file, letters, capsys)


def test_the_report_knows_what_its_keys_change(flat):
    expected = {"objective.beta": {"learning"}, "objective.clip": {"learning"}}
    assert {key: what_differs(flat, key) for key in expected} == expected
