"""Preference optimization and clipped policies equal a separate formula, are the same on every layout, and are refused
where they cannot work.
"""

import json
import math
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import log_softmax

from tests.recipes.chat.test_sft import CONVERSATIONS
from titan_hydra import cli
from titan_hydra.core import data, models
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.models.init import init_weights
from titan_hydra.core.parallel import loss_head
from titan_hydra.core.train.objectives import build_objective
from titan_hydra.core.train.objectives.language import IGNORED
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.instruments.verify.case import case, in_bf16
from titan_hydra.instruments.verify.verify import verify
from titan_hydra.recipes.policy.objectives import Likelihood
from titan_hydra.recipes.policy.rows import pair_of

LAYOUTS = {
    "accumulation 2": (1, "parallelism=single", "data.local_batch=8"),
    "fsdp 2": (2, "parallelism=fsdp", "data.local_batch=4"),
    "tp 2": (2, "parallelism=tp", "data.local_batch=16"),
    "tp 2, whole logits": (2, "parallelism=tp", "parallelism.loss_parallel=off", "data.local_batch=16"),
    "pp 2": (2, "parallelism=pp", "data.local_batch=16"),
    "pp 2, zbv": (2, "parallelism=pp", "pp_schedule=zbv", "data.local_batch=16"),
    "compiled": (2, "parallelism=fsdp", "data.local_batch=8", "compile=block", "compile.backend=aot_eager"),
    "fused, fsdp 2, always reshard": (
        2,
        "parallelism=fsdp",
        "data.local_batch=8",
        "loss=linear_cross_entropy",
        "loss.chunk_tokens=100",
        "parallelism.reshard_after_forward=always",
    ),
    "fused, tp 2": (2, "parallelism=tp", "data.local_batch=16", "loss=linear_cross_entropy", "loss.chunk_tokens=100"),
    "fused, pp 2": (2, "parallelism=pp", "data.local_batch=16", "loss=linear_cross_entropy", "loss.chunk_tokens=100"),
}
CONTEXT = {"cp 2": (2, "parallelism=cp", "parallelism.cp_rotate=ulysses", "data.local_batch=16")}


def conversations():
    return [json.loads(line)["messages"] for line in CONVERSATIONS.read_text().splitlines()]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Return preference pairs from the package's conversations: each answer against the answer of the next
    conversation, with possible values of a reference.
    """
    rows, file = conversations(), tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    with file.open("w") as out:
        for number, (row, other) in enumerate(pairwise(rows)):
            pair = {
                "prompt": row[:-1],
                "chosen": [row[-1]],
                "rejected": other[-1]["content"],
                "ref_chosen_logps": -20.0 - number % 7,
                "ref_rejected_logps": -25.0 - number % 5,
            }
            out.write(json.dumps(pair) + "\n")
    return file


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    """Return sampled tokens, with log-probabilities and advantages of both signs."""
    file, dice = tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl", torch.Generator().manual_seed(0)
    with file.open("w") as out:
        for number in range(200):
            drawn = 3 + number % 9
            old = (-8.3 + 0.3 * torch.randn(drawn, generator=dice)).tolist()
            row = {
                "tokens": torch.randint(4096, (drawn + 2 + number % 4,), generator=dice).tolist(),
                "old_logprobs": old,
                "ref_logprobs": [-8.0 - 0.1 * (place % 7) for place in range(drawn)],
                "advantages": torch.randn(drawn, generator=dice).tolist() if number % 2 else -1.5 + number % 4,
            }
            out.write(json.dumps(row) + "\n")
    return file


def base(name, file, seq_len=192):
    return (f"data={name}", f"data.path={file}", f"data.seq_len={seq_len}", "model.vocab_size=4096")


def prove(base, layouts):
    for outcome in verify(
        [case(name, ranks, *words, base=base, gradients=2e-5) for name, (ranks, *words) in layouts.items()], steps=2
    ):
        assert outcome.passed, outcome


def test_preferences_are_the_same_on_every_layout(pairs):
    prove(base("preference", pairs), LAYOUTS)


def test_policies_are_the_same_on_every_layout(rollouts):
    prove(base("rollouts", rollouts), LAYOUTS | CONTEXT)


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layouts_learn_the_same_in_bf16(pairs, rollouts, slow):
    cases = [
        *in_bf16("dpo", *base("preference", pairs, 64)),
        *in_bf16("policy", *base("rollouts", rollouts, 32), loss=1e-3),
    ]
    for outcome in verify([one for one in cases if one.slow is slow], steps=2):
        assert outcome.passed, outcome


def built(*words):
    """Return a job, its model in float64, and a batch."""
    job = compose_job("debug=tiny", "precision=fp32", "data.local_batch=4", *words)
    model = models.build(job.model, job.data.seq_len)
    init_weights(model, job.model, job.seed)
    return job, model.double(), data.build(job, 0, 1).next()


def plain(model, tokens, learned):
    """Return the log-probability of each learned token of one document, which the model reads alone."""
    logs = log_softmax(model(tokens[None, :-1])[0], -1)
    return [logs[place - 1, tokens[place]] for place in range(1, len(tokens)) if learned[place]]


@pytest.mark.parametrize("loss", ["cross_entropy", "linear_cross_entropy"])
def test_preference_is_the_papers_formula(pairs, loss):
    job, model, batch = built(*base("preference", pairs), "objective.beta=0.3", f"loss={loss}")
    objective, source = build_objective(job), data.build(job, 0, 1).samples
    expected, number, columns = torch.zeros((), dtype=torch.float64), 0, torch.zeros(4, dtype=torch.float64)
    for slot in range(4):
        sample = {name: torch.from_numpy(array) for name, array in source.sample(slot, slot).items()}
        tokens, documents = sample["tokens"].long(), sample["documents"]
        for first in range(0, int(documents.max()), 2):
            sides = [documents == first + side for side in (0, 1)]
            margins = [
                sum(plain(model, tokens[side], sample["trained"][side])) - sample["reference"][side].sum()
                for side in sides
            ]
            expected -= torch.nn.functional.logsigmoid(0.3 * (margins[0] - margins[1]))
            chosen, rejected = (0.3 * margin.item() for margin in margins)
            columns += torch.tensor([chosen, rejected, chosen - rejected, chosen > rejected])
            number += 1
    assert number > 8 and objective.count(batch.tensors) == number and 0 < columns[-1] < number
    agrees(objective, model, job, batch, expected, columns)


@pytest.mark.parametrize("steered", [False, True])
@pytest.mark.parametrize("loss", ["cross_entropy", "linear_cross_entropy"])
def test_policy_is_the_papers_formula(rollouts, loss, steered):
    steer = ("objective.clip_high=0.28", "objective.kl=0.3") if steered else ()
    high = 1.28 if steered else 1.2
    job, model, batch = built(*base("rollouts", rollouts), f"loss={loss}", *steer)
    objective, source = build_objective(job), data.build(job, 0, 1).samples
    gains, clipped, columns = [], 0, torch.zeros(6, dtype=torch.float64)
    for slot in range(4):
        sample = {name: torch.from_numpy(array) for name, array in source.sample(slot, slot).items()}
        for document in range(int(sample["documents"].max()) + 1):
            own = sample["documents"] == document
            learned = sample["trained"][own]
            tokens = sample["tokens"][own].long()
            logs = plain(model, tokens, learned)
            whole = log_softmax(model(tokens[None, :-1])[0], -1)[learned[1:]].detach()
            spread = -(whole.exp() * whole).sum(1)
            then, advantages = (sample[name][own][learned].double() for name in ("old_logprobs", "advantages"))
            apart = sample["ref_logprobs"][own][learned].double() if steered else then
            for log, old, other, advantage, entropy in zip(logs, then, apart, advantages, spread, strict=True):
                ratio = (log - old).exp()
                inside = 0.8 <= ratio <= high
                clipped += not inside
                bounded = ratio if inside else ratio.detach().clamp(0.8, high)
                divergence = (other - log).exp() - (other - log) - 1
                gains.append(min(ratio * advantage, bounded * advantage) - 0.3 * steered * divergence)
                beyond = bool((ratio > high and advantage > 0) or (ratio < 0.8 and advantage < 0))
                kl = ratio - (log - old) - 1
                numbers = (ratio, (log - old).abs(), kl, beyond, entropy, divergence)
                columns += torch.tensor([torch.as_tensor(number).item() for number in numbers])
    assert objective.count(batch.tensors) == len(gains) and 0 < clipped < len(gains) and 0 < columns[3] < len(gains)
    agrees(objective, model, job, batch, -torch.stack(gains).sum(), columns if steered else columns[:5])


def agrees(objective, model, job, batch, expected, columns):
    """Check that the objective's loss of a packed batch, its gradients and its columns are those of the formula in
    float64.
    """
    gradients = torch.autograd.grad(expected, [*model.parameters()])
    model.float()
    if job.loss.name == "linear_cross_entropy":
        loss_head.convert(model, job.loss)
    first, others = objective.inputs(batch.tensors)
    loss, *sums = objective.loss(model(first, **others), batch.tensors)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert [total.item() for total in sums] == pytest.approx([float(total) for total in columns], rel=1e-5)
    for ours, theirs in zip(torch.autograd.grad(loss, [*model.parameters()]), gradients, strict=True):
        assert (ours - theirs).norm() <= 1e-4 * theirs.norm()


def test_losses_of_tokens_hold_no_logits_and_are_the_plain_ones():
    hidden, weight = torch.randn(3, 33, 48, requires_grad=True), torch.randn(1031, 48, requires_grad=True)
    labels, weights = torch.randint(1031, (3, 33)), torch.randn(3, 33)
    labels[torch.rand(3, 33) < 0.3] = IGNORED
    plain = torch.nn.functional.cross_entropy(
        (hidden @ weight.T).flatten(0, 1), labels.flatten(), reduction="none"
    ).view(3, 33)
    theirs = torch.autograd.grad((plain * weights).sum(), (hidden, weight))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor.numel()) or tensor, lambda tensor: tensor
    ):
        ours = loss_head.linear_cross_entropy(hidden, weight, labels.unsqueeze(-1), chunk=10)
    torch.testing.assert_close(ours, plain)
    assert max(saved) == weight.numel()
    for one, other in zip(torch.autograd.grad((ours * weights).sum(), (hidden, weight)), theirs, strict=True):
        assert (one - other).norm() <= 2e-6 * other.norm()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["parallelism=cp", "parallelism.cp_rotate=ulysses", "gpus=2"],
            "parallelism.cp=2: objective=dpo sums over whole documents; nearest legal: 1",
        ),
        (
            ["data.document_mask=false"],
            "data.document_mask=false: objective=dpo compares documents; nearest legal: true",
        ),
        (
            ["model=qwen3_moe_debug", "model.sequence_balance=0.01"],
            "model.sequence_balance=0.01: it is scaled like a token's loss, and objective=dpo has none; nearest legal: 0",
        ),
        (["objective.clip=0.3"], "objective.clip=0.3: objective.name=dpo does not read it; policy would"),
        (
            ["objective.name=policy", "objective.beta=0.2"],
            "objective.beta=0.2: objective.name=policy does not read it; dpo would",
        ),
    ],
)
def test_what_cannot_hold_is_one_line(pairs, words, line):
    with pytest.raises(ConfigError) as error:
        compose_job("debug=tiny", *base("preference", pairs), *words)
    assert str(error.value) == line


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"chosen": "a"}, "no pair in it: 'chosen', 'rejected' and 'prompt' must be texts or lists of messages"),
        (
            {"prompt": "q", "chosen": "a", "rejected": [{"role": "user", "content": "b"}]},
            "the last message of 'rejected' is not the assistant's",
        ),
        (
            {"prompt": "q", "chosen": "a", "rejected": "b"},
            "'ref_chosen_logps' is None, not a number: `titan data score-pairs` adds the reference's log-probabilities",
        ),
    ],
)
def test_a_row_that_is_no_pair_is_one_line(tmp_path, row, reason):
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError) as error:
        compose_job("debug=tiny", *base("preference", file))
    assert str(error.value) == f"data.path={file}: {file}:1: {reason}; data.max_bad_rows=0"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"tokens": [1, 5000]}, "'tokens' is not a list of ids below model.vocab_size=4096"),
        (
            {"tokens": [1, 2], "old_logprobs": [-1.0, -2.0]},
            "'old_logprobs' must be a list of numbers, one for each sampled token, and shorter than all 2",
        ),
        (
            {"tokens": [1, 2, 3], "old_logprobs": [-1.0, -2.0], "advantages": [1.0]},
            "'advantages' is neither a number nor a list of 2, one for each of 'old_logprobs'",
        ),
    ],
)
def test_a_row_that_is_no_rollout_is_one_line(tmp_path, row, reason):
    file = tmp_path / "rollouts.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError) as error:
        data.build(compose_job("debug=tiny", *base("rollouts", file)), 0, 1).next()
    assert str(error.value) == f"data.path={file}: {file}:1: {reason}; data.max_bad_rows=0"


def test_a_reference_scores_its_own_pairs_and_training_prefers(tiny, run_job, tmp_path, capsys):
    """With pairs scored by the model itself, the first loss is log 2, and a few steps reduce it far."""
    words = ("data.seq_len=192", "model.vocab_size=4096", "data.local_batch=4", "data.global_batch=4")
    reference = run_job(tiny("data=embedded_chat", "validation=off", "steps=1", "optimizer.lr=0", *words))
    plain, scored = tmp_path / "plain.jsonl", tmp_path / "scored.jsonl"
    rows = [{"prompt": row[:-1], "chosen": row[-1:], "rejected": "No."} for row in conversations()[:24]]
    plain.write_text("".join(json.dumps(row) + "\n" for row in (*rows[:5], {"prompt": "no answer"}, *rows[5:])))
    assert cli.main(["data", "score-pairs", str(reference), str(plain), "--out", str(scored)]) == 2
    assert f"{plain}:6: " in (printed := capsys.readouterr().err) and printed.endswith("--max-bad-rows=0\n")
    assert (
        cli.main(["data", "score-pairs", str(reference), str(plain), "--out", str(scored), "--max-bad-rows", "1"]) == 0
    )
    printed = capsys.readouterr()
    assert printed.out == f"{scored}: 24 pairs; 1 row left out\n" and f"left out: {plain}:6: " in printed.err
    trained = run_job(
        tiny(
            "data=preference",
            f"data.path={scored}",
            f"checkpoint.initial_load_path={reference}",
            "steps=12",
            "optimizer.lr=5e-3",
            "lr_scheduler.warmup_steps=1",
            *words,
        )
    )
    losses = run_job.losses(trained)
    assert losses[1] == pytest.approx(math.log(2), abs=1e-5) and losses[12] < 0.35
    assert cli.main(["checkpoint", "export", str(trained), str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf/chat_template.jinja").exists() and capsys.readouterr()
    assert cli.main(["data", "score-pairs", str(reference), str(plain), "--out", str(scored)]) == 2
    assert capsys.readouterr().err == f"--out={scored}: exists already\n"


def test_a_sparse_reference_is_read_with_the_biases_of_its_routers(tiny, run_job, tmp_path):
    """A bias is a buffer. Without it, the reference would choose other experts than the model that is trained."""
    words = (
        "model=deepseek_v3_debug",
        "model.n_kv_heads=4",
        "model.n_heads=4",
        "data.seq_len=192",
        "model.vocab_size=4096",
        "data.local_batch=4",
    )
    words = (*words, "model.router_bias_update_rate=0.05", "parallelism=single", "gpus=1", "validation=off")
    reference = run_job(tiny("data=embedded_chat", "steps=8", *words))
    plain, scored = tmp_path / "plain.jsonl", tmp_path / "scored.jsonl"
    rows = [{"prompt": row[:-1], "chosen": row[-1:], "rejected": "No."} for row in conversations()[:8]]
    plain.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["data", "score-pairs", str(reference), str(plain), "--out", str(scored)]) == 0
    load = f"checkpoint.initial_load_path={reference}"
    trained = run_job(tiny("data=preference", f"data.path={scored}", load, "steps=1", *words))
    assert run_job.losses(trained)[1] == pytest.approx(math.log(2), abs=1e-4)


def test_likelihoods_have_the_shapes_of_real_batches(pairs, rollouts):
    for job in (
        compose_job("debug=tiny", *base("preference", pairs)),
        compose_job("debug=tiny", *base("rollouts", rollouts)),
    ):
        objective, real = build_objective(job), data.build(job, 0, 1).next()
        assert isinstance(objective, Likelihood)
        example = objective.example(job.data.global_batch)
        shapes = [
            {
                name: (tensor.shape[: 1 if name == "ends" else None], tensor.dtype)
                for name, tensor in batch.tensors.items()
            }
            for batch in (real, example)
        ]
        assert shapes[0] == shapes[1]


QUESTION, SYSTEM = {"role": "user", "content": "Name a colour."}, {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("prompt", "before"),
    [
        ("Name a colour.", [QUESTION]),  # as in ultrafeedback_binarized
        ([QUESTION], [QUESTION]),
        ([SYSTEM, QUESTION], [QUESTION]),
        ("Name a colour.", [SYSTEM, QUESTION]),
        (None, [QUESTION]),
        ([QUESTION], []),
    ],
)
def test_a_question_that_stands_in_prompt_and_answers_is_asked_once(prompt, before):
    row = {
        "prompt": prompt,
        **{name: [*before, {"role": "assistant", "content": name}] for name in ("chosen", "rejected")},
    }
    system = [SYSTEM] if SYSTEM in before or (isinstance(prompt, list) and SYSTEM in prompt) else []
    for side, name in zip(pair_of(row), ("chosen", "rejected"), strict=True):
        assert side.messages == [*system, QUESTION, {"role": "assistant", "content": name}]


def test_an_answer_that_begins_with_another_question_is_refused():
    other = [{"role": "user", "content": "Name a fruit."}, {"role": "assistant", "content": "a"}]
    with pytest.raises(ValueError, match="not the one of 'prompt'"):
        pair_of({"prompt": "Name a colour.", "chosen": other, "rejected": other})
