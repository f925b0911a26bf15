"""Look up files (data, tokenizers, conf/) and write small files atomically. Imports nothing heavy."""

import contextlib
import difflib
import functools
import glob
import json
import os
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.base.plain import read_plain

from .schema import Tokenizer

ASSETS = Path(__file__).parents[3] / "assets"
# conf/ in an installed wheel. A checkout has it in its top folder instead, and a rank's copy of the code has none.
INSTALLED = Path(__file__).parents[3] / "conf"
CONF = INSTALLED if INSTALLED.is_dir() else Path(__file__).parents[4] / "conf"
# suffixes of compressed files, and the suffixes of files that may be compressed
PACKED, LINED = (".gz", ".zst"), (".txt", ".md", ".jsonl", ".json", ".csv")
ROWS = (".jsonl", ".json", ".csv", ".parquet")  # suffixes of files of rows
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
FASTA = (
    "python -c \"import json; rows = ('\\n' + open('FILE').read()).split('\\n>')[1:]; open('FILE.jsonl', 'w').writelines("
    "json.dumps({'text': ''.join(row.split('\\n')[1:])}) + '\\n' for row in rows)\""
)
NUMPY = (
    "python -c \"import json, numpy as np; ids = np.load('FILE'); ids.astype('uint32').tofile('FILE.bin'); json.dump({'tokens': "
    "ids.size, 'dtype': 'uint32', 'vocab_size': int(ids.max()) + 1, 'bos_id': None, 'eos_id': 0, 'tokenizer_sha256': ''}, "
    "open('FILE.bin.json', 'w'))\""
)
CONVERTED = {  # for suffixes that no source reads: the `data` option for converted files, their suffix, the command
    **dict.fromkeys((".fasta", ".fa", ".faa", ".fna"), ("text_files", ".jsonl", FASTA)),
    ".npy": ("tokens", ".bin", NUMPY),
}
MOST_FILES = 1_000_000  # maximum number of files that one path may match
LLAMA3_SPECIALS = [  # special tokens in Meta's order; their ids follow the BPE ranks of every Llama 3 tokenizer.model
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|reserved_special_token_2|>",
    "<|reserved_special_token_3|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|reserved_special_token_4|>",
    "<|eot_id|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(5, 251)),
]


def expand(pattern: str) -> list[Path]:
    """Return the files that a path or a glob names, sorted; for a folder all files in it. Raises ConfigError for more
    than MOST_FILES.
    """
    path = home(pattern)
    if path.is_file():  # a file's own name may contain characters that have a meaning in a glob
        return [path]
    fixed, recursive, _ = str(path.absolute()).partition("/**")
    if (recursive or path.is_dir()) and os.path.normpath(fixed or "/") == "/":
        raise ConfigError("would be every file of this machine")
    paths = _walk(path) if path.is_dir() else map(Path, glob.iglob(str(path), recursive=True))
    files = list(islice((file for file in paths if file.is_file()), MOST_FILES + 1))
    if len(files) > MOST_FILES:
        raise ConfigError(f"names more than {MOST_FILES:,} files")
    return sorted(files)


def _walk(top: Path) -> Iterator[Path]:
    """Yield the files in a folder and in the folders that it links to, each folder once. A folder that the tree itself
    holds is read under its own name. Files and folders whose names begin with a dot are left out.
    """
    seen, links = set[str](), [top]
    while links:
        for folder, folders, names in os.walk(links.pop(0)):
            if (real_path := os.path.realpath(folder)) in seen:
                folders.clear()
                continue
            seen.add(real_path)
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            links += [Path(folder, name) for name in folders if os.path.islink(os.path.join(folder, name))]
            yield from (Path(folder, name) for name in names if not name.startswith("."))


def data_files(pattern: str, found: list[Path], suffixes: tuple[str, ...]) -> list[Path]:
    """Return those of the files that `pattern` names which hold data: those with one of the suffixes, if there are any.
    In a folder, the descriptions that come with a data set (README.md, dataset_infos.json) hold none, nor do .md files
    beside files of rows.
    """
    usable = [file for file in found if not suffixes or kind(file) in suffixes]
    if not home(pattern).is_dir():
        return usable
    rows = any(kind(file) in ROWS for file in usable)
    data = [
        file
        for file in usable
        if file.name not in DESCRIPTIONS and not (kind(file) == ".md" and (rows or file.name.lower() == "readme.md"))
    ]
    return data or usable


def home(path: str) -> Path:
    """Expand ~ and ~user. A user that does not exist is left as typed."""
    return Path(os.path.expanduser(path))


def kind(file: Path) -> str:
    """Return the suffix that decides how a file is read: `.txt` for notes.txt, notes.txt.gz and notes.txt.zst."""
    return Path(file.stem).suffix.lower() if file.suffix in PACKED else file.suffix.lower()


def unread(file: Path, suffixes: tuple[str, ...]) -> str:
    """Return why a source that reads files with these suffixes does not read this file, and a command that converts it."""
    packed = " (also with .gz or .zst behind it)" if any(suffix in LINED for suffix in suffixes) else ""
    name, ending, line = CONVERTED.get(kind(file), ("", "", ""))
    hint = f"; data={name} reads the {ending} that this makes: {line.replace('FILE', str(file))}" if line else ""
    return f"{file.name} ends in none of {', '.join(suffixes)}{packed}{hint}"


def missing(pattern: str, found: list[Path]) -> list[Path]:
    """Return the files that `pattern` should match but that do not exist: gaps in numbered sets, such as
    c4.00003-of-00128.json.gz.
    """
    gone, there = set(), set(found)
    sets = {
        (file.parent, match[1], len(match[2]), match[3], match[4])
        for file in found
        if (match := re.fullmatch(r"(.*?)(\d+)-of-(\d+)(\D.*|)", file.name))
    }
    for folder, head, width, total, tail in sets:
        named = [folder / f"{head}{number:0{width}}-of-{total}{tail}" for number in range(int(total) + 1)]
        gone |= set(named[1:] if named[-1] in there else named[:-1]) - there  # numbers may start at 1 or at 0
    path = home(pattern)
    return sorted(file for file in gone if path.is_dir() or (not path.is_file() and fnmatch(str(file), str(path))))


def similar(pattern: str) -> tuple[str, ...]:
    """Return files beside `pattern` with a similar name."""
    path = home(pattern)
    names = [entry.name for entry in path.parent.iterdir() if entry.name != path.name] if path.parent.is_dir() else []
    return tuple(str(path.parent / name) for name in difflib.get_close_matches(path.name, names, n=2))


@functools.cache
def load_yaml(file: Path) -> dict[str, Any]:
    """Read a file of conf/ as plain values. The result is cached: do not change it."""
    from omegaconf import OmegaConf

    content: Any = OmegaConf.to_container(OmegaConf.load(file))
    return content


def unusable_options(folder: Path) -> list[str]:
    """Return a line for each file in a user's folder of options that Hydra would ignore or misread.

    Hydra does not use an option that has the name of a package option. YAML reads `on` and `off` without quotes as
    truth values.
    """
    files_of_package = {
        package: folder / package.relative_to(CONF)
        for package in (CONF / "config.yaml", *sorted(CONF.glob("*/*.yaml")))
    }
    lines = [
        f"{file}: is never read, as the package has an option of this name, {package}; rename it"
        for package, file in files_of_package.items()
        if file.is_file() and not package.samefile(file)
    ]
    for file in sorted(folder.glob("*/*.yaml")):
        try:
            defaults = load_yaml(file).get("defaults") or []
        except Exception:  # Hydra reports the mistake when the file is chosen
            continue
        lines += [
            f'{file}: {group}: YAML reads on and off as true and false; write "on" or "off" in quotes'
            for entry in defaults
            if isinstance(entry, dict)
            for group, option in entry.items()
            if isinstance(option, bool)
        ]
    return lines


@functools.cache
def default_options() -> dict[str, str | None]:
    """Return the option of each group in the defaults list of conf/config.yaml. The result is cached: do not change
    it.
    """
    chosen = {}
    for entry in load_yaml(CONF / "config.yaml")["defaults"]:
        if isinstance(entry, dict):
            chosen |= {group: option for group, option in entry.items() if not group.startswith("override ")}
    return chosen


def tokenizer_file(config: Tokenizer) -> Path:
    """Return the file of the tokenizer; the embedded one is part of the package."""
    return ASSETS / "tokenizer.model" if config.name == "embedded" else home(config.path or "")


def vocabulary_size(config: Tokenizer) -> int:
    """Return the number of token ids, special ones included. Raises OSError or ValueError if the file is not a
    tokenizer.
    """
    file = tokenizer_file(config)
    if file.exists() and not file.is_file():
        held = [name for name in ("tokenizer.json", "tokenizer.model") if (file / name).is_file()]
        hint = f", which has {' and '.join(held)}" if held else ""
        raise ValueError(f"a folder{hint}" if file.is_dir() else "not a file")
    if config.name == "hf":
        return size_of_hf(json.loads(file.read_text(encoding="utf-8")))
    lines = [line for line in file.read_bytes().splitlines() if line.strip()]
    if not lines or any(len(line.split()) != 2 for line in lines[:3]):
        raise ValueError("not a tokenizer.model file (base64 token and rank on each line)")
    return len(lines) + len(LLAMA3_SPECIALS)


def size_of_hf(content: dict[str, Any]) -> int:
    """Return the vocabulary size of a tokenizer.json: its largest id + 1."""
    vocabulary = content["model"]["vocab"]  # a unigram model has a list of pieces, the others a map to ids
    ids = set(range(len(vocabulary))) if isinstance(vocabulary, list) else set(vocabulary.values())
    return max(ids | {token["id"] for token in content.get("added_tokens", [])}) + 1


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically and durably: a reader sees either the old content or the new one, even after a power
    cut.
    """
    write_text(path, json.dumps(content, indent=2, sort_keys=True) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object. None if the file does not exist, is truncated, is no plain file or holds something else.
    (core/job/run/layout.py has the JSON files of a run.)
    """
    try:
        content = json.loads(read_plain(path))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def require_new(out: Path) -> None:
    """Raise ConfigError if --out names what exists already, or lies in no folder in which files can be written."""
    if out.exists():
        raise ConfigError(f"--out={out}: exists already")
    if not out.parent.is_dir():
        raise ConfigError(f"--out={out}: there is no folder {out.parent}")
    if not os.access(out.parent, os.W_OK):
        raise ConfigError(f"--out={out}: cannot be written: {out.parent} may not be written by this user")


def write_text(path: Path, text: str, durable: bool = True) -> None:
    """Write a small file atomically: a reader sees either the old content or the new one. If `durable`, this holds even
    after a power cut.
    """
    # several hosts may write the file at the same time, and processes in different containers can have equal ids
    scratch = path.with_name(f".{path.name}.{os.uname().nodename}-{os.getpid()}")
    try:
        with scratch.open("w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        scratch.replace(path)
    except OSError:  # a full disk; what was written would only fill it further
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise
