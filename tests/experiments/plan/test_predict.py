"""Test predictions of our own jobs: their terms, the changes that they suggest, and how they vary with the job."""

import math
import random
from dataclasses import replace

import pytest

from titan_hydra.core.job.adapter import adapter_parameters
from titan_hydra.core.job.config.family import FAMILIES, family_of
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.rules.checks import LAYOUT, RANKS, RECIPE, VALUES, check
from titan_hydra.core.job.rules.memory import of_a_rank
from titan_hydra.experiments.compose.compose import compose_unchecked
from titan_hydra.experiments.plan import links, memory, predict, search, time
from titan_hydra.experiments.plan.factors import FITTED, Pair
from titan_hydra.experiments.plan.shape import NotPredictable, shape_of

BASE = (
    "model=llama3_8b",
    "data=synthetic",
    "data.seq_len=8192",
    "data.local_batch=2",
    "hardware=h100",
    "cluster=slurm",
    "gpus=8",
)


def job_of(*overrides: str):
    return freeze(compose_unchecked(*BASE, *overrides))


def terms(job) -> dict[str, float]:
    return {term.name: term.bytes / memory.GIB for term in memory.peak(job).terms}


def test_states_are_sixteen_bytes_for_each_parameter_over_the_shards():
    job = job_of()
    states = sum(terms(job)[name] for name in ("weights", "gradients", "optimizer"))
    assert states == pytest.approx(16 * 8_030_261_248 / 8 / 2**30, rel=1e-4)
    sgd = terms(job_of("optimizer=sgd"))
    assert "optimizer" not in sgd and sgd["weights"] == terms(job)["weights"]


def test_adapters_leave_two_bytes_for_each_parameter_of_the_model():
    job, split = job_of("adapter=lora"), job_of("adapter=lora", "parallelism.dp_shard=2", "parallelism.tp=4")
    adapters = adapter_parameters(job)
    assert adapters == 32 * 16 * sum(
        one + other for one, other in [(4096, 4096)] * 2 + [(4096, 1024)] * 2 + [(4096, 14336)] * 3
    )
    states = sum(terms(job)[name] for name in ("weights", "gradients", "optimizer"))
    assert states == pytest.approx((2 * 8_030_261_248 + 16 * adapters) / 8 / 2**30, rel=1e-4)
    assert terms(job)["gradients"] < terms(split)["gradients"] < 4 * terms(job)["gradients"], (
        "one of two matrices is whole on every rank"
    )


DRAWN = {  # what a draw of the test below chooses from, beside the model
    "ac": ("full", "lean", "layer"),
    "optimizer": ("adamw", "muon", "sgd"),
    "loss": ("cross_entropy", "linear_cross_entropy"),
    "precision": ("bf16", "fp32", "bf16_full"),
    "adapter": ("none", "none", "none", "lora"),
    "data.local_batch": (2, 8, 16),
    "data.seq_len": (2048, 8192),
    "parallelism.dp_replicate": (1, 1, 4),
    "parallelism.dp_shard": (1, 1, 1, 8),
    "parallelism.tp": (1, 1, 1, 4),
    "parallelism.cp": (1, 1, 1, 2),
    "parallelism.pp": (1, 1, 1, 2),
    "parallelism.sequence_parallel": ("true", "false"),
}


@pytest.mark.parametrize("model", ["llama3_1b", "qwen3_0_6b", "llama3_8b", "qwen3_30b_a3b"])
def test_what_a_job_takes_at_least_is_less_than_its_predicted_memory(model):
    dice, legal = random.Random(model), 0
    for _ in range(20):
        drawn = {key: dice.choice(values) for key, values in DRAWN.items()}
        ranks = math.prod(
            value
            for key, value in drawn.items()
            if key.startswith("parallelism.") and value != "true" and value != "false"
        )
        batch = drawn["data.local_batch"] * drawn["parallelism.dp_replicate"] * drawn["parallelism.dp_shard"]
        lines = [f"{key}={value}" for key, value in drawn.items()]
        more = (f"model={model}", f"gpus={ranks}", f"data.global_batch={batch * dice.choice((1, 1, 2))}")
        job = job_of(*more, *lines)
        if check(job, (RANKS, VALUES, LAYOUT, RECIPE)):
            continue
        legal += 1
        needs = of_a_rank(job)
        del needs["data.global_batch"]  # is on the host
        assert sum(needs.values()) <= memory.peak(job).live, " ".join((*more, *lines))
    assert legal > 4


def test_gradients_take_the_memory_of_freed_activations_unless_fsdp_keeps_them_apart():
    one, sharded = job_of("gpus=1", "parallelism=single", "model.n_layers=12"), job_of("model.n_layers=12")
    assert "gradients" not in terms(one) and memory.peak(one).gib < 1.03 * memory.peak(one).allocated_gib
    assert terms(sharded)["gradients"] == pytest.approx(shape_of(sharded).parameters(0) * 4 / 8 / memory.GIB)


def test_a_scale_for_each_block_takes_one_pass_for_a_cast():
    """mxfp8 reads each element once for each direction of a matmul; with a scale for each row the maximum comes first."""
    rows, blocks = (
        time.speed(job_of("hardware=b200", f"precision={name}", "compile=block"))
        for name in ("float8_rowwise", "mxfp8")
    )
    assert 0 < blocks.parts["Float8 casts"] < 0.3 * rows.parts["Float8 casts"]
    assert blocks.parts["matmuls"] == rows.parts["matmuls"]


def test_kernels_of_attention_are_slower_for_short_sequences():
    """The rates at 512 and 8,192 tokens are those of FlashAttention-2's kernel in FlashAttention-3's paper."""
    shapes = [shape_of(job_of("model.attention=flash", f"data.seq_len={length}")) for length in (512, 8192)]
    short, long = (time._attention_rate(shape, FITTED) / 1e12 for shape in shapes)
    assert short == pytest.approx(145, rel=0.02) and long == pytest.approx(298, rel=0.05)


def test_fused_kernels_cast_and_normalize_in_less_time_and_keep_less():
    jobs = [
        job_of("precision=float8_rowwise", "compile=block", f"precision.kernels={name}")
        for name in ("torchao", "fused")
    ]
    (_, plain), (_, fused) = ((job, time.speed(job).parts) for job in jobs)
    assert fused["Float8 casts"] < 0.5 * plain["Float8 casts"] and fused["element-wise"] < plain["element-wise"]
    assert terms(jobs[1])[memory.SAVED] < 0.85 * terms(jobs[0])[memory.SAVED]


EXPERTS = ("model=deepseek_v3", "data.seq_len=4096", "data.local_batch=1", "gpus=256", "parallelism.ep=64")


@pytest.mark.parametrize("parts", [2, 4, 8, 32, 64])
@pytest.mark.parametrize("model", ["deepseek_v3", "qwen3_30b_a3b"])
def test_a_token_reaches_as_many_ranks_as_random_choices_do(model, parts):
    experts, dice = shape_of(job_of(*EXPERTS, f"model={model}")).experts, random.Random(1)
    of_group, reached = experts.number // experts.groups, 0
    for _ in range(4000):
        groups = dice.sample(range(experts.groups), experts.chosen_groups)
        usable = [group * of_group + place for group in groups for place in range(of_group)]
        reached += len({expert * parts // experts.number for expert in dice.sample(usable, experts.chosen_experts)})
    assert experts.reached(parts) == pytest.approx(reached / 4000, rel=0.08)


def test_experts_in_turn_are_on_consecutive_ranks():
    experts = shape_of(job_of(*EXPERTS, "debug.balance_experts=true")).experts
    assert experts.reached(64) == 2 and experts.reached(8) == 1  # 8 experts in a row, with 4 on a rank and 32 on a node


def test_a_library_that_sends_a_token_once_to_a_node_exchanges_faster():
    torch_, library = (
        predict.predict(job_of(*EXPERTS, f"hardware.dispatcher={name}")) for name in ("all_to_all", "deep_ep")
    )
    within = predict.predict(job_of(*EXPERTS, "parallelism.ep=8"))
    name = "EP communication"
    assert within.speed.parts[name] < torch_.speed.parts[name] > 1.5 * library.speed.parts[name]
    assert predict.as_json(library)["dispatcher"] == "deep_ep"
    assert any("DeepEP" in line for line in predict.notes(library.job))
    assert torch_.band != predict.predict(job_of()).band


@pytest.mark.parametrize(("ep", "shares"), [(64, True), (8, False)])
def test_messages_of_fsdp_wait_while_experts_exchange_rows_on_the_same_link(ep, shares):
    """The shards are on several nodes. If a block did nothing but exchange rows, the exchange would leave FSDP no time of
    the NIC between nodes, but all of it inside a node, where rows use NVLink.
    """
    shape = shape_of(job_of(*EXPERTS, f"parallelism.ep={ep}", "hardware.dispatcher=deep_ep"))
    exchange = links.exchange_passes(shape, FITTED)
    delay, alone = (links.fsdp_delay(shape, FITTED, block) for block in (exchange, Pair(0.0, 0.0)))
    assert delay == pytest.approx(alone) if shares else delay < alone


def test_long_sequences_reach_a_higher_rate_of_attention():
    def rate(length: int) -> float:
        seconds = time.speed(job_of(f"data.seq_len={length}", "data.local_batch=1")).parts["attention"]
        return length**2 / seconds

    assert rate(8192) < rate(32768) < 1.3 * rate(8192)


def test_attention_of_a_family_that_nobody_described_has_no_band(monkeypatch):
    job, llama = job_of("compile=block"), family_of(job_of().model)
    known = predict.predict(job)
    band = known.band
    monkeypatch.setitem(FAMILIES, "llama3", replace(llama, attended=None))
    unknown = predict.predict(job)
    assert band and unknown.band is None and unknown.speed == known.speed
    assert "+- unknown" in predict.line(unknown)[2] and any("attended" in line for line in predict.notes(job))
    assert predict.as_json(unknown)["tokens_per_second_band"] is None
    monkeypatch.setitem(FAMILIES, "llama3", replace(llama, attended=lambda config, seq_len: 512))
    windowed = predict.predict(job)
    assert windowed.speed.parts["attention"] == pytest.approx(known.speed.parts["attention"] / 8)
    assert windowed.band == band and not predict.notes(job)


def test_each_term_is_counted_or_fitted_and_the_fullest_rank_is_named():
    job = job_of("parallelism=pp", "parallelism.pp=4", "parallelism.dp_shard=2", "data.local_batch=8", "ac=full")
    peak = memory.peak(job)
    assert {term.tag for term in peak.terms} == {"counted", "fitted"}
    assert peak.rank == peak.pipeline_rank * 2 and peak.allocated_gib < peak.gib
    assert {"early receives", "unsharded gradients"} <= {term.name for term in peak.terms}


@pytest.mark.parametrize(
    ("more", "less"),
    [
        ((), ("ac=lean",)),
        (("ac=lean",), ("ac=op",)),
        (("ac=op",), ("ac=full",)),
        ((), ("loss=linear_cross_entropy",)),
        ((), ("compile=block",)),
        ((), ("parallelism.dp_shard=4", "parallelism.tp=2")),
        (("data.local_batch=4",), ()),
        (("compile=block",), ("compile=block", "precision=float8_tensorwise")),
        (("gpus=8",), ("gpus=16",)),
    ],
)
def test_memory_falls_where_it_should(more, less):
    assert memory.peak(job_of(*less)).gib < memory.peak(job_of(*more)).gib


@pytest.mark.parametrize(
    ("slow", "fast"),
    [
        ((), ("compile=block",)),
        (("compile=block",), ("compile=block", "precision=float8_tensorwise")),
        (("ac=full",), ("ac=op",)),
        (("hardware=h100_500w",), ("hardware=h100",)),
        (("hardware=a100",), ()),
        (("model.attention=flash",), ()),
        (("parallelism.dp_shard=1", "parallelism.tp=8"), ()),
        (("parallelism.cp=2", "parallelism.dp_shard=4"), ()),
    ],
)
def test_speed_rises_where_it_should(slow, fast):
    assert (
        predict.predict(job_of(*slow)).speed.tokens_per_second < predict.predict(job_of(*fast)).speed.tokens_per_second
    )


def test_the_quick_estimate_of_a_pipeline_is_near_the_played_one():
    for schedule in ("1f1b", "interleaved_1f1b", "gpipe", "zbv"):
        job = job_of("parallelism=pp", "parallelism.pp=8", f"pp_schedule={schedule}", "data.local_batch=16")
        exact, quick = (predict.predict(job, exact=exact).speed.step_seconds for exact in (True, False))
        assert quick == pytest.approx(exact, rel=0.15), schedule


def test_a_process_that_starts_passes_slowly_is_slower_with_every_pass():
    """A rank with one stage makes two passes for a microbatch; a rank with two stages and split backwards makes six."""

    def seconds(*overrides: str) -> float:
        job = job_of(
            "parallelism=pp", "parallelism.pp=8", "data.local_batch=16", "pp_schedule.microbatches=16", *overrides
        )
        return predict.predict(job).speed.step_seconds

    def added(*schedule: str) -> float:
        return seconds(*schedule, "hardware.passes_per_second=100") - seconds(*schedule)

    plain, halves = added("pp_schedule=1f1b"), added("pp_schedule=interleaved_zb")
    assert 2 * 16 / 100 < plain < 2 * (16 + 8) / 100 and 6 * 16 / 100 < halves < 6 * (16 + 8) / 100


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("ac=none",), "ac=none: "),
        (("data.seq_len=49152", "data.local_batch=1", "ac=full"), "loss=cross_entropy: "),
        (
            ("model=llama3_70b", "ac=full", "loss=linear_cross_entropy", "data.local_batch=1"),
            "parallelism.dp_shard=8: ",
        ),
    ],
)
def test_the_nearest_fix_fits(overrides, expected):
    job = job_of(*overrides)
    fault = str(predict.objection(predict.predict(job)))
    assert fault.startswith(expected) and "h100 has 79.1; nearest legal: " in fault and "\n" not in fault
    key, value = expected.partition("=")[0], fault.partition("nearest legal: ")[2].split(" (")[0]
    other = freeze(
        compose_unchecked(
            *BASE, *overrides, *f"{key}={value}".split(" "), *(["data.global_batch=64"] if "gpus" in value else [])
        )
    )
    assert not check(other) and predict.predict(other).fits in ("yes", "tight")


def test_a_family_without_formulas_is_refused(monkeypatch):
    from dataclasses import replace

    from titan_hydra.core.job.config.family import FAMILIES

    job = job_of()
    for part in ("parameters", "flops"):
        monkeypatch.setitem(FAMILIES, "llama3", replace(FAMILIES["llama3"], **{part: None}))
        with pytest.raises(NotPredictable, match=f"model.family=llama3: has no formula for its {part}"):
            shape_of(job)
        assert predict.of_launch(job) is None
        monkeypatch.undo()


def flux(*overrides: str):
    base = (
        "model=flux_dev",
        "objective=diffusion",
        "hardware=h100",
        "cluster=slurm",
        "gpus=8",
        "compile=block",
        "data.local_batch=4",
    )
    return freeze(compose_unchecked(*base, *overrides))


def test_both_kinds_of_blocks_of_flux_count():
    job = flux("data=synthetic_images")
    states = sum(terms(job)[name] for name in ("weights", "gradients", "optimizer"))
    assert states == pytest.approx(16 * 11_901_408_320 / 8 / 2**30, rel=1e-3)  # parameters: tests/recipes/flux
    config, seq_len, family = job.model, job.data.seq_len, family_of(job.model)
    kinds = (*shape_of(job).before, shape_of(job))
    weights = sum(one.layers[0] * sum(linear.size(1) for linear in one.linears) for one in kinds)  # that a token meets
    attention = 12 * config.n_layers * config.dim * seq_len
    assert 6 * weights == pytest.approx(family.flops(config, seq_len, family.parameters(config)) - attention, rel=0.01)
    assert terms(job)["saved activations"] > terms(flux("data=synthetic_images", "ac=full"))["saved activations"] * 10


def test_a_tower_takes_time_on_the_first_stage_and_is_not_split_over_tensor_ranks():
    base = ("model=llama3_8b_vision", "objective=image_text", "data=synthetic_image_text")
    whole, split = job_of(*base), job_of(*base, "parallelism.dp_shard=4", "parallelism.tp=2")
    (tower,), (same,) = shape_of(whole).before, shape_of(split).before
    assert tower.block == same.block and tower.tokens == same.tokens == 2 * whole.objective.patches
    more = job_of(*base, "objective.patches=4096")
    assert time.speed(more).parts["attention"] > 1.1 * time.speed(whole).parts["attention"]
    assert memory.peak(more).gib > memory.peak(whole).gib + 8  # masks of all pairs of patches


def test_what_is_not_counted_is_said():
    (line,) = predict.not_counted(flux("data=image_files"))
    assert line.startswith("not counted: the frozen text encoders") and "data=image_files" in line
    assert predict.not_counted(flux("data=synthetic_images")) == []


def test_the_rows_of_a_search_are_legal_and_hold_what_they_say():
    base = compose_unchecked(
        "model=llama3_8b",
        "data=synthetic",
        "data.seq_len=8192",
        "data.global_batch=16",
        "hardware=h100",
        "compile=block",
    )
    rows, points = search.search(base, 8)
    assert 1 < len(rows) <= search.ROWS < points and rows[0].front
    rates = [row.prediction.speed.tokens_per_second for row in rows]
    assert rates == sorted(rates, reverse=True) and len({row.key for row in rows}) == len(rows)
    # FSDP alone, the usual layout for 8B on one node
    assert rows[0].overrides.startswith("gpus=8 parallelism.dp_shard=8 ac=")
    for row in rows:
        again = freeze(
            compose_unchecked(
                "model=llama3_8b",
                "data=synthetic",
                "data.seq_len=8192",
                "hardware=h100",
                "compile=block",
                "cluster=slurm",
                *row.overrides.split(" "),
            )
        )
        assert not check(again), row.overrides
        found = predict.predict(again)
        assert (found.peak.gib, found.speed.tokens_per_second) == pytest.approx(
            (row.prediction.peak.gib, row.prediction.speed.tokens_per_second)
        )


def test_a_search_finds_the_best_number_of_stages():
    """Stages may have different numbers of blocks, which the quick estimate neglects."""
    base = job_of("model.max_seq_len=2048", "data.seq_len=2048", "compile=block", "data.global_batch=64")
    rows, _ = search.search(base, 8)
    found_ones = [row.prediction for row in rows if row.prediction.job.pp_schedule.stages_per_rank > 1]
    assert found_ones
    for found in found_ones:
        for number in search.CHUNKS:
            other = predict.changed(found.job, pp_schedule={"stages_per_rank": number})
            if not check(other) and (answer := predict.predict(other)).fits == found.fits:
                assert answer.speed.tokens_per_second < 1.001 * found.speed.tokens_per_second, (found.job, number)


@pytest.mark.long
def test_published_layouts_of_models_with_experts_are_found():
    """Degrees (tp, pp, ep) of published layouts are among the first five (docs/plan.md names the tables)."""
    common = ("data=synthetic", "data.seq_len=4096", "hardware=h100", "compile=block")
    for model, gpus, batch, dispatcher, published in (
        ("deepseek_v3", 1024, 8192, "all_to_all", (1, 16, 8)),
        ("deepseek_v3", 256, 2048, "deep_ep", (1, 1, 64)),
        ("qwen3_30b_a3b", 8, 512, "all_to_all", (1, 1, 1)),
        ("qwen3_30b_a3b", 8, 512, "deep_ep", (1, 1, 8)),
        ("qwen3_30b_a3b", 16, 1024, "deep_ep", (1, 2, 8)),
    ):
        line = (f"model={model}", f"data.global_batch={batch}", f"hardware.dispatcher={dispatcher}", *common)
        rows, _ = search.search(compose_unchecked(*line), gpus)
        layouts = [row.prediction.job.parallelism for row in rows[:5]]
        assert published in [(layout.tp, layout.pp, layout.ep) for layout in layouts], (model, gpus)


def test_the_paper_and_megatron_run_what_is_found():
    common = ("data=synthetic", "data.seq_len=8192", "hardware=h100", "compile=block", "precision=float8_tensorwise")
    for model, gpus, batch, degrees in (
        ("llama3_70b", 64, 128, {"tp": 4, "pp": 8}),
        ("llama3_405b", 512, 256, {"tp": 8, "pp": 16}),
    ):
        rows, _ = search.search(compose_unchecked(f"model={model}", f"data.global_batch={batch}", *common), gpus)
        layouts = [vars(row.prediction.job.parallelism) for row in rows]
        assert any(degrees.items() <= layout.items() for layout in layouts), model


def test_presets_say_where_each_constant_comes_from():
    from titan_hydra.core.job.config.files import CONF

    for file in (CONF / "hardware").glob("*.yaml"):
        first, *lines = file.read_text().splitlines()
        assert first.startswith("# ")
        for line in lines:
            assert "  # " in line or line.split(":")[0] in ("name", "measured", "gpus_per_node"), (file, line)


def test_replicas_sum_their_gradients_once_in_a_step():
    """On a slow network the sum over replicas takes nearly all the time of FSDP's messages, and four local batches do
    not repeat it.
    """
    line = "model=llama3_8b data=synthetic data.seq_len=2048 data.local_batch=1 hardware=h100 hardware.nic_gbs=0.1 comm=fake gpus=16"
    layout = "parallelism.dp_replicate=2 parallelism.dp_shard=8"
    costs = [
        time.speed(freeze(compose_unchecked(*line.split(), *layout.split(), f"data.global_batch={samples}"))).parts[
            "FSDP"
        ]
        for samples in (16, 64)
    ]
    assert costs[1] < 1.5 * costs[0]
