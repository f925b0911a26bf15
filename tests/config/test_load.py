"""From a command line to a typed job: what composes, what is refused in one line, and what makes two jobs the same one."""
import pytest
from hydra import compose, initialize_config_dir

from titan_hydra.config import compose_job, explain, from_dict, identity, read, register_schema, to_dict
from titan_hydra.config.compose import CONF
from titan_hydra.config.load import known_keys
from titan_hydra.config.schema import Job
from titan_hydra.config.status import ConfigError

OPTIONS = sorted((file.parent.name, file.stem) for file in CONF.glob("*/*.yaml"))


def composed(*overrides):
    register_schema()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", list(overrides))


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes_into_the_schema(group, option):
    job, faults = read(composed(f"{'+' * (group == 'sweeps')}{group}={option}"))
    assert faults == []
    if hasattr(job, group) and group != "debug":
        assert getattr(job, group).name == option


MISTAKES = [
    ("modle=x", "did you mean model?"),
    ("model=llama3_8c", "did you mean llama3_8b"),
    ("model.dmi=3", "did you mean model.dim"),
    ("tp=2", "did you mean parallelism.tp?"),
    ("steps=many", "steps=many: is not a valid integer"),
    ("model.rope_scaling.factor=x", "model.rope_scaling.factor=x: is not a valid float"),
    ("steps=null", "steps=null: is not a valid int"),
    ("data.path=[a]", "data.path=[a]: is not a valid str"),
    ("compile=", "compile=: no such option (options of compile: block, off)"),
    ("compile=true", "compile=true: no such option (options of compile: block, off)"),
    ("checkpoint=null", "checkpoint=null: no such option"),
    ("+steps=3", "write steps=VALUE without +"),
    ("+experiment=llama3_8b_c4", "write experiment=OPTION without +"),
    ("steps=[1", "steps=[1: cannot be parsed"),
    ("~nothing", "nothing: no such key"),
]


@pytest.mark.parametrize(("override", "text"), MISTAKES)
def test_hydras_complaints_become_one_line(override, text):
    with pytest.raises(Exception) as raised:  # Hydra has no one class for them
        composed(override)
    line = explain(raised.value, [override])
    assert text in line
    assert "\n" not in line


@pytest.mark.parametrize(("override", "text"), [
    ("+unknown=1", "unknown=1: no such key"),
    ("+model.dimm=1", "model.dimm=1: no such key; nearest legal: model.dim"),
    ("~steps", "steps=null: is needed"),
    ("~model", "MissingMandatoryValue"),
])
def test_what_hydra_lets_pass_is_refused_after_composing(override, text):
    job, faults = read(composed(override))
    assert job is None
    assert text in str(faults[0])


def test_an_error_of_ours_is_not_explained_away():
    assert explain(ZeroDivisionError("bug")) is None


def test_config_json_holds_the_whole_job():
    job = compose_job()
    assert from_dict(Job, to_dict(job)) == job


def test_identity_is_the_experiments_not_the_places():
    job = compose_job()
    same = compose_job("paths.runs=/elsewhere", "metrics=wandb", "checkpoint.interval=7", "notes=again", "cluster=inline",
                       "launch.force=true")
    assert identity(same) == identity(job)
    for override in ("seed=1", "optimizer.lr=1e-3", "data.local_batch=16", "model.n_layers=5", "precision=fp32", "checkpoint=off"):
        assert identity(compose_job(override)) != identity(job), override


KNOWN = {  # hashes that version 0.1 gave: the folders of runs that are there already
    "": "0ec4dd2f", "debug=tiny": "5f6e2910", "parallelism=tp": "9bae1dc9", "parallelism=pp data.local_batch=8": "0a572bd9",
    "precision=float8_emulate": "0b94835b", "optimizer=muon": "93541598", "optimizer=sgd": "8353da15", "lr_scheduler=cosine": "3643ad54",
    "ac=layer ac.every=3": "6a522196", "loss=linear_cross_entropy": "515d65f1", "data=synthetic": "b383dac3", "checkpoint=async": "60afdf64",
    "validation=on": "352b9c60", "fault_tolerance=diloco": "c3201cf7", "seed=7 steps=10 optimizer.lr=1e-3": "7dd824b2",
    "parallelism=fsdp_cp gpus=4 cluster=slurm": "38ad133a", "comm=fake gpus=8 comm.rank=3": "d2d3f6d6",
    "model=llama3_8b cluster=slurm gpus=8 parallelism=hsdp data=synthetic": "c8d82372",
    "experiment=llama3_8b_c4 cluster=slurm gpus=8 data=synthetic tokenizer=embedded": "d5fcc412",
}


@pytest.mark.parametrize("line", KNOWN)
def test_a_line_has_the_hash_that_it_always_had(line):
    assert identity(compose_job(*line.split())) == KNOWN[line]


def test_identity_does_not_depend_on_how_a_value_was_given():
    assert identity(compose_job("parallelism=single")) == identity(compose_job("parallelism=fsdp", "parallelism.name=single"))
    assert identity(compose_job("gpus=1")) == identity(compose_job())


def test_a_job_for_other_programs_is_checked_too():
    with pytest.raises(ConfigError, match="no such key or group"):
        compose_job("modle=x")
    with pytest.raises(ConfigError, match="steps=0: must be at least 1"):
        compose_job("steps=0")


def test_every_key_is_described():
    for key, spec in known_keys().items():
        assert spec.metadata["help"], key
