"""Test `titan verify JOB`: what a proof is for, how a job is reduced, and that code with a fault cannot get one."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from titan_hydra import cli
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.ranks import DEGREES, world_size
from titan_hydra.core.job.rules.checks import check
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.code import versions
from titan_hydra.experiments.compose.compose import compose_cells, compose_job
from titan_hydra.experiments.runs import proofs
from titan_hydra.instruments.verify.jobs import COLUMNS
from titan_hydra.instruments.verify.reduce import job_pairs, reduced

ROOT = Path(__file__).parents[3]
TABLES = [f"paper_table{number}" for number in range(1, 7)]
TWO = ("debug=tiny", "precision=fp32", "gpus=2", "parallelism=fsdp")
CELLS = {  # overrides of a job: the degrees of its reduced forms
    ("parallelism=fsdp", "gpus=8"): [{"dp_shard": 4}],
    ("parallelism=hsdp", "gpus=6", "parallelism.dp_replicate=2", "parallelism.dp_shard=3"): [
        {"dp_replicate": 2, "dp_shard": 2}
    ],
    ("parallelism=fsdp_tp_pp", "gpus=16", "parallelism.tp=4"): [{"dp_shard": 2, "tp": 2, "pp": 2}],
    ("parallelism=single",): [{}],
}


def degrees(job):
    return {name: degree for name in DEGREES if (degree := getattr(job.parallelism, name)) > 1}


@pytest.mark.parametrize("overrides", CELLS)
def test_degrees_are_reduced_and_none_is_lost(overrides):
    small = reduced(compose_job(*overrides, "data=synthetic"), 4)
    assert [degrees(job) for job in small] == CELLS[overrides]


def test_every_cell_of_the_papers_tables_has_a_reduced_form():
    cells = compose_cells(["+sweeps=" + ",".join(TABLES)])
    assert len(cells) == 3 + 3 + 2 + 2 + 4 + 4
    for job, _, name in cells:
        small = reduced(job, 4)
        assert all(world_size(one) <= 8 for one in small)
        assert set().union(*map(degrees, small)) == set(degrees(job)), name
        kinds = [proof.case.name.rpartition(", ")[2] for one in small[:1] for proof in job_pairs(job, one, name)]
        assert kinds == ["float32", "bfloat16", *(["float8"] if job.precision.converter else [])]
        assert not [
            fault
            for one in small
            for proof in job_pairs(job, one, name)
            for run in (proof.job, proof.alone)
            for fault in check(run)
        ]
        assert len(small) == (4 if len(degrees(job)) == 4 else 1), name


@pytest.mark.parametrize(
    ("layout", "samples"),
    [(("parallelism=fsdp",), 2), (("parallelism=pp", "pp_schedule.microbatches=2"), 1), (("parallelism=cp",), None)],
)
def test_a_format_is_compared_with_one_process_that_has_the_same_microbatches(layout, samples):
    """A scale of a whole tensor follows from a microbatch's tokens. Under cp no process alone has a rank's tokens."""
    job = compose_job(
        "debug=tiny", "gpus=2", "data=synthetic", "data.local_batch=2", "precision=float8_tensorwise", *layout
    )
    small = reduced(job, 4)[0]
    pairs = {pair.case.name.rpartition(", ")[2]: pair for pair in job_pairs(job, small, "")}
    alone = pairs["float8"].alone.data
    assert pairs["float8"].case.microbatch == samples
    assert alone.local_batch == (samples or alone.global_batch)
    assert pairs["bfloat16"].case.microbatch is None


def test_what_has_no_reduced_form_is_refused_in_a_line():
    with pytest.raises(ConfigError, match=r"^fault_tolerance=diloco: .*nearest legal: off"):
        reduced(
            compose_job("fault_tolerance=diloco", "fault_tolerance.replicas=2", "parallelism=single", "data=synthetic"),
            4,
        )


def test_a_proof_is_for_a_layout_and_not_for_what_is_learned():
    first = proofs.layout_hash(compose_job(*TWO))
    for same in (
        "seed=3",
        "steps=9",
        "optimizer.lr=1e-3",
        "name=other",
        "paths.runs=elsewhere",
        "metrics.log_every=3",
        "cluster.max_parallel=1",
    ):
        assert proofs.layout_hash(compose_job(*TWO, same)) == first, same
    for other in (
        "parallelism=tp",
        "ac=full",
        "precision=bf16",
        "model.dim=128",
        "data.local_batch=1",
        "optimizer=muon",
        "data.seq_len=32",
    ):
        assert (
            proofs.layout_hash(
                compose_job(*[word for word in TWO if word.partition("=")[0] != other.partition("=")[0]], other)
            )
            != first
        ), other


def write_proof(job, **changed):
    """Write the proof of a layout that passed, without making it. Returns its folder."""
    folder = proofs.folder_of_proof(job)
    fields = {
        "passed": True,
        "layout": proofs.layout_hash(job),
        "code": proofs.digest_of_package(),
        "versions": versions(),
        **changed,
    }
    kinds = {"bool": True, "str": "", "str | None": None, "int": 0, "float": 0.0}
    empty = {
        field.name: kinds.get(field.type, [] if field.type.startswith("list") else {})
        for field in dataclasses.fields(proofs.Proof)
    }
    folder.mkdir(parents=True, exist_ok=True)
    layout.PROOF.write(folder, empty | fields)
    return folder


@pytest.mark.parametrize(
    "wrong",
    [{}, {"passed": False}, {"code": "other"}, {"layout": "other"}, {"versions": versions() | {"torch": "2.10.0"}}],
)
def test_only_a_proof_that_passed_of_this_layout_and_code_counts(tmp_path, wrong):
    job = compose_job(*TWO, f"paths.runs={tmp_path}")
    assert not proofs.proof_of(job)
    write_proof(job, **wrong)
    assert bool(proofs.proof_of(job)) == (not wrong)
    if not wrong:  # another build of the same release
        shutil.rmtree(tmp_path / "_proofs")
        write_proof(job, versions=versions() | {"torch": versions()["torch"].partition("+")[0] + "+cu128"})
        assert proofs.proof_of(job)


def test_a_cell_without_a_proof_is_refused_in_a_line(launcher):
    refused = launcher.run(*launcher.TINY, "launch.require_proof=true", "launch.mode=dry")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and not (launcher.folder / "runs").exists()
    assert refused.stderr.startswith("launch.require_proof=true: ") and "titan verify " in refused.stderr


def test_resume_asks_for_a_proof_too(launcher):
    line = (*launcher.TINY, "cluster=inline", "checkpoint=off")
    assert launcher.run(*line, "launch.require_proof=true").returncode == 2
    job = dataclasses.replace(compose_job(*line))
    job.paths.runs = str(launcher.folder / "runs")
    write_proof(job)
    launcher.sabotage_step_3(0, 'raise ValueError("unlucky rank")')
    assert launcher.run(*line, "launch.require_proof=true").returncode == 1  # it has a proof, so it ran
    launcher.env["PYTHONPATH"] = str(ROOT)  # this tree, and no sabotage
    shutil.rmtree(launcher.folder / "runs/_proofs")
    again = launcher.python("-m", "titan_hydra.cli", "resume")
    assert again.returncode == 2 and again.stderr.startswith("launch.require_proof=true: "), again.stderr
    write_proof(job)
    assert launcher.python("-m", "titan_hydra.cli", "resume").returncode == 0


def titan_verify(folder, *words, tree=ROOT):
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "titan_hydra.cli", "verify", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)


def test_two_ranks_get_a_proof(launcher):
    done = titan_verify(launcher.folder, *TWO, "hardware=cpu", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    (proof,) = json.loads(done.stdout)["proofs"]
    assert proof["passed"] and proof["data"]["source"] == "embedded" and proof["export"]["tensors"] > 10
    assert proof["resume"]["carried_on_from_step"] <= proof["resume"]["killed_at_step"] < proof["resume"]["steps"]
    assert (
        proof["prediction"]["memory_gib"] > 0
        and proof["versions"]["torch"]
        and proof["reduced"][0]["changes"]["data.name"] == ["embedded", "synthetic"]
    )
    (file,) = launcher.folder.glob("runs/_proofs/*/*")
    assert json.loads(file.read_text()) == {key: value for key, value in proof.items() if key != "folder"}
    run = launcher.run(*TWO, "hardware=cpu", "launch.require_proof=true")
    assert run.returncode == 0, run.stderr
    (result,) = launcher.folder.glob("runs/*/result.json")
    for words in ((*TWO, "hardware=cpu", "seed=7"), (result.parent.name,), ("--show", str(file))):  # nothing runs again
        again = titan_verify(launcher.folder, *words)
        assert again.returncode == 0 and again.stderr == "", again.stderr
        assert "yes  resume: killed at step" in again.stdout and "yes  dp_shard 2, float32: loss" in again.stdout
    assert json.loads(file.read_text())["written"] == proof["written"]


FSDP, TP, PP = ("parallelism=fsdp",), ("parallelism=tp",), ("parallelism=pp",)
EP = ("model=qwen3_moe_debug", "parallelism=fsdp", "parallelism.ep=2")
FAULTS = {  # name: (file, the original text, the text that replaces it), overrides of the job, a word of the reason
    "a local batch is divided by its own tokens": (
        (
            "core/train/trainer.py",
            "(part, count, last=",
            "(part, self.objective.count(part.tensors) * len(parts) * self.mesh.data_ranks, last=",
        ),
        FSDP,
        "float32",
    ),
    "FSDP averages gradients": (
        (
            "core/parallel/data.py",
            "            part.set_gradient_divide_factor(1.0)\n            part.set_force_sum_reduction_for_comms(True)\n",
            "            pass\n",
        ),
        FSDP,
        "float32",
    ),
    "FSDP sums gradients in the compute dtype": (
        ("core/parallel/data.py", "reduce_dtype=reduce", "reduce_dtype=compute"),
        (*FSDP, "precision=bf16"),
        "bfloat16",
    ),
    "layouts forget the weight decay": (
        (
            "core/train/optimizer.py",
            "weight_decay=config.weight_decay,\n        fused",
            "weight_decay=config.weight_decay * (torch.distributed.get_world_size() == 1),\n        fused",
        ),
        FSDP,
        "float32",
    ),
    "the norm misses the last pipeline rank": (
        (
            "core/parallel/gradients.py",
            "    dist.all_reduce(total)\n",
            "    total *= pipeline is None or pipeline.rank() < pipeline.size() - 1\n    dist.all_reduce(total)\n",
        ),
        PP,
        "float32",
    ),
    "gradients of norms are not summed over tensor-parallel ranks": (
        ("core/parallel/whole.py", "(Partial() if self.split else Replicate())", "Replicate()"),
        TP,
        "float32",
    ),
    "expert gradients are divided by the ep ranks": (
        (
            "core/parallel/experts.py",
            "Travel.apply(rows, route.back, route.there)",
            "Travel.apply(rows, route.back, lambda gradient: route.there(gradient) / self.group.size())",
        ),
        EP,
        "float32",
    ),
    "every rank takes the first samples": (
        ("core/data/__init__.py", "range(rank * share, (rank + 1) * share)", "range(share)"),
        FSDP,
        "float32",
    ),
    "a resumed run starts its data anew": (
        ("core/train/loop.py", "        loader.load(data_state)\n", "        pass\n"),
        FSDP,
        "resume",
    ),
    "an export is bfloat16 whatever is stored": (
        ("core/checkpoint/convert.py", "dtype or stored.get(name)) for", "dtype or torch.bfloat16) for"),
        FSDP,
        "export",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_tree_with_a_fault_gets_no_proof(tmp_path, name):
    (file, right, wrong), overrides, reason = FAULTS[name]
    for part in ("titan_hydra", "conf", "sweeps"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path / "titan_hydra" / file
    text = target.read_text()
    assert text.count(right) == 1, f"{file} has {text.count(right)} places for the fault"
    target.write_text(text.replace(right, wrong))
    chosen = dict(word.split("=") for word in ("debug=tiny", "precision=fp32", "gpus=2", *overrides))
    done = titan_verify(tmp_path, *(f"{key}={value}" for key, value in chosen.items()), tree=tmp_path)
    assert done.returncode == 1 and "NOT PROVEN" in done.stdout and reason in done.stdout, done.stdout + done.stderr
    assert not list(tmp_path.glob("runs/_proofs/*"))


def test_ranks_of_a_reduced_job_are_two_to_eight(capsys):
    assert cli.main(["verify", *TWO, "--ranks", "16"]) == 2
    assert capsys.readouterr().err == "--ranks=16: the ranks of a reduced job; nearest legal: 8\n"


@pytest.mark.parametrize("name", ["card.json", "proof.json"])
def test_what_an_earlier_version_wrote_is_one_line(tmp_path, capsys, name):
    """A card of an earlier version is no proof, nor is a proof that lacks a field or is damaged."""
    for content in ({"passed": True, "layout": "0", "code": "0", "measured": []}, []):
        (tmp_path / name).write_text(json.dumps(content))
        assert cli.main(["verify", "--show", str(tmp_path / name)]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "proof.json" in err


def test_a_proof_is_shown_without_its_job(tmp_path, capsys):
    case = {"name": "tp 2, float32", "passed": False, "worst": "gradient of w", "band": None, "start": 0, "routing": 0}
    case |= {"drift": 2, "rounded": 0, **{name: {"difference": 1e-7, "bound": 1e-5} for name in COLUMNS}}
    part = {"passed": None, "reason": "not run"}
    folder = write_proof(
        compose_job(*TWO, f"paths.runs={tmp_path}"),
        passed=False,
        reduced=[{"ranks": 2, "identity": "", "changes": {"model.dim": [4096, 64]}, "proofs": [case]}],
        prediction={"memory_gib": None, "reason": "hardware=unknown"},
        data={"passed": True, "reason": None, "source": "embedded", "steps": 3},
        resume=part,
        export=part,
    )
    assert cli.main(["verify", "--show", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "2 ranks    model.dim 4096 -> 64" in shown and "NO   tp 2, float32: loss 1.0e-07 of 1e-05" in shown
    assert "2 copies; worst: gradient of w" in shown and "-    resume (not run)" in shown


@pytest.mark.parametrize(("word", "new"), [("certify", "titan verify"), ("coordcheck", "titan verify widths")])
def test_former_words_are_answered_in_a_line(capsys, word, new):
    assert cli.main([word, "debug=tiny"]) == 2
    err = capsys.readouterr().err
    assert new in err and err.count("\n") == 1


def test_the_former_key_is_answered_in_a_line(launcher):
    refused = launcher.run(*launcher.TINY, "launch.require_card=true", "launch.mode=dry")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "launch.require_proof" in refused.stderr
