"""Test `titan rates goodput`: the formulas agree with simulated failures, and the output explains them."""

import json

import numpy
import pytest

from titan_hydra import cli
from titan_hydra.instruments.rates.goodput import (
    Interruptions,
    daly_interval,
    shares_of_elastic,
    shares_of_groups,
    shares_of_job,
)

RUNS = 10_000
JOB = [
    "model=llama3_8b",
    "data=synthetic",
    "hardware=h100",
    "parallelism=fsdp",
    "--gpus",
    "1024",
    "--step-seconds",
    "2",
]


def simulated(interval: float, costs: Interruptions, saves: int = 10) -> float:
    """Return the goodput of RUNS simulated runs, each from one complete checkpoint to the tenth after it. Each pass of
    the loop covers the time from the start, or from a failure, to the next failure.
    """
    random = numpy.random.default_rng(0)
    done, seconds, again = numpy.zeros(RUNS), numpy.zeros(RUNS), numpy.zeros(RUNS)
    period = max(interval, costs.behind) + costs.held
    running = numpy.arange(RUNS)
    while len(running):
        life = random.exponential(costs.between, len(running))
        end = again[running] + (saves - done[running]) * period  # when the last checkpoint would be complete
        seconds[running] += numpy.minimum(life, end)
        done[running] += numpy.floor((life - again[running]) / period).clip(0)
        # and the work that was done while the checkpoint was being written
        again[running] = costs.restart + costs.behind
        running = running[life < end]
    return RUNS * saves * interval / seconds.sum()


def simulated_groups(groups: int, interval: float, costs: Interruptions, wait: float, failures: int = 20) -> float:
    """Return the goodput of RUNS simulated runs between the tenth failure and a later one; each failure is of a random
    group.
    """
    random = numpy.random.default_rng(0)
    back = numpy.zeros((RUNS, groups))  # when a group makes steps again
    now, useful, seconds = numpy.zeros(RUNS), 0.0, 0.0
    for failure in range(10 + failures):
        following = now + random.exponential(costs.between, RUNS)
        if failure >= 10:
            useful += (following[:, None] - back.clip(now[:, None], following[:, None])).sum() / groups
            seconds += (following - now).sum()
        back = numpy.maximum(back, (following + wait)[:, None])
        back[numpy.arange(RUNS), random.integers(groups, size=RUNS)] = following + costs.restart
        now = following
    return useful / seconds * interval / (max(interval, costs.behind) + costs.held)


def simulated_elastic(
    interval: float, costs: Interruptions, away: float, part: float, failures: int = 100_000
) -> float:
    """Return the goodput of one long simulated run. Each failure takes a node for a random time; after it, and after
    each return, the job restarts. A failure loses the work since the newest save, and a return loses none.
    """
    random = numpy.random.default_rng(0)
    at = numpy.cumsum(random.exponential(costs.between, failures))
    back = at + random.exponential(away, failures)
    events = sorted([(moment, 1) for moment in at] + [(moment, -1) for moment in back])
    ready = before = useful = 0.0
    missing, period = 0, interval + costs.held
    for moment, change in events:
        worked = max(moment - max(ready, before), 0.0)
        done = worked // period * interval if change > 0 else worked * interval / period
        useful += done * max(1 - part * missing, 0)
        missing += change
        ready, before = moment + costs.restart, moment
    return useful / before


REGIMES = {
    "failures are rare": (600, Interruptions(100_000, 300, 20)),
    "an interval is as long as the time between failures": (10_000, Interruptions(10_000, 300, 60)),
    "an interval is longer": (20_000, Interruptions(10_000, 300, 60)),
    "restarts are as long as the time between failures": (1000, Interruptions(2000, 2000, 30)),
    "saves take as long as the work": (300, Interruptions(3000, 300, 300)),
    "in the background": (600, Interruptions(10_000, 600, 2, behind=300)),
    "in the background, longer than the interval": (100, Interruptions(2000, 300, 2, behind=300)),
    "Llama 3's 16,384 GPUs": (1800, Interruptions(11_134, 900, 1, behind=60)),
}


@pytest.mark.parametrize("regime", REGIMES)
def test_the_formula_agrees_with_simulated_failures(regime):
    interval, costs = REGIMES[regime]
    shares = shares_of_job(interval, costs)
    assert shares.goodput == pytest.approx(simulated(interval, costs), rel=0.02)
    assert sum(vars(shares).values()) == pytest.approx(1) and min(vars(shares).values()) >= 0


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("between", [600, 10_000])
def test_the_formula_of_replica_groups_agrees_with_simulated_failures(groups, between):
    costs = Interruptions(between, 900, 20)
    shares = shares_of_groups(groups, 1000, costs, wait=40)
    assert shares.goodput == pytest.approx(simulated_groups(groups, 1000, costs, wait=40), rel=0.02)
    assert sum(vars(shares).values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("interval", "costs", "away", "part"),
    [
        (600, Interruptions(100_000, 300, 20), 86_400, 1 / 8),
        (600, Interruptions(10_000, 300, 20), 3600, 1 / 64),
        (1800, Interruptions(11_134, 300, 1), 3600, 1 / 128),
        (300, Interruptions(6000, 300, 30), 1200, 1 / 16),
    ],
)
def test_the_formula_of_elastic_jobs_agrees_with_simulated_failures(interval, costs, away, part):
    shares = shares_of_elastic(interval, costs, away, part)
    assert shares.goodput == pytest.approx(simulated_elastic(interval, costs, away, part), rel=0.02)
    assert sum(vars(shares).values()) == pytest.approx(1) and min(vars(shares).values()) >= 0


@pytest.mark.parametrize("regime", REGIMES)
def test_no_interval_is_much_better_than_dalys(regime):
    _, costs = REGIMES[regime]
    goodput = shares_of_job(daly_interval(costs), costs).goodput
    others = [shares_of_job(float(interval), costs).goodput for interval in numpy.geomspace(10, 100_000, 300)]
    assert goodput >= 0.999 * max(others)


def plan(capsys, *words: str) -> tuple[int, str, str]:
    status = cli.main(["rates", "goodput", *JOB, *words])
    return status, *capsys.readouterr()


def test_the_table_says_what_would_raise_the_goodput(capsys, tmp_path):
    status, out, _ = plan(capsys, "checkpoint.interval=500", "--plot", str(tmp_path / "new"))
    assert status == 0 and "a failure every 2.06 days (llama3: 419 in 884,736 GPU-days)" in out
    names = [
        "this job: checkpoint=sync",
        "checkpoint=sync",
        "checkpoint=async_pinned",
        "and spare nodes",
        "and 8 replica groups",
    ]
    rows = [line for name in names for line in out.splitlines() if line.startswith(name)]
    assert len(rows) == 5
    shares = [float(row.split("%")[0].split()[-1]) for row in rows]
    assert shares == sorted(shares) and shares[0] > 90
    assert {file.stem for file in (tmp_path / "new").iterdir()} == {"goodput-steps", "goodput-gpus"}


def test_the_table_as_json(capsys):
    given = ["--failures", "1", "--save-seconds", "60", "--copy-seconds", "1"]
    status, out, _ = plan(capsys, "checkpoint=async", "checkpoint.interval=100", *given, "--json")
    found = json.loads(out)
    assert status == 0 and found["hours_between_failures"] == 24 / 1024 and found["save_seconds"] == 60
    between, restart = 86400 / 1024, 15 * 60
    expected = shares_of_job(200, Interruptions(between, restart, 1, 60))
    assert {name: found["rows"][0][name] for name in vars(expected)} == pytest.approx(vars(expected))
    assert found["checkpoint_bytes"] == 12 * 8_030_261_248
    assert [row["gpus"] for row in found["by_gpus"]][3] == 1024 and {"steps", "checkpoint=async"} <= found["by_steps"][
        0
    ].keys()


def test_a_job_in_replica_groups_loses_one_group_at_a_time(capsys):
    status, out, _ = plan(
        capsys, "fault_tolerance=torchft", "fault_tolerance.replicas=4", "checkpoint.interval=500", "--json"
    )
    rows = json.loads(out)["rows"]
    assert status == 0 and [row["name"] for row in rows[:2]] == [
        "this job: checkpoint=sync, 4 replica groups",
        "without replica groups",
    ]
    costs = Interruptions(86400 / (4096 * 419 / (54 * 16384)), 15 * 60 + 2, 12 * 8_030_261_248 / (128 * 1e9))
    expected = shares_of_groups(4, 1000, costs, wait=7)
    assert rows[0]["goodput"] == pytest.approx(expected.goodput)


def test_the_rate_of_ones_own_runs(capsys, tmp_path):
    run = tmp_path / "runs" / "a-01234567"
    for number in (1, 2):
        folder = run / f"attempts/{number}"
        folder.mkdir(parents=True)
        record = {"pid": 1, "host": "gone", "born": "then", "started": 1000.0 * number}
        (folder / "rank_0.json").write_text(
            json.dumps(record | ({"ended": 2864.0, "exit_status": 0} if number == 2 else {}))
        )
        (folder / "status.json").write_text(json.dumps({"step": 10, "time": 1000.0 * number + 864}))
    (run / "config.json").write_text(json.dumps({"model": {}, "gpus": 100}))
    runs = ["--failures", "runs", "--runs", str(tmp_path / "runs")]
    assert "1 in 2 GPU-days" in plan(capsys, *runs)[1]
    (run / "attempts/1/cancelled").write_text("{}")
    status, out, err = plan(capsys, *runs)
    assert (status, out) == (2, "") and err.startswith("--failures=runs: 2 GPU-days of ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--failures", "0"], "--failures=0: failures per GPU-day: must be more than 0"),
        (["--failures", "nan"], "--failures=nan: failures per GPU-day: must be a finite number"),
        (["--failures", "lama3"], "--failures=lama3: is no rate; one of llama3, runs, a number"),
        (["--write-gbs", "0"], "--write-gbs=0.0: must be more than 0"),
        (["--queue-minutes", "-1"], "--queue-minutes=-1.0: must be at least 0; nearest legal: 0"),
        (["--step-seconds", "0"], "--step-seconds=0.0: must be more than 0"),
        (["parallelism.tp=3"], "gpus=1024: cannot be divided by 3"),
    ],
)
def test_bad_input_is_one_line(capsys, words, expected):
    status, out, err = plan(capsys, *words)
    assert (status, out) == (2, "") and err.startswith(expected) and err.count("\n") == 1
