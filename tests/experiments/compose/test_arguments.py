"""Flags of launch.py may stand anywhere on the line, and a wrong one gives one line."""

import os
import re
import shlex
import sys

import pytest

from titan_hydra import cli
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.files import CONF
from titan_hydra.core.job.config.ranges import PATH
from titan_hydra.experiments.compose.arguments import arranged
from titan_hydra.experiments.compose.meant import SYNONYMS
from titan_hydra.experiments.compose.overrides import mistakes
from titan_hydra.experiments.runs.completion import candidates


@pytest.mark.parametrize(
    ("arguments", "overrides", "flags"),
    [
        ("debug=tiny -m seed=1,2", "debug=tiny seed=1,2", "-m"),
        ("-m debug=tiny seed=1,2", "debug=tiny seed=1,2", "-m"),
        ("debug=tiny --cfg job steps=3 --resolve -p steps", "debug=tiny steps=3", "--cfg job --resolve -p steps"),
        ("--config-dir . steps=3 --multirun seed=1,2", "steps=3 seed=1,2", "--config-dir . --multirun"),
        ("~experiment +cluster.sbatch.mem=0 --info config", "~experiment +cluster.sbatch.mem=0", "--info config"),
        ("-sc query=bash", "query=bash", "-sc"),
    ],
)
def test_flags_may_stand_anywhere(arguments, overrides, flags):
    assert arranged(arguments.split()) == (overrides.split(), flags.split())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--resolve", "--resolve: goes with --cfg job"),
        ("-sc", "takes install=SHELL"),
        ("-sc foo=bar", "takes install=SHELL"),
        ("-m --cfg job", "--multirun and --cfg: only one of them"),
        ("-p model.nosuch --cfg job", "--package model.nosuch: no such key or group"),
        ("--steps=10", "--steps=10: keys are given without dashes; did you mean steps=10?"),
        ("--batch-size 8", "--batch-size: keys are given without dashes; did you mean data.local_batch"),
        ("--dry-run", "; did you mean launch.mode=dry?"),
        ("--nosuch", "unrecognized arguments: --nosuch"),
        ("-c", "expected one argument"),
        ("--cfg nothing", "invalid choice"),
        ("--experimental-rerun file.pickle", "the same command line resumes"),
        ("steps=x -m modle=3", "as one pass over rows of data needs)\nmodle: no such key"),
    ],
)
def test_a_wrong_flag_is_one_line(arguments, text):
    with pytest.raises(ConfigError) as raised:
        arranged(arguments.split())
    assert text in str(raised.value) and len(str(raised.value).splitlines()) == text.count("\n") + 1


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("stauts", "did you mean status?"),
        ("plna", "did you mean plan?"),
        ("everything", "`titan` lists them"),
        ("train", "did you mean titan run?"),
        ("queue", "did you mean titan status --all?"),
        ("kill", "did you mean titan stop?"),
        ("cancel", "did you mean titan stop?"),
        ("retry", "did you mean titan resume?"),
        ("extend", "did you mean titan resume RUN steps=N?"),
        ("export", "did you mean titan checkpoint export?"),
        ("convert", "did you mean titan checkpoint export?"),
        ("track", "did you mean titan report RUN --to TRACKER?"),
        ("score", "did you mean titan generate scores?"),
        ("tokenizer", "did you mean titan data train-tokenizer?"),
        ("encode", "did you mean titan data encode?"),
        ("completion", "did you mean titan --completion SHELL?"),
    ],
)
def test_titan_suggests_a_word(word, hint, capsys):
    assert cli.main([word, "--json"]) == 2
    assert capsys.readouterr().err == f"titan {word}: no such command; {hint}\n"


@pytest.mark.parametrize("name", [name for name in cli.COMMANDS if " " in name])
def test_a_verb_alone_names_its_word(name, capsys):
    """An unknown word that is a verb of some word, of a recipe or an instrument too, is answered with a line of titan."""
    verb = name.split()[1]
    if verb in cli.words_alone(cli.COMMANDS) or any(verb in words.split() for words in cli.ELSEWHERE):
        return
    assert cli.main([verb, "x"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(rf"did you mean titan [a-z]+ {verb}\?$", line)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("checkpoint", "titan checkpoint: which? one of ls, "),
        ("checkpoint prun c992", "titan checkpoint prun: no such verb; did you mean titan checkpoint prune?"),
        ("cluster --force", "titan cluster --force: no such verb; one of init, check"),
        ("data /no", "titan data /no: no such verb; one of "),
    ],
)
def test_a_word_without_its_verb_is_one_line(line, text, capsys):
    assert cli.main(line.split()) == 2
    out, error = capsys.readouterr()
    assert not out and error.startswith(text) and error.count("\n") == 1


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_list_of_words_fits_the_terminal(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    for line in (["--help"], [], ["help"]):
        assert cli.main(line) == 0
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines()[1:-1])) <= width
        heads = [line for line in text.splitlines()[1:-1] if line and not line.startswith(" ")]
        assert heads == list(cli.GROUPS)
        for name in cli.COMMANDS:
            assert re.search(rf"^  {name} " if " " not in name else rf"\b{name.split()[1]}\b", text, re.M)


@pytest.mark.parametrize("name", [name for name in cli.COMMANDS if name != "run"])
def test_the_help_of_a_word_has_examples_of_options_that_exist(name, monkeypatch, capsys):
    """The examples are parsed by the parser of the word, or of the word and its verb."""
    monkeypatch.setenv("COLUMNS", "80")
    try:
        status = cli.main([*name.split(), "--help"])
    except SystemExit as ended:
        status = ended.code
    text = capsys.readouterr().out
    assert status == 0 and max(map(len, text.partition("examples:")[0].splitlines())) <= 80
    assert cli.main(["help", *name.split()]) == 0 if not cli.COMMANDS[name].place else True
    assert len(cli.COMMANDS[name].examples) >= 2
    for line in cli.COMMANDS[name].examples:
        assert line in text
        first, *parts = shlex.split(line)
        assert first == "titan" and parts[0] == name.split()[0]
        chosen, rest = cli.chosen_word(parts)
        assert chosen == name or not cli.COMMANDS[name].place
        cli._arguments(chosen, rest)


def test_completion_knows_verbs():
    for words, found in (
        ("", cli.words_alone(cli.COMMANDS)),
        ("checkpoint ", ["ls", "verify", "prune", "export", "import"]),
    ):
        assert [*candidates(words.split(" "), cli.COMMANDS)] == found
    assert "--vocab" in candidates(["data", "train-tokenizer", "--"], cli.COMMANDS)
    assert "hf" in candidates(["checkpoint", "export", "a", "b", "--format", ""], cli.COMMANDS)
    assert "scores" in candidates(["generate", "s"], cli.COMMANDS)  # or a run
    assert not [*candidates(["checkpoint", "nothing", ""], cli.COMMANDS)]


def test_examples_compose():
    """The overrides that examples give are of known keys and options."""
    words = (
        "run",
        "plan",
        "verify",
        "data show",
        "cluster check",
        *(w for w in cli.COMMANDS if "rates " in w),
    )
    for word in (word for word in words if word in cli.COMMANDS):
        for line in cli.COMMANDS[word].examples:
            overrides = [part for part in shlex.split(line) if "=" in part and not part.startswith("-")]
            assert not mistakes([part.replace("gpus=64,128,256", "gpus=64") for part in overrides], [CONF])


def test_titan_run_is_launch(monkeypatch, capsys, tmp_path):
    """`titan run` takes the words of launch.py, starts with its status, and leaves sys.argv as it was."""
    monkeypatch.chdir(tmp_path)
    before = list(sys.argv)
    assert cli.main(["run", "--help", "data.seq_len"]) == 0 and "data.seq_len" in capsys.readouterr().out
    assert cli.main(["run", "optimizer.lrr=1"]) == 2 and "optimizer.lr" in capsys.readouterr().err
    assert sys.argv == before


def test_gpus_is_a_key_and_a_flag():
    assert arranged(["-m", "--gpus", "2,4", "debug=tiny"]) == (["gpus=2,4", "debug=tiny"], ["-m"])
    assert arranged(["--gpus=2"]) == (["gpus=2"], [])
    with pytest.raises(ConfigError, match="gpu"):
        arranged(["--gpu", "2"])


def test_a_new_project_has_the_modes_of_its_place(tmp_path):
    """`titan init` obeys the umask and a folder's setgid bit; copies of the package's files would keep the package's
    modes.
    """
    tmp_path.chmod(0o2770)
    before = os.umask(0o077)
    try:
        assert cli.main(["init", str(tmp_path / "mylab")]) == 0
    finally:
        os.umask(before)
    assert {
        path.stat().st_mode & 0o7777 for path in [tmp_path / "mylab", *(tmp_path / "mylab").rglob("*")] if path.is_dir()
    } == {0o2700}
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "mylab").rglob("*") if path.is_file()} == {0o600}


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["seed=1,", "2"], "seed=1,2"),
        (["optimizer.lr", "=", "1e-3"], "optimizer.lr=1e-3"),
        (["optimizer.lr=", "1e-3"], "optimizer.lr=1e-3"),
        (["optimizer.lr", "=1e-3"], "optimizer.lr=1e-3"),
        (["validation.tasks=[a,", "b]"], "'validation.tasks=[a,b]'"),
        (["+cluster.sbatch={mem:", "1}"], "'+cluster.sbatch={mem:1}'"),
        (["seed=1,2,"], "seed=VALUE,VALUE"),
    ],
)
def test_an_override_with_blanks_is_one_mistake(words, meant):
    (line,) = mistakes(["steps=3", *words, "notes=", "gpus=1"])
    assert line.endswith(f"as {meant}"), line


@pytest.mark.parametrize(
    "word",
    ["hydra.verbose=true", "+hydra.job.env_set.A=1", "hydra/job_logging=disabled", "hydra.sweeper.max_batch_size=2"],
)
def test_what_hydra_would_take_without_effect_is_refused(word):
    assert len(mistakes([word])) == 1
    assert not mistakes(["hydra.mode=MULTIRUN", "hydra/launcher=basic", "hydra/job_logging=none"])


@pytest.mark.parametrize("path", ["$SCRATCH/runs", "${SCRATCH}/runs", "/a/$B/c"])
def test_the_name_of_a_variable_is_no_folder(path):
    assert "${oc.env:" in PATH.objection(path)
    assert PATH.objection("/a/b$c/$(D)/e$") is None


def test_an_option_of_cluster_names_its_executor(tmp_path):
    (tmp_path / "cluster").mkdir()
    for name, text in (
        ("empty", ""),
        ("bare", "max_parallel: 2\n"),
        ("mine", "executor: slurm\n"),
        ("heir", "defaults: [mine]\n"),
    ):
        (tmp_path / f"cluster/{name}.yaml").write_text(text)
    lines = {
        name: mistakes([f"cluster={name}"], [CONF, tmp_path]) for name in ("empty", "bare", "mine", "heir", "local")
    }
    assert [len(line) for line in lines.values()] == [1, 1, 0, 0, 0] and "executor" in lines["empty"][0]


@pytest.mark.parametrize(
    ("guess", "meant"),
    [
        ("activation_checkpoint=true", "ac=full"),
        ("activation_checkpoint.mode=selective", "ac=full"),
        ("gradient_checkpointing=op", "ac=op"),
        ("optimizer.clip_grad_norm=1", "optimizer.max_norm=1"),
        ("clip_grad_norm=-1", "optimizer.max_norm"),  # it takes no such value
        ("dry_run=true", "launch.mode=dry"),
        ("dry-run=true", "launch.mode=dry"),
        ("nnodes=2", "gpus=N"),
        ("world_size=2", "gpus=2"),
        ("checkpoint.load_from=a/b", "checkpoint.initial_load_path=a/b"),
        ("resume=true", "titan resume RUN"),
        ("lora=8", "adapter=lora"),
        ("tensor_parallel=2", "parallelism.tp=2"),
        ("validation.every=5", "validation.interval=5"),
        ("checkpoint.every=5", "checkpoint.interval=5"),
        ("data.file=x.txt", "data=text_files data.path=x.txt"),
        ("global_batch_size=8", "data.global_batch=8"),
        ("batch_size=8", "data.local_batch=8 or data.global_batch=8"),
        ("learning_rate=1e-3,2e-3", "optimizer.lr=1e-3,2e-3"),
        ("optimizer.lrr=1e-3", "optimizer.lr=1e-3"),
        ("run_dir=/a", "paths.runs=/a"),
        ("parallelism.schedule=1f1b", "pp_schedule=1f1b"),
        ("schedule=cosine", "lr_scheduler=cosine"),
        ("epochs=3", "steps=epoch or steps=N"),
        ("wandb=true", "metrics=wandb"),
        ("bf16=true", "precision=bf16"),
        ("dtype=fp32", "precision=fp32"),
        ("dtype=bfloat16", "precision"),
        ("model.flavor=8b", "model=llama3_8b or model=qwen3_8b"),
        ("compile.enable=true", "compile=block"),
        ("slurm=true", "cluster=slurm"),
        ("optim=adamw", "optimizer=adamw"),
    ],
)
def test_names_of_other_programs_lead_to_ours(guess, meant):
    (line,) = mistakes([guess])
    assert line.endswith(f"; did you mean {meant}?"), line
    for hint in meant.split(" or "):
        assert "=" not in hint or not mistakes(hint.replace("=N", "=4").split()), hint


def test_the_place_of_every_hint_exists():
    for name in SYNONYMS:
        words = [word if "=" in word else f"{word}=" for word in name.replace("=N", "=4").split()]
        if not name.startswith("titan "):
            assert not any("no such key" in line for line in mistakes(words)), name


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("status --folow", "did you mean --follow?"),
        ("plan --tune 4", "did you mean titan rates tune?"),
        ("status -x", "titan status --help"),
        ("generate", "titan generate --help"),
    ],
)
def test_an_option_that_a_word_does_not_have_is_one_line(line, meant, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(line.split())
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.err.count("\n") == 1 and meant in said.err and not said.out
