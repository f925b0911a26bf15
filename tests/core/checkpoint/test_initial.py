"""Start a run from another run's whole checkpoint or chosen parts of it, from a Hugging Face folder, or from a seed;
and write an export at the run's end.
"""

import shutil

import pytest
import torch

from titan_hydra import cli
from titan_hydra.core.checkpoint.convert import Reader
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.rules.checks import check, warnings
from titan_hydra.core.job.run import checkpoints
from titan_hydra.experiments.compose.compose import compose_job, compose_unchecked

BASE = (
    "debug=tiny",
    "precision=fp32",
    "metrics.log_every=1",
    "data.global_batch=8",
    "data.local_batch=2",
    "lr_scheduler.warmup_steps=2",
)
TWO = (*BASE, "parallelism=fsdp", "gpus=2")


def weights(step):
    """Return the tensors `model.*` of a checkpoint, unsharded."""
    reader = Reader(step)
    return {
        name: reader.tensor(name.removeprefix("model."), entry.size, torch.float32)
        for name, entry in reader.metadata.state_dict_metadata.items()
        if name.startswith("model.")
    }


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    return tmp_path_factory.mktemp("six") / "run"


@pytest.fixture
def whole(six, run_job):
    """Return a run of six steps with checkpoints of steps 3 and 6, and an export."""
    if not six.exists():
        run_job(compose_job(*TWO, "steps=6", "checkpoint.interval=3", "checkpoint.export_dtype=bfloat16"), six)
    return six


def test_a_fork_that_takes_everything_goes_on_the_same(whole, run_job):
    """Step, data and optimizer state are loaded from another run; the new run has one rank instead of two."""
    fork = run_job(
        compose_job(
            *BASE,
            "steps=6",
            "checkpoint.exclude_from_loading=[]",
            f"checkpoint.initial_load_path={whole}/checkpoints/step-00000003",
        )
    )
    losses = run_job.losses(fork)
    assert list(losses) == [4, 5, 6]
    assert losses == pytest.approx({step: loss for step, loss in run_job.losses(whole).items() if step > 3}, rel=1e-5)


@pytest.mark.parametrize(
    ("left_out", "steps"), [("[optimizer]", [4, 5, 6]), ("[data]", [4, 5, 6]), ("[lr_scheduler]", [1, 2, 3, 4, 5, 6])]
)
def test_what_is_left_out_is_not_taken(whole, run_job, left_out, steps):
    fork = run_job(
        compose_job(
            *TWO,
            "steps=6",
            f"checkpoint.exclude_from_loading={left_out}",
            f"checkpoint.initial_load_path={whole}/checkpoints/step-00000003",
        )
    )
    losses, others = run_job.losses(fork), run_job.losses(whole)
    assert list(losses) == steps
    assert (losses[steps[0]] == others[4]) == (left_out != "[data]"), (
        "the first loss is that of the weights on the data"
    )
    assert losses[6] != others[6]


def test_a_damaged_start_is_refused(whole, run_job, tmp_path):
    step = tmp_path / "step-00000003"
    shutil.copytree(whole / "checkpoints/step-00000003", step)
    with (step / "__0_0.distcp").open("r+b") as file:
        file.seek(5000)
        file.write(b"x")
    run = run_job(compose_job(*BASE, "steps=6", f"checkpoint.initial_load_path={step}"), tmp_path / "run", expect=1)
    assert "__0_0.distcp does not match its checksum" in (run / "attempts/1/error_0").read_text()


def test_an_export_is_the_last_weights_and_a_start(whole, run_job, tmp_path):
    export, last = weights(whole / "export"), weights(checkpoints.newest(whole / "checkpoints"))
    assert same(export, {name: tensor.bfloat16().float() for name, tensor in last.items()})
    assert Reader(whole / "export").metadata.state_dict_metadata["model.norm.weight"].properties.dtype == torch.bfloat16
    assert checkpoints.damage(whole / "export") == []
    assert cli.main(["checkpoint", "export", str(whole / "export"), str(tmp_path / "hf")]) == 0
    job = compose_job(*BASE, "steps=1", "optimizer.lr=0", f"checkpoint.initial_load_path={whole}/export")
    assert check(job) == []
    assert same(weights(checkpoints.newest(run_job(job) / "checkpoints")), export)
    job.checkpoint.exclude_from_loading = ["data"]
    assert [fault.key for fault in check(job)] == ["checkpoint.exclude_from_loading"]


@pytest.mark.parametrize(
    "layout",
    [
        ("parallelism=single",),
        ("parallelism=fsdp_tp", "parallelism.tp=2", "gpus=4"),
        ("parallelism=pp",),
        ("parallelism=fsdp", "parallelism.backend=simple_fsdp", "gpus=2"),
        ("precision=bf16",),
    ],
)
def test_a_hugging_face_folder_is_a_start_on_any_layout(whole, run_job, tmp_path, layout):
    source = tmp_path / "hf"
    assert (
        cli.main(["checkpoint", "export", str(whole), str(source), "--dtype", "float32", "--max-shard-gb", "0.0005"])
        == 0
    )
    assert len(list(source.glob("*.safetensors"))) > 1
    job = compose_job(*BASE, *layout, "steps=1", "optimizer.lr=0", f"checkpoint.initial_load_path={source}")
    assert check(job) == []
    assert same(
        weights(checkpoints.newest(run_job(job) / "checkpoints")), weights(checkpoints.newest(whole / "checkpoints"))
    )


SPARSE = {  # six experts over two ep ranks, each of which holds three. Two other ranks share these and shard them by width
    "qwen": ("model=qwen3_moe_debug", "model.dim=64", "model.n_layers=2", "model.n_experts=6", "model.expert_dim=32"),
    "deepseek": (
        "model=deepseek_v3_debug",
        "model.dim=64",
        "model.n_layers=2",
        "model.n_kv_heads=4",
        "model.n_experts=8",
        "model.expert_dim=32",
    ),
}


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    return tmp_path_factory.mktemp("sparse")


@pytest.mark.parametrize("family", SPARSE)
@pytest.mark.parametrize(
    "layout",
    [
        ("parallelism=single",),
        ("parallelism=fsdp", "parallelism.ep=2", "gpus=4"),
        ("parallelism=fsdp_tp", "parallelism.tp=2", "parallelism.ep=2", "gpus=4"),
        ("parallelism=pp", "gpus=2"),
    ],
    ids=["single", "ep 2", "tp 2, ep 2", "pp 2"],
)
def test_experts_of_a_hugging_face_folder_are_a_start_on_any_layout(sparse, run_job, family, layout):
    """The folder has no biases of routers, so they begin at zero."""
    run, source = sparse / family, sparse / f"{family} hf"
    if not run.exists():
        run_job(compose_job(*BASE, *SPARSE[family], "steps=2"), run)
        assert (
            cli.main(["checkpoint", "export", str(run), str(source), "--dtype", "float32", "--max-shard-gb", "0.0005"])
            == 0
        )
    job = compose_job(
        *BASE,
        *SPARSE[family],
        *layout,
        "steps=1",
        "optimizer.lr=0",
        "model.router_bias_update_rate=1e-12",
        f"checkpoint.initial_load_path={source}",
    )
    assert check(job) == []
    there, here = (
        weights(checkpoints.newest(run / "checkpoints")),
        weights(checkpoints.newest(run_job(job) / "checkpoints")),
    )
    biases = {name: here.pop(name) for name in list(here) if name.endswith("router.bias")}
    assert len(biases) == (2 if family == "qwen" else 1)
    for name, bias in biases.items():
        assert torch.allclose(bias, there.pop(name, torch.zeros(bias.shape)), rtol=0, atol=1e-11)
    assert same(here, there)


def test_a_hugging_face_folder_of_another_model_is_refused(whole, run_job, tmp_path):
    source = tmp_path / "hf"
    assert cli.main(["checkpoint", "export", str(whole), str(source)]) == 0
    for change, words in (
        ("model.rope_theta=1e4", "model.rope_theta is 10000.0 here and 500000.0 there"),
        ("model.n_layers=3", "model.n_layers is 3"),
    ):
        run = run_job(compose_job(*BASE, "steps=1", change, f"checkpoint.initial_load_path={source}"), expect=2)
        assert words in (run / "attempts/1/error_0").read_text()


@pytest.mark.parametrize(
    ("key", "fault"),
    [("n_heads=8", True), ("norm_eps=1e-3", True), ("rope_theta=1e4", False), ("rope_scaling.factor=2", False)],
)
def test_weights_of_a_run_belong_to_its_arithmetic(whole, key, fault):
    """Shapes do not tell: without a word, the job would compute another function with these weights."""
    start = ("debug=tiny", f"checkpoint.initial_load_path={whole}")
    job, plain = (freeze(compose_unchecked(*start, *more)) for more in ([f"model.{key}"], []))
    name = key.partition("=")[0].partition(".")[0]
    (found,) = [one for one in (check if fault else warnings)(job) if one.key == f"model.{name}"]
    assert "were trained with" in str(found)
    assert not [one for one in (*check(plain), *warnings(plain)) if one.key.startswith("model.")]
