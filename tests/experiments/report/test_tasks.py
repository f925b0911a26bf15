"""The report has columns for tasks, and names a slow rank with its host."""

import csv
import io
import json


def test_a_task_has_columns_of_its_last_numbers(sweep, capsys):
    for seed, acc in ((0, 0.25), (1, 0.75)):
        directory = sweep.cell(f"a seed={seed}", {"seed": seed}, losses=[5.0] * 12, rates=[100.0] * 12, result={})
        rows = [{"step": 6, "acc": 0.0, "acc_norm": 0.5}, {"step": 12, "acc": acc, "acc_norm": None}]
        content = [{"event": "task", "task": "arc"} | row for row in rows]
        content.append({"event": "task", "task": "lambada", "step": 12, "acc": 0.5, "perplexity": 20.0})
        (directory / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    sweep.cell("a seed=2", {"seed": 2}, losses=[5.0] * 12, rates=[100.0] * 12, result={})
    status, out, _ = sweep.report(capsys)
    assert status == 0 and "arc acc " in out and "lambada perplexity" in out and "arc acc_norm" not in out
    rows = list(csv.DictReader(io.StringIO(sweep.report(capsys, "--csv")[1])))
    assert [row["arc_acc"] for row in rows] == ["0.25", "0.75", ""]
    assert [row["lambada_perplexity"] for row in rows] == ["20.0", "20.0", ""]
    assert "0.50 \N{PLUS-MINUS SIGN} 0.25" in sweep.report(capsys, "--over", "seed")[1]


def test_a_rank_that_is_slow_in_most_rows_is_named(sweep, capsys):
    directory = sweep.cell("a", losses=[5.0] * 12, rates=[100.0] * 12, result={})
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    own = {"slowest_rank": 3, "slowest_over_median": 1.5, "others_over_median": 1.05}
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row | own) + "\n" for row in rows))
    (directory / "attempts/1").mkdir(parents=True)
    (directory / "attempts/1/rank_3.json").write_text(json.dumps({"host": "node7"}))
    out = sweep.report(capsys)[1]
    assert "rank 3 needs 1.50 times as long as the others (host node7; slow in 12 of 12 rows)" in out
