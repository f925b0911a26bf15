"""The `titan` command. A word, or a word and its verb, has two functions: one adds its arguments, the other runs it."""

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from titan_hydra.core.base.errors import ConfigError, Exit, RunError, denied, require_folder
from titan_hydra.core.base.text import all_printed, not_printed, ready_to_print, unprintable
from titan_hydra.core.job.config.additions import Word, of_all, verbs_of, words_alone
from titan_hydra.core.job.config.fault import did_you_mean, shown, suggest

from . import __version__

GROUPS = ("Before a run", "Runs", "Results", "Instruments")
COMMANDS = {  # words and, behind a word, its verbs
    "init": Word(
        "titan_hydra.experiments.runs.command_init",
        "write a project of your own: launch.py, options, a model, a sweep, a test",
        ("titan init mylab", "titan init ~/mylab"),
        "Before a run",
    ),
    "cluster": Word(
        "",
        "describe your SLURM or Kubernetes once, and check it",
        ("titan cluster init mysite", "titan cluster check mysite"),
        "Before a run",
    ),
    "cluster init": Word(
        "titan_hydra.experiments.launch.command_cluster:init_site",
        "write conf/cluster/NAME.yaml from what the cluster reports about its nodes with GPUs",
        ("titan cluster init", "titan cluster init mysite --executor slurm"),
    ),
    "cluster check": Word(
        "titan_hydra.experiments.launch.command_cluster:check_site",
        "train three small runs: on one node, on two nodes, and one that is stopped and resumed",
        (
            "titan cluster check mysite --runs /shared/me/runs",
            "titan cluster check mysite cluster.time_minutes=20 --runs /shared/me/runs",
        ),
    ),
    "data": Word(
        "",
        "look at and prepare what a run reads",
        (
            "titan data train-tokenizer --vocab 4096 --out tokenizer.model corpus/*.jsonl",
            "titan data encode --tokenizer tokenizer.model --out corpus.bin corpus/*.jsonl",
        ),
        "Before a run",
    ),
    "data train-tokenizer": Word(
        "titan_hydra.experiments.runs.command_data:train_tokenizer",
        "train a tokenizer of Llama 3's kind and write it as tokenizer.model",
        (
            "titan data train-tokenizer --vocab 4096 --out tokenizer.model",
            "titan data train-tokenizer --vocab 32768 --out tokenizer.model corpus/*.jsonl",
        ),
    ),
    "data encode": Word(
        "titan_hydra.experiments.runs.command_data:encode_text",
        "encode documents into a file of token ids, for data=tokens",
        (
            "titan data encode --out corpus.bin notes.txt",
            "titan data encode --tokenizer tokenizer.model --out corpus.bin corpus/*.jsonl",
        ),
    ),
    "plan": Word(
        "titan_hydra.experiments.plan.command_plan",
        "which layouts fit N GPUs, and how fast they would be; needs no GPU",
        (
            "titan plan model=llama3_8b hardware=h100 gpus=8",
            "titan plan model=llama3_70b hardware=h100 gpus=64,128,256 precision=bf16",
        ),
        "Before a run",
    ),
    "run": Word(
        "titan_hydra.experiments.launch.main",
        "train: one run, or a sweep with -m; the same as python launch.py",
        ("titan run debug=tiny", "titan run -m optimizer.lr=1e-3,2e-3 launch.mode=dry"),
        "Runs",
    ),
    "status": Word(
        "titan_hydra.experiments.runs.command_status",
        "what runs, what failed, what to do next; -f follows; --all: a line for each sweep and run",
        ("titan status -f", "titan status --all"),
        "Runs",
    ),
    "logs": Word(
        "titan_hydra.experiments.runs.command_logs",
        "the log of a rank; -f follows it; --guilty: why the run failed; --hang: which rank is late",
        ("titan logs c992 -f", "titan logs c992 --guilty"),
        "Runs",
    ),
    "stop": Word(
        "titan_hydra.experiments.runs.command_stop",
        "stop running and queued runs; running ones save first",
        ("titan stop c992", "titan stop --yes"),
        "Runs",
    ),
    "resume": Word(
        "titan_hydra.experiments.launch.command_resume",
        "bring runs further: after a failure or a stop, on other GPUs (gpus=N), for more steps (steps=N)",
        ("titan resume --only node", "titan resume c992 gpus=4", "titan resume c992 steps=400"),
        "Runs",
    ),
    "report": Word(
        "titan_hydra.experiments.report.command_report",
        "the table of a sweep, its plots and its page; --to copies runs to wandb or TensorBoard",
        ("titan report", "titan report --html", "titan report c992 --to tensorboard"),
        "Results",
    ),
    "compare": Word(
        "titan_hydra.experiments.report.command_compare",
        "how two runs differ, and the first step and module at which they diverge",
        ("titan compare c992 e1ee", "titan compare c992 e1ee --json"),
        "Results",
    ),
    "runs": Word(
        "",
        "put runs away, each whole or not at all",
        ("titan runs remove c992 --dry", "titan runs archive study --to study.tar.zst"),
        "Results",
    ),
    "runs remove": Word(
        "titan_hydra.experiments.runs.command_runs:remove_runs",
        "delete runs and sweeps that nothing needs; --unused: snapshots of code that no run needs",
        ("titan runs remove c992 e1ee", "titan runs remove study --dry", "titan runs remove --unused"),
    ),
    "runs archive": Word(
        "titan_hydra.experiments.runs.command_runs:archive_runs",
        "write runs and sweeps into one file, compare it with them, and delete them",
        ("titan runs archive study --to study.tar.zst", "titan runs archive c992 --to run.tar --checkpoints last"),
    ),
    "runs restore": Word(
        "titan_hydra.experiments.runs.command_runs:restore_runs",
        "check an archive, and put its runs back",
        ("titan runs restore study.tar.zst", "titan runs restore study.tar.zst --runs /scratch/runs"),
    ),
    "runs move": Word(
        "titan_hydra.experiments.runs.command_runs:move_runs",
        "move runs and sweeps to another folder of runs, also on another disk",
        ("titan runs move study --to /archive/runs", "titan runs move c992 e1ee --to /archive/runs --dry"),
    ),
    "generate": Word(
        "titan_hydra.experiments.runs.command_generate",
        "let the model of a run or checkpoint continue a text",
        ('titan generate c992 --prompt "The function returns"', 'titan generate c992 --prompt "def " --temperature 0'),
        "Results",
    ),
    "generate scores": Word(
        "titan_hydra.experiments.runs.command_generate:score_file",
        "write the log-probability that the model of a run or export gives each text of a file",
        ("titan generate scores c992 texts.jsonl", "titan generate scores c992 texts.jsonl --out scores.jsonl"),
    ),
    "checkpoint": Word(
        "",
        "look after a run's checkpoints; to and from Hugging Face",
        ("titan checkpoint ls c992", "titan checkpoint export c992 exported"),
        "Results",
    ),
    "checkpoint ls": Word(
        "titan_hydra.experiments.runs.command_checkpoint:list_steps",
        "list the steps of a run",
        ("titan checkpoint ls c992", "titan checkpoint ls runs/default-e1ee3d75"),
    ),
    "checkpoint verify": Word(
        "titan_hydra.experiments.runs.command_checkpoint:verify_steps",
        "compare every byte with the manifest; exit status 1 if some byte differs",
        ("titan checkpoint verify c992", "titan checkpoint verify runs/default-e1ee3d75/checkpoints/step-80"),
    ),
    "checkpoint prune": Word(
        "titan_hydra.experiments.runs.command_checkpoint:prune_steps",
        "delete steps that need not be kept, damaged steps, and what a killed run has left behind",
        ("titan checkpoint prune c992 --keep 2", "titan checkpoint prune c992 --keep 2 --every 100 --dry"),
    ),
    "checkpoint export": Word(
        "titan_hydra.experiments.runs.command_checkpoint:export_weights",
        "write the weights as a folder in Hugging Face's format: safetensors, tokenizer, generation settings",
        ("titan checkpoint export c992 exported", "titan checkpoint export c992 adapters --format peft"),
    ),
    "checkpoint import": Word(
        "titan_hydra.experiments.runs.command_checkpoint:import_weights",
        "write a checkpoint from a folder in Hugging Face's format; a run starts from it with "
        "checkpoint.initial_load_path",
        (
            "titan checkpoint import exported imported",
            "titan checkpoint import exported imported --imports my_family",
        ),
    ),
    **of_all("COMMANDS"),
}
ELSEWHERE = {  # words of other programs and former words, and the line of titan that does it
    "train launch submit start torchrun": "titan run",
    "ls list ps show top queue": "titan status --all",
    "watch follow monitor": "titan status -f",
    "tail log debug": "titan logs",
    "kill abort cancel": "titan stop",
    "rm delete clean cleanup gc": "titan runs remove",
    "restart rerun continue retry": "titan resume",
    "extend longer": "titan resume RUN steps=N",
    "table plot plots page results summary": "titan report",
    "diff": "titan compare",
    "sync wandb tensorboard track": "titan report RUN --to TRACKER",
    "convert": "titan checkpoint export",
    "score eval evaluate likelihood loglikelihood": "titan generate scores",
    "complete inference": "titan generate",
    "estimate fit memory advise": "titan plan",
    "new create": "titan init",
    "test check prove certify": "titan verify",
    "coordcheck": "titan verify widths",
    "tokenizer": "titan data train-tokenizer",
    "tokenize": "titan data encode",
    "config": "titan run --cfg job",
    "completion": "titan --completion SHELL",
    "help": "titan --help",
    **of_all("ELSEWHERE"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand. A user's mistake is printed as one line on stderr; only bugs print a traceback."""
    argv = sys.argv[1:] if argv is None else argv
    ready_to_print()
    if argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    if not argv or argv[0] in ("-h", "--help"):
        print(listing(_width()))
        return Exit.DONE
    if argv[0] == "--version":
        print(f"titan_hydra {__version__}")
        return Exit.DONE
    if argv[0].startswith("--completion"):
        return _run(_completed, argparse.Namespace(argv=argv))
    try:
        name, rest = chosen_word(argv)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return Exit.CONFIG
    if not COMMANDS[name].place:
        print(listing_of_verbs(name, _width()))
        return Exit.DONE
    if name == "run":
        return _run(_launched, argparse.Namespace(words=rest))
    return _run(COMMANDS[name].functions()[1], _arguments(name, rest))


def chosen_word(argv: list[str]) -> tuple[str, list[str]]:
    """Return the word that a line begins with, with its verb if it has one there, and the rest of the line. Raises
    ConfigError, which names the line that is meant, if there is no such word or verb.
    """
    word, rest = argv[0], argv[1:]
    if word not in COMMANDS:
        meant = [line for words, line in ELSEWHERE.items() if word.lower() in words.split()]
        meant += [f"titan {name}" for name in COMMANDS if name.endswith(f" {word}")]
        hint = did_you_mean(meant[:1] or suggest(word, words_alone(COMMANDS)), otherwise="; `titan` lists them")
        raise ConfigError(f"titan {shown(word)}: no such command{hint}")
    verbs = verbs_of(word, COMMANDS)
    if rest and rest[0] in verbs:
        return f"{word} {rest[0]}", rest[1:]
    if COMMANDS[word].place or rest[:1] in (["-h"], ["--help"]):
        return word, rest
    if not rest:
        raise ConfigError(f"titan {word}: which? one of {', '.join(verbs)}")
    meant = [f"titan {word} {verb}" for verb in suggest(rest[0], list(verbs))]
    raise ConfigError(
        f"titan {word} {shown(rest[0])}: no such verb{did_you_mean(meant, otherwise='; one of ' + ', '.join(verbs))}"
    )


def listing(width: int) -> str:
    """Return what `titan --help` prints on a terminal of this width: the words in their groups, each with its verbs."""
    lines = ["Usage: titan COMMAND [OPTIONS]    (titan COMMAND --help: options and examples)"]
    for group in GROUPS:
        texts = {name: _with_verbs(name) for name in words_alone(COMMANDS) if COMMANDS[name].group == group}
        lines += ["", group, *_columns(texts, max(map(len, words_alone(COMMANDS))), width)] if texts else []
    return "\n".join([*lines, "", "titan --completion SHELL: let bash, zsh or fish complete all this"])


def listing_of_verbs(word: str, width: int) -> str:
    """Return what `titan WORD --help` prints for a word that only has verbs."""
    verbs = verbs_of(word, COMMANDS)
    return "\n".join(
        [
            f"Usage: titan {word} VERB [OPTIONS]    (VERB --help: options and examples)",
            "",
            _sentence(COMMANDS[word], width),
            "",
            *_columns({verb: verb_word.text for verb, verb_word in verbs.items()}, max(map(len, verbs)), width),
            "",
            _examples(COMMANDS[word]),
        ]
    )


def _with_verbs(name: str) -> str:
    verbs = verbs_of(name, COMMANDS)
    joint = "; also: " if COMMANDS[name].place else ": "
    return f"{COMMANDS[name].text}{joint}{', '.join(verbs)}" if verbs else COMMANDS[name].text


def _columns(texts: dict[str, str], wide: int, width: int) -> list[str]:
    """Return names with their texts behind them, wrapped to a number of columns."""
    lines = []
    for name, text in texts.items():
        first, behind = f"  {name}".ljust(wide + 4), " " * (wide + 4)
        lines += textwrap.wrap(text, width, initial_indent=first, subsequent_indent=behind, break_on_hyphens=False)
    return lines


def _sentence(word: Word, width: int) -> str:
    return textwrap.fill(word.text[0].upper() + word.text[1:] + ".", width)


def _examples(word: Word) -> str:
    return "\n".join(["examples:", *(f"  {line}" for line in word.examples)])


def _width() -> int:
    """Return the number of columns that a help text takes: those of the terminal, up to a length that is read well."""
    return min(shutil.get_terminal_size().columns, 120)


def _completed(args: argparse.Namespace) -> int:
    """Print a shell's script for completion, or the candidates that such a script asks for."""
    from titan_hydra.experiments.runs.completion import answer_shell

    return answer_shell(args.argv, COMMANDS)


def _launched(args: argparse.Namespace) -> int:
    """Run launch.py with these words. A project's options are found as by the launch.py of the current folder."""
    from titan_hydra.experiments.launch.main import main as launch

    before, sys.argv = sys.argv, ["launch.py", *args.words]
    try:
        return launch(Path("launch.py"))
    finally:
        sys.argv = before


def _run(command: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run a command. Return its exit status, or that of the error that ended it, of which one line is printed."""
    try:
        require_folder()
        return all_printed(command(args))
    except RunError as error:
        print(error, file=sys.stderr)
        return error.status
    except PermissionError as error:  # for example, the runs belong to another user
        print(denied(error, "--runs", getattr(args, "runs", None) or Path()), file=sys.stderr)
        return Exit.CONFIG
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has closed it
        sys.stderr.close()
        return Exit.DONE
    except OSError as error:
        if not unprintable(error):
            raise
        return not_printed(error)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print what is wrong on one line, with the option or the verb that is probably meant, and exit."""
        hint = ""
        if unknown := re.match(r"unrecognized arguments: (--[\w-]+)", message):
            options = re.findall(r"--[\w-]+", self.format_help())
            verbs = [f"titan {name}" for name in COMMANDS if name.endswith(f" {unknown[1].removeprefix('--')}")]
            hint = did_you_mean(suggest(unknown[1], options)[:1] or verbs[:1])
        self.exit(Exit.CONFIG, f"{self.prog}: {message}{hint or f' ({self.prog} --help)'}\n")


def _arguments(name: str, argv: list[str]) -> argparse.Namespace:
    """Parse the arguments of a word, or of a word and its verb; exits with status 2 if they are wrong."""
    word = COMMANDS[name]
    text = _sentence(word, _width())
    if verbs := verbs_of(name, COMMANDS):
        columns = _columns({verb: verb_word.text for verb, verb_word in verbs.items()}, max(map(len, verbs)), _width())
        text = "\n".join([text, "", f"titan {name} VERB:", *columns])
    parser = _Parser(
        prog=f"titan {name}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=text,
        epilog=_examples(word),
    )
    word.functions()[0](parser)
    return parser.parse_intermixed_args(argv)  # options may stand between the KEY=VALUE arguments


if __name__ == "__main__":
    sys.exit(main())
