"""The questions of tasks get the same scores on every layout, and their numbers are lm-eval's."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from tests.core.train.conftest import rows
from titan_hydra.core import models
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.base.text import finite_or_null
from titan_hydra.core.data import tokenizer
from titan_hydra.core.data.tasks import Request, Task, TaskQuestion, load_tasks, read_questions, requests_of
from titan_hydra.core.job.config import schema
from titan_hydra.core.job.rules.checks import check
from titan_hydra.core.models.init import init_weights
from titan_hydra.core.train.observe.metrics import Metrics
from titan_hydra.core.train.tasks import row_length, score_requests
from titan_hydra.core.train.trainer import build
from titan_hydra.experiments.compose.compose import compose_job

LAYOUTS = (
    ("parallelism=fsdp", "data.local_batch=3"),
    ("parallelism=tp", "data.local_batch=4"),
    ("parallelism=tp", "data.local_batch=4", "parallelism.loss_parallel=false"),
    ("parallelism=tp", "data.local_batch=4", "loss=linear_cross_entropy"),
    ("parallelism=pp", "data.local_batch=4"),
    ("parallelism=pp", "data.local_batch=4", "pp_schedule=zbv"),
    ("parallelism=cp", "data.local_batch=4"),
    ("parallelism=cp", "data.local_batch=4", "parallelism.cp_rotate=ulysses"),
)
ROWS = [
    {"prompt": "The function returns", "choices": [" a tensor", "nothing at all", "a b c d e"], "gold": 0},
    {"prompt": "Every rank reads its own shard of the file. ", "choices": ["yes", "no", "Yes"], "gold": 2},
    {"prompt": "", "choices": ["import torch", "\N{GREEK SMALL LETTER ALPHA}\N{GREEK SMALL LETTER BETA}"], "gold": 1},
    {"prompt": "word " * 40, "choices": ["one", "two words"], "gold": 1, "target_delimiter": ""},
]
TARGETS = [
    {"prompt": "x = [1]\ny =", "target": "[2]"},
    {"prompt": "a", "target": "b " * 30},
    {"prompt": "", "target": "x"},
]


@pytest.fixture
def files(tmp_path):
    for name, some in (("choose", ROWS), ("follow", TARGETS)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    return tmp_path


def job_of(files, *words):
    tasks = f"validation.tasks=[{files}/choose.jsonl,{files}/follow.jsonl]"
    return compose_job(
        "debug=tiny", "precision=fp32", "data.seq_len=128", "model.n_layers=4", "validation=on", tasks, *words
    )


def sharpened(model):
    """Make a fresh model's predictions depend on what it reads, and some of them certain."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(5 if "layers" in name else 1)


def expected(job, requests):
    """Return the scores of requests from logits of the whole model in one process, one request at a time."""
    model = models.build(job.model, job.data.seq_len)
    init_weights(model, job.model, job.seed)
    sharpened(model)
    found = []
    for request in requests:
        with torch.no_grad():
            logs = model(torch.tensor([request.ids[:-1]]))[0].double().log_softmax(-1)
        right = torch.tensor(request.ids[request.given :])
        own = logs[request.given - 1 :]
        found.append((own.gather(1, right[:, None]).sum().item(), bool((own.argmax(1) == right).all())))
    return found


def likely(job, requests):
    """Return the requests, and one more whose scored tokens are the likeliest of the fresh model."""
    model = models.build(job.model, job.data.seq_len)
    init_weights(model, job.model, job.seed)
    sharpened(model)
    ids = requests[0].ids[:3]
    for _ in range(2):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return [*requests, Request(ids, 3)]


@pytest.mark.parametrize("words", LAYOUTS, ids=" ".join)
def test_every_layout_scores_as_one_process(files, on_ranks, words):
    compare_with_one_process(files, on_ranks, words)


def test_ranks_that_do_not_divide_a_vocabulary_score_as_one_process(files, on_ranks):
    compare_with_one_process(files, on_ranks, ("parallelism=tp", "data.local_batch=4"), ("model.vocab_size=4097",))


def compare_with_one_process(files, on_ranks, words, of_both=()):
    job = job_of(files, *of_both)
    requests = likely(job, [request for task in load_tasks(job) for request in task.requests])
    right = expected(job, requests)
    assert {hit for _, hit in right} == {False, True}

    def scored(rank):
        trainer = build(job_of(files, "gpus=2", "data.global_batch=12", *words, *of_both), torch.device("cpu"))
        sharpened(trainer.model)
        found = score_requests(trainer, requests)
        assert [hit for _, hit in found] == [hit for _, hit in right]
        assert [log for log, _ in found] == pytest.approx([log for log, _ in right], rel=1e-5)
        assert trainer.model.training

    on_ranks(2, scored)


def test_rows_are_as_short_as_the_layout_allows(files):
    assert row_length(job_of(files), 33) == 64
    assert row_length(job_of(files, "gpus=2", "parallelism=tp"), 5) == 64, "each rank needs 32 tokens"
    assert row_length(job_of(files, "gpus=2", "parallelism=pp"), 5) == 128
    assert row_length(job_of(files, "compile=block"), 5) == 128


def test_a_prompt_and_a_choice_are_encoded_as_one_text():
    words = tokenizer.load(schema.Tokenizer("embedded"))
    (one, two) = requests_of(TaskQuestion(1, "Every rank  ", ("reads", "x"), 0), words)
    assert one.ids == [words.bos_id, *words.encode("Every rank   reads")]
    assert words.decode(one.ids[1 : one.given]) == "Every rank" and words.decode(two.ids[two.given :]) == "   x"
    (across,) = requests_of(TaskQuestion(1, "tensor", ("the",), None, ""), words)  # as one text: ten, s, ort, he
    assert [words.decode([token]) for token in across.ids[1:]] == ["ten", "s", "or", "he"] and across.given == 4
    (alone,) = requests_of(TaskQuestion(1, "", ("reads",), None, ""), words)
    assert (alone.ids, alone.given) == ([words.bos_id, *words.encode("reads")], 1)


def test_a_blank_stands_before_a_choice_and_nothing_before_a_target(files):
    assert [question.delimiter for question in read_questions(files / "choose.jsonl")] == [" ", " ", " ", ""]
    assert {question.delimiter for question in read_questions(files / "follow.jsonl")} == {""}


def test_the_numbers_of_a_task():
    questions = [
        TaskQuestion(1, "", ("aa", "bbbb"), 1),
        TaskQuestion(2, "", ("\N{GREEK SMALL LETTER ALPHA}" * 2, "bbb"), 0),
    ]
    scores = [(-2.0, False), (-3.0, False), (-5.0, True), (-6.0, False)]
    # by characters -2.5 and -2, by bytes -1.25 and -2
    assert Task("t", questions, []).results(scores) == {
        "questions": 2,
        "acc": 0.5,
        "acc_stderr": pytest.approx(0.5),
        "acc_norm": 0.5,
        "acc_norm_stderr": pytest.approx(0.5),
        "acc_bytes": 1.0,
    }
    questions = [TaskQuestion(1, "", ("a",), None), TaskQuestion(2, "", ("b",), None)]
    found = Task("t", questions, []).results([(-1.0, True), (-3.0, False)])
    assert (found["acc"], found["nats"], found["perplexity"]) == (0.5, 2.0, pytest.approx(math.exp(2)))


@pytest.mark.parametrize(
    ("logs", "nats", "perplexity"),
    [
        ([-1000.0, -900.0], 950.0, None),
        ([-709.7], 709.7, math.exp(709.7)),
        ([-math.inf, -1.0], None, None),
        ([math.nan, -1.0], None, None),
    ],
)
def test_a_number_that_is_none_is_null(logs, nats, perplexity):
    task = Task("t", [TaskQuestion(line, "", ("a",), None) for line in range(len(logs))], [])
    found = finite_or_null(task.results([(log, True) for log in logs]))
    assert found["nats"] == nats and found["perplexity"] == (perplexity and pytest.approx(perplexity))
    assert (found["acc"] is None) is any(map(math.isnan, logs)), "whatever a model answers whose scores are no numbers"


def test_choices_whose_scores_are_no_numbers_are_neither_right_nor_wrong():
    found = Task("t", [TaskQuestion(1, "", ("a", "b"), 0)], []).results([(math.nan, False), (-1.0, False)])
    assert finite_or_null(found) == {"questions": 1} | dict.fromkeys(found.keys() - {"questions"})


def test_an_evaluation_never_ends_a_run(files, run_job):
    """A target of more nats than exp() can take, and held-out samples whose loss is not finite."""
    row = {"prompt": "Once upon a time", "target": " there was a layout that learned what one process learns" * 12}
    (files / "follow.jsonl").write_text(json.dumps(row) + "\n")
    more = ("data=embedded", "model.vocab_size=4096", "data.seq_len=256", "model.n_layers=1", "validation.steps=1")
    job = job_of(files, *more, "model.dim=32", "steps=2", "validation.interval=1", "checkpoint.keep_best=true")
    job.validation.tasks = job.validation.tasks[1:]
    events = [event for event in rows(run_job(job), "events") if event["event"] == "task"]
    assert [event["step"] for event in events] == [1, 2]
    assert all(event["nats"] > 709.8 and event["perplexity"] is None and event["acc"] == 0 for event in events)


def test_a_validation_that_measures_nothing_is_null(capsys):
    metrics = Metrics.__new__(Metrics)
    metrics.job = SimpleNamespace(steps=3)
    metrics.events, metrics.trackers, written = SimpleNamespace(add=lambda row: written.append(row)), [], []
    metrics.event("validation", 3, validation_loss=math.nan, seconds=1.0)
    assert metrics.validation_loss is None and written[0]["validation_loss"] is None


def test_a_file_that_has_changed_is_checked_again_before_the_first_step(files):
    job = job_of(files)
    (files / "follow.jsonl").write_text(json.dumps({"prompt": "a b " * 200, "target": "b"}) + "\n")
    with pytest.raises(ConfigError, match="1: prompt and choice have"):
        load_tasks(job)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "choices": ["b"]}', ":2: no field gold; a row has prompt, choices and gold, or prompt and"),
        ('{"prompt": "a"}', ":2: no field target"),
        ('{"prompt": "a", "choices": ["b", "c"], "gold": 2}', ":2: gold is 2, and there are 2 choices, counted from 0"),
        ('{"prompt": "a", "choices": ["b", "c"], "gold": -1}', ":2: gold is -1"),
        ('{"prompt": "a", "choices": ["b", "c"], "gold": "b"}', ":2: gold is str, not int"),
        ('{"prompt": "a", "choices": ["b", "c"], "gold": true}', ":2: gold is bool, not int"),
        ('{"prompt": "a", "choices": ["b", ""], "gold": 0}', ":2: each choice, and a target, is a text that is not"),
        ('{"prompt": 3, "choices": ["b", "c"], "gold": 0}', ":2: prompt is int, not str"),
        ('{"prompt": "a", "target": "b"}', ":2: some rows have choices, and others a target"),
        ("[1]", ":2: not a record but list"),
        ("[" * 100_000, ":2: not a JSON line: "),
        ('{"prompt": "a", "choices": ["b\\ud800", "c"], "gold": 0}', ":2: a text has half a surrogate pair"),
        ("{", ":2: not a JSON line: "),
        (json.dumps({"prompt": "a b " * 200, "choices": ["b"], "gold": 0}), ":2: prompt and choice have "),
    ],
)
def test_a_bad_row_is_refused_before_anything_starts(files, line, message):
    file = files / "choose.jsonl"
    file.write_text(json.dumps(ROWS[0]) + f"\n{line}\n")
    with pytest.raises(ConfigError) as found:
        job_of(files)
    assert str(found.value).startswith(f"validation.tasks={file}: {file}{message}")


def test_a_file_that_is_missing_empty_or_named_twice_is_refused(files):
    job = job_of(files)
    (files / "choose.jsonl").write_text("\n")
    (fault,) = check(job)
    assert "no question in it" in str(fault)
    (files / "choose.jsonl").rename(files / "chose.jsonl")
    (fault,) = check(job)
    assert "no such file; one of " in str(fault) and "chose.jsonl" in str(fault)
    job.validation.tasks = [f"{files}/follow.jsonl"] * 2
    assert all("two tasks would have the name follow" in str(fault) for fault in check(job))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_questions(files)
