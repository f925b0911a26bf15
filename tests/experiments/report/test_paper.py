"""From run directories with the paper's own figures, the report prints the paper's tables: byte for byte the files in
golden/.
"""

from pathlib import Path

import pytest
import yaml

HERE = Path(__file__).parent
PAPER = yaml.safe_load((HERE / "paper.yaml").read_text())
KEYS = {
    "model": "model.name",
    "gpus": "gpus",
    "dp_shard": "parallelism.dp_shard",
    "tp": "parallelism.tp",
    "cp": "parallelism.cp",
    "pp": "parallelism.pp",
    "async_tp": "parallelism.async_tp",
    "local_batch": "data.local_batch",
    "global_batch": "data.global_batch",
    "seq_len": "data.seq_len",
    "ac": "ac.name",
    "pp_schedule": "pp_schedule.name",
}


def fill(sweep, table):
    """Write the run directories of one table."""
    common = {"seq_len": 8192} | PAPER[table]["common"]
    for row in PAPER[table]["rows"]:
        job = common | row
        changes = {KEYS[name]: value for name, value in job.items() if name in KEYS}
        changes |= {"data.global_batch": job.get("global_batch", job["local_batch"] * job["dp_shard"])}
        changes |= {"compile.name": "block"} if job.get("compile") else {}
        changes |= {"precision.name": "float8_tensorwise", "precision.converter": "float8"} if job.get("float8") else {}
        result = {"tokens_per_second": row["throughput"], "memory_gib": row["memory"], "device": "NVIDIA H100"}
        sweep.cell(row["name"], changes, result=result)


def golden(name: str, text: str) -> None:
    assert text == (HERE / "golden" / name).read_text()


@pytest.mark.parametrize("table", PAPER)
def test_markdown_is_the_papers_table(sweep, capsys, table):
    fill(sweep, table)
    status, out, err = sweep.report(capsys, "--md")
    assert (status, err) == (0, "")
    gains = [row["gain"] for row in PAPER[table]["rows"] if "gain" in row]
    assert [gain for gain in gains if f"| {gain} |" in out] == gains
    golden(f"{table}.md", out)


@pytest.mark.parametrize(("flag", "file"), [("--csv", "table2.csv"), ("--latex", "table2.tex")])
def test_other_formats(sweep, capsys, flag, file):
    fill(sweep, "table2")
    status, out, _ = sweep.report(capsys, flag)
    assert status == 0
    golden(file, out)


def test_the_terminal_shows_the_same(sweep, capsys):
    fill(sweep, "table1")
    _, out, _ = sweep.report(capsys)
    lines = [line.split() for line in out.splitlines()]
    assert ["FSDP", "6,258", "\N{EN DASH}", "81.9"] in lines
    assert ["+", "torch.compile", "+", "Float8", "9,409", "+50.35", "%", "76.8"] in lines


def test_files_are_written_with_o(sweep, capsys, tmp_path):
    fill(sweep, "table2")
    _, out, _ = sweep.report(capsys, "--md", "--csv", "--latex", "-o", str(tmp_path / "paper"))
    assert out.split() == [str(tmp_path / "paper" / name) for name in ("report.md", "report.csv", "report.tex")]
    for name in ("md", "csv", "tex"):
        golden(f"table2.{name}", (tmp_path / "paper" / f"report.{name}").read_text())
