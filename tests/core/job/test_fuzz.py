"""Bad input of any kind gives one line per fault: no traceback, no hang, and no illegal line is accepted. The lines are
those of corpus.py.
"""

import json
import signal
from collections import Counter

import pytest

from tests.core.job import corpus
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config import from_dict, identity, read, to_dict
from titan_hydra.core.job.config.load import give_types
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.rules.checks import check, warnings
from titan_hydra.experiments.compose.compose import own_composer
from titan_hydra.experiments.compose.explain import explain
from titan_hydra.experiments.compose.overrides import mistakes

LINES = list(corpus.lines())
SECONDS = 40  # after which a line counts as hung


def verdict(overrides):
    """Return the faults of a command line, one line each, as launch.py prints them; [] if there is none."""
    if lines := mistakes(overrides):
        return lines
    try:
        job, faults = read(own_composer()(overrides))
    except Exception as error:
        line = explain(error)
        assert line, f"traceback: {error!r}"
        return [line]
    if job is None:
        return list(map(str, faults))
    try:
        job = freeze(job)
    except ConfigError as error:  # a family that is filled from a file names what is wrong with it
        return [str(error)]
    if not (faults := check(job)):
        frozen = json.loads(json.dumps(to_dict(job)))
        assert from_dict(Job, frozen) == job and identity(job)
        assert not list(give_types(Job, frozen, "", needed=False))  # which would refuse the run at its start
        list(warnings(job))
    return list(map(str, faults))


def hang(*_):
    raise TimeoutError


@pytest.fixture
def alarm():
    before = signal.signal(signal.SIGALRM, hang)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_the_corpus_is_large_and_holds_the_lines_of_the_report():
    assert len({tuple(overrides) for overrides, _ in LINES}) >= 1500
    assert sum(1 for _ in corpus.from_report()) >= 120


@pytest.mark.parametrize("part", range(4))
def test_every_line_is_refused_in_a_line_or_accepted_as_it_should_be(part, alarm, capsys):
    judge(LINES[part::4], capsys)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_every_line_of_a_larger_corpus(seed, alarm, capsys):
    judge(list(corpus.lines(seed, wrong_types=10, mixtures=1000)), capsys)


def judge(lines, capsys):
    """Try lines; print how many were refused and accepted."""
    count, wrong = Counter(), []
    for overrides, refused in lines:
        signal.alarm(SECONDS)
        try:
            faults = verdict(overrides)
        except BaseException as error:
            count["hang" if isinstance(error, TimeoutError) else "traceback"] += 1
            wrong.append((overrides, repr(error)[:300]))
            continue
        count["refused" if faults else "accepted"] += 1
        for line in faults:
            bare = (
                "\n" in line
                or not line.isprintable()
                or len(line) > 2500
                or line.startswith("Error")
                or ": " not in line
            )
            if bare or line.endswith(": "):
                wrong.append((overrides, f"not a line with a reason: {line[:300]!r}"))
        if refused and not faults:
            wrong.append((overrides, "accepted"))
    with capsys.disabled():
        print(f"\n{dict(count)}", end=" ")
    assert not wrong, "\n".join(f"{' '.join(overrides)[:120]!r}: {what}" for overrides, what in wrong)
