"""Runs of other programs in a report: what their files hold, what is compared, and files that are damaged."""

import csv
import gzip
import io
import json

import pytest

from titan_hydra import cli
from titan_hydra.experiments.report.foreign import foreign_cells

DONE = {
    "tokens_per_second": 1500.0,
    "tokens_per_second_iqr": 100.0,
    "measured_steps": 39,
    "device": "H100",
    "parameters": 6163712,
}
COLOURS = "\x1b[31m", "\x1b[32m", "\x1b[38;2;180;60;0m", "\x1b[39m"


def titan(step, loss, tps, gib=61.5, rank=""):
    """Return a line as TorchTitan 0.3.0 writes it, with its colours."""
    red, green, orange, reset = COLOURS
    return (
        f"{rank}[titan] 2026-11-27 01:59:08,691 - root - INFO - {red}step: {step:2}  {green}loss: {loss:8.5f}  {orange}grad_norm: "
        f" 0.7148  {green}memory: {gib:5.2f}GiB(76.90%)  tps: {tps:,}  tflops: 410.01  mfu: 41.46%{reset}\n"
    )


def titan_log(steps=range(1, 41)):
    head = "[titan] 2026-11-27 - root - INFO - \x1b[34mModel llama3 debugmodel \x1b[31msize: 6,163,712 total parameters\x1b[39m\n"
    return head + "".join(titan(step, 8 - step / 20, 1000 + step) for step in steps)


def megatron(step, samples, milliseconds, rate, loss, norm):
    """Return a line as Megatron-LM writes it; of an iteration that was skipped it writes no loss."""
    learned = f"lm loss: {loss} | loss scale: 1.0 | grad norm: {norm} |" if loss else "loss scale: 1.0 |"
    return (
        f" iteration {step:8d}/  250000 | consumed samples: {samples:12d} | elapsed time per iteration (ms): {milliseconds} | "
        f"learning rate: {rate} | global batch size:  1024 | {learned} number of skipped iterations:   0 |\n"
    )


# Numbers of a public log (github.com/epfLLM/Megatron-LLM, issue 11); the stamp of time is that of later versions
MEGATRON = (
    """\
------------------------ arguments ------------------------
  seq_length ...................................... 2048
  world_size ...................................... 8
"""
    " [2023-08-14 09:12:01]"
    + megatron(201, 205824, 139113.4, "1.507E-05", "2.373574E+00", 0.811)
    + "[Rank 0] (after 201 iterations) memory (MB) | allocated: 14321.1 | reserved: 61000.0 | max reserved: 61440.0\n"
    + megatron(202, 206848, 139221.4, "1.515E-05", "2.413736E+00", 0.567)
    + megatron(203, 207872, 140346.9, "1.522E-05", "2.383620E+00", 0.155)
    + megatron(204, 208896, 140197.9, "1.530E-05", None, None)
    + " validation loss at iteration 204 | lm loss value: 2.501000E+00 | lm loss PPL: 1.219469E+01 |\n"
    + " validation loss at iteration 204 on test set | lm loss value: 9.501000E+00 | lm loss PPL: 1.3E+04 |\n"
)


def one(path):
    (cell,) = foreign_cells([path])
    return cell


def written(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_log_of_torchtitan(tmp_path):
    cell = one(
        written(
            tmp_path / "tt.log", titan_log() + "validate step: 40  loss: 6.5432  memory: 1.00GiB(1.00%)  tps: 9,000\n"
        )
    )
    assert (cell.name, cell.program, cell.step, cell.parameters) == ("tt (foreign)", "TorchTitan", 40, 6163712)
    assert cell.losses[40] == 6.0 and cell.held_out == 6.5432 and cell.memory == 61.5 and cell.gpus is None
    assert cell.rate == 1021 and cell.measured == 39  # the first row is warm-up
    ranks = "".join(titan(step, 5, 10, rank=f"[rank{rank}]:") for step in (1, 2, 3) for rank in (0, 1))
    assert one(written(tmp_path / "ranks.log", ranks)).backs == 0


def test_a_log_of_megatron(tmp_path):
    cell = one(written(tmp_path / "meg.log", MEGATRON))
    assert (cell.program, cell.step, cell.gpus, cell.memory) == ("Megatron-LM", 204, 8, 60.0)
    assert dict(cell.losses) == {201: 2.373574, 202: 2.413736, 203: 2.38362} and cell.held_out == 2.501
    assert cell.rate == pytest.approx(1024 * 2048 / 140.1979 / 8)  # the median of the rows but the first
    bare = one(written(tmp_path / "bare.log", "\n".join(MEGATRON.splitlines()[3:]) + "\n"))
    assert bare.rate is None and bare.loss == cell.loss  # neither the length of a sample nor the devices are known
    every = (
        MEGATRON.replace("     202/", "     301/").replace("     203/", "     401/").replace("     204/", "     501/")
    )
    means = one(written(tmp_path / "every.log", every))
    assert not means.losses and means.loss == cell.loss  # each is a mean over a hundred steps


def test_a_folder_of_tensorboard_with_two_attempts(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    for number, steps in enumerate((range(1, 9), range(6, 13))):
        folder = tmp_path / "tb" / f"20261127-015{number}"
        with SummaryWriter(folder, filename_suffix=str(number)) as writer:
            for step in steps:
                writer.add_scalar("loss_metrics/global_avg_loss", 10 * number + step, step)
                writer.add_scalar("throughput(tps)", 100.0 + step, step)
        (file,) = folder.iterdir()
        file.rename(folder / f"events.out.tfevents.{1000 + number}.host.1.{number}")
    cell = one(tmp_path / "tb")
    assert [cell.losses[step] for step in (5, 6, 12)] == [5, 16, 22] and cell.backs == 1
    assert 6 not in cell.column("tokens_per_second")  # the first row of the second attempt
    file = next((tmp_path / "tb/20261127-0151").iterdir())
    file.write_bytes(file.read_bytes()[:-9])
    assert one(tmp_path / "tb").step >= 11
    (tmp_path / "tb/20261127-0151").rename(tmp_path / "tb/other")
    with pytest.raises(Exception, match="2 runs"):
        one(tmp_path / "tb")


JSON_LINES = """\
{"_step": 1, "loss": 5.0, "tps": 100}
{"_step": 2, "loss": 4.0, "tps": 1010}
{"_st
{"_step": 3, "loss": 3.5, "tps": "NaN"}
"""
TABLE = 'Step,Loss,tokens/s\n1,5.0,100\n2,4.0,"1,010"\n3,3.5,120\n'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.csv", TABLE),
        ("run.csv", TABLE.replace("\n", "\r\n")),
        ("run.csv", TABLE.encode("utf-8-sig")),
        ("run.csv", TABLE.encode("utf-16")),
        ("run.csv.gz", gzip.compress(TABLE.encode(), mtime=0)),
        ("run.csv", TABLE + "4,3.2"),  # half of a line
        ("run.csv", TABLE.replace("2,4.0", "x,9.0,9\n2,4.0")),
        ("run.csv", b"\xff\xfe" + TABLE.encode() + b"\xe9\xe9\xe9,1,1\n"),
        ("run.csv", "Step,Loss,tokens/s\n3,3.5,120\n2,4.0,1010\n1,5.0,100\n"),  # the newest row first
        ("run.csv", "Step,Loss,tokens/s\n1,5.0,100\n2,4.0,1010\n3,9.0,1\n4,9.0,1\n3,3.5,\n"),  # a restart
        ("run.tsv", "iteration\ttrain/loss\ttps\n1\t5.0\t100\n2\t4.0\t1010\n3\t3.5\t120\n"),
        ("run.csv", "_step;train_loss;wps\n1;5.0;100\n2;4.0;1010\n3;3.5;120\n"),
        ("run.csv", '"Step","my - run - train/loss","my - run - train/loss__MIN","my - run - tps"\n1,5,0,100\n2,4,0,1010\n3,3.5,0,120\n'),
        ("run.jsonl", JSON_LINES),
    ],
)  # fmt: skip
def test_tables_of_many_kinds_hold_the_same_run(tmp_path, name, content):
    cell = one(written(tmp_path / name, content))
    assert dict(cell.losses) == {1: 5.0, 2: 4.0, 3: 3.5}
    assert cell.column("tokens_per_second")[2] == 1010 and cell.name.endswith("(foreign)")


def test_a_table_that_holds_two_runs_becomes_two_rows(tmp_path):
    cells = foreign_cells([written(tmp_path / "w.csv", '"Step","a - loss","b - loss"\n1,5,\n1,,6\n2,4,\n')])
    assert [(cell.name, dict(cell.losses)) for cell in cells] == [
        ("a (foreign)", {1: 5, 2: 4}),
        ("b (foreign)", {1: 6}),
    ]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.log", "", "is empty"),
        ("empty.csv", "", "is empty"),
        ("other.log", "hello\nworld\n", "no row of a run"),
        ("half.log", titan(1, 5, 10)[:-20], "no end"),
        ("steps.csv", "a,b\n1,2\n", "step_column"),
        ("losses.csv", "step,b\n1,2\n", "loss_column"),
        ("none.csv", "step,loss\n1,\nx,3\n", "no row of a run"),
        ("binary.log", bytes(range(256)) * 50, "no row of a run"),
        ("cut.log.gz", gzip.compress(titan_log().encode(), mtime=0)[:40], "cannot be read to its end"),
        ("huge.csv", f"step,loss\n{10**30},1\n-3,1\nnan,2\ninf,2\n1.5,2\n", "no row of a run"),
    ],
)
def test_a_file_without_a_run_is_refused_in_a_line(sweep, capsys, tmp_path, name, content, words):
    sweep.cell("a", losses=[5.0, 4.0], result=DONE)
    written(tmp_path / name, content)
    status, out, err = sweep.report(capsys, "--with", str(tmp_path / name), str(tmp_path / "nowhere.log"))
    assert (status, out, err.count("\n")) == (2, "", 2) and words in err and "nowhere.log: no such file" in err


@pytest.mark.parametrize(
    ("name", "stated", "words"),
    [
        ("t.csv", "gpu: 8\nseq_len: 1.5\n", [("gpu=8", "gpus"), ("seq_len=1.5", "whole number")]),
        ("t.csv", "rate_of: node\nglobal_batch: 0\n", [("rate_of=node", "device, job"), ("global_batch=0", "1")]),
        ("t.csv", "loss_column: Lost\n", [("loss_column=Lost", "Step, Loss")]),
        ("t.log", "loss_column: Loss\n", [("loss_column",)]),
    ],
)
def test_faults_of_a_statement_are_lines(sweep, capsys, tmp_path, name, stated, words):
    sweep.cell("a", losses=[5.0, 4.0], result=DONE)
    written(tmp_path / name, TABLE if name == "t.csv" else titan_log())
    written(tmp_path / f"{name}.yaml", stated)
    status, out, err = sweep.report(capsys, "--with", str(tmp_path / name))
    assert (status, out, err.count("\n")) == (2, "", len(words)), err
    assert all(word in line for line, those in zip(err.splitlines(), words, strict=True) for word in those)


def stated(sweep, tmp_path, **changes):
    """Write a log beside the sweep's baseline, stated to be like it but for `changes`; return its file."""
    losses = [8 - step / 20 for step in range(1, 41)]
    data = {"data.path": "corpus.bin", "data.global_batch": 16, "data.seq_len": 512}
    sweep.cell("a", data, losses=losses, rates=[1000.0] * 40, result=DONE)
    sweep.cell("b", data, losses=losses, rates=[1000.0] * 40, result=DONE)
    facts = {
        "data": "corpus.bin",
        "global_batch": 16,
        "seq_len": 512,
        "gpus": sweep.base["gpus"],
        "device": "H100",
    } | changes
    known = {name: value for name, value in facts.items() if value is not None}
    if known:
        written(tmp_path / "tt.log.yaml", json.dumps(known))
    return str(written(tmp_path / "tt.log", titan_log()))


@pytest.mark.parametrize(
    ("changes", "banded", "faster"),
    [
        ({}, True, True),
        ({"label": "TorchTitan 0.3"}, True, True),
        ({"data": None}, False, False),
        ({"data": "other.bin"}, False, False),
        ({"global_batch": 8}, False, False),
        ({"seq_len": None}, False, False),
        ({"parameters": 5}, False, False),
        ({"gpus": None}, True, False),
        ({"device": None}, True, False),
        ({"device": "A100"}, True, False),
        ({"data": None, "global_batch": None, "seq_len": None, "gpus": None, "device": None}, False, False),
    ],
)
def test_only_what_is_stated_alike_is_compared(sweep, capsys, tmp_path, changes, banded, faster):
    file = stated(sweep, tmp_path, **changes)
    status, out, err = sweep.report(capsys, "--with", file, "--json")
    row = json.loads(out)["rows"][-1]
    assert (
        status == 0 and row["technique"] == f"{changes.get('label', 'tt')} (foreign)" and row["state"] == "foreign"
    ), err
    assert (row["in_band"], row["difference"] is not None) == (True if banded else None, faster)
    assert json.loads(out)["foreign"][0]["program"] == "TorchTitan" and row["mfu"] is None and row["torch"] is None


def test_foreign_rows_stand_in_every_form(sweep, capsys, tmp_path):
    file = stated(sweep, tmp_path, data=None)
    written(tmp_path / "meg.log", "\n".join(MEGATRON.splitlines()[3:]) + "\n")
    both = ("--with", file, str(tmp_path / "meg.log"))
    for option in ((), ("--md",), ("--latex",)):
        status, out, _ = sweep.report(capsys, *both, *option)
        assert status == 0 and out.count("tt (foreign)") >= 2 and "\N{EN DASH}" in out.replace("--", "\N{EN DASH}")
    rows = list(csv.DictReader(io.StringIO(sweep.report(capsys, *both, "--csv")[1])))
    assert [row["state"] for row in rows] == ["done", "done", "foreign", "foreign"] and rows[3][
        "tokens_per_second"
    ] == ""
    status, out, _ = sweep.report(capsys, *both, "--html", "--plots", "--x", "tokens", "-o", str(tmp_path / "out"))
    page = (tmp_path / "out/report.html").read_text()
    assert status == 0 and page.count("tt (foreign)") > 2 and "NaN" not in page.partition('id="data"')[2][:2000]
    assert (
        "tt (foreign)" in (tmp_path / "out/loss.svg").read_text() or (tmp_path / "out/loss.png").stat().st_size > 1000
    )
    assert sweep.report(capsys, *both, "--gate", file)[0] == 2


def test_the_sweep_varies_what_it_varied_without_foreign_rows(sweep, capsys, tmp_path):
    sweep.cell("a", {"parallelism.tp": 2, "optimizer.lr": 0.1}, losses=[5.0, 4.0], result=DONE)
    sweep.cell("b", {"parallelism.tp": 4, "optimizer.lr": 0.1}, losses=[5.0, 4.0], result=DONE)
    document = json.loads(sweep.report(capsys, "--with", str(written(tmp_path / "t.csv", TABLE)), "--json")[1])
    assert "parallelism.tp" in document["varied"] and "optimizer.lr" not in document["varied"]
    assert [row["parallelism.tp"] for row in document["rows"]] == [2, 4, None]


def test_compare_refuses_a_log_and_names_the_report(sweep, capsys, tmp_path):
    run, log = sweep.cell("a", losses=[5.0, 4.0], result=DONE), written(tmp_path / "tt.log", titan_log())
    for words in ((run, log), (log, run)):
        assert cli.main(["compare", *map(str, words), "--runs", str(sweep.runs)]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1) and f"--with {log}" in err


def test_a_million_lines_are_read_as_a_stream(tmp_path):
    import tracemalloc

    with (tmp_path / "long.log").open("w") as file:
        for step in range(1, 2001):
            file.write("noise of some library without any number\n" * 100 + titan(step, 5, 10))
    tracemalloc.start()
    assert one(tmp_path / "long.log").step == 2000
    assert tracemalloc.get_traced_memory()[1] < 3e6  # the file has 9 MB
    tracemalloc.stop()
