"""The pages of this repository are true as far as a test can tell: links lead somewhere, keys and options exist."""

import re
import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from titan_hydra import cli
from titan_hydra.experiments.compose import describe

ROOT = Path(__file__).parents[1]
WIDTH = 126  # characters of code that the site shows in a window of 1,280 pixels
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Return a page's relative links to files or headings that do not exist. Text inside code is not a link."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.S | re.M)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page):
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A b\n[x](page.md) [x](#a-b) [x](https://no.where) `[x](code.md)` [y](gone.md) [y](page.md#gone)\n"
    )
    assert broken_links(page) == ["gone.md", "page.md#gone"]


def misread(page: Path) -> list[str]:
    """Return the lines of a page that are not shown as what they are: a line inside a list item that Python-Markdown puts
    outside the list or GitHub takes for code, a command inside a list item, and code that the site cuts off at the right.
    """
    wrong, in_list, fence, before = [], False, None, ""
    for line in page.read_text().splitlines():
        if mark := re.match(r"\s*```(\w*)", line):
            fence = None if fence is not None else mark[1]
        elif fence is None and line:
            item = re.match(r"\s{0,3}([-*]|\d+\.) ", line)
            in_list = bool(item) or (in_list and line.startswith(" "))
            indented = re.match(r" *", line)[0]
            if in_list and not item and not before and (len(indented) != 4 or re.match(r" *(titan|python|pip) ", line)):
                wrong.append(line)
            if not in_list and re.match(r"    (titan|python|pip|pytest) ", line) and len(line) > WIDTH + 4:
                wrong.append(line)
        elif fence in ("sh", "bash", "python", "yaml") and len(line) > WIDTH and not line.startswith("python -c"):
            wrong.append(line)
        before = line
    return wrong


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent.name != "lab"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_lists_and_code_are_shown_as_what_they_are(page):
    assert misread(page) == []


def test_what_is_not_shown_as_what_it_is_is_found(tmp_path):
    page = tmp_path / "page.md"
    wide = f"titan plan {'gpus=8 ' * 20}"
    page.write_text(
        f"1. a\n\n   b\n2. c\n\n        titan plan\n\nText.\n\n    {wide}\n\n```sh\n{wide}\n```\n\n```text\n{wide}\n```\n"
    )
    assert misread(page) == ["   b", "        titan plan", f"    {wide}", wide]


def unknown_names(page: Path) -> set[str]:
    """Return the keys (`group.key`) and options (`group=option`) that a page's code and command lines use but the
    configuration lacks.

    A table's column "there" is skipped: its keys are another program's.
    """
    text = re.sub(r"^```(python|toml).*?^```", "", page.read_text(), flags=re.S | re.M)
    text = re.sub(
        r"^\| there \|.*\n(\|.*\n)*", lambda table: re.sub(r"^\|[^|]*", "", table[0], flags=re.M), text, flags=re.M
    )
    code = re.findall(r"`([^`\n]+)`", text) + [line for line in text.splitlines() if "launch.py" in line]
    group = rf"(?<![\w./-])({'|'.join(describe.groups())})"
    unknown = set()
    for part in code:
        for name, rest in re.findall(rf"{group}\.([a-z0-9_]+(?:\.[a-z0-9_]+)*)", part):
            key = f"{name}.{rest}"
            if rest not in FILES and not any(known == key or known.startswith(f"{key}.") for known in describe.KEYS):
                unknown.add(key)
        for name, options in re.findall(rf"{group}=([a-z0-9_,]+)", part):
            stems = {file.stem for file in describe.option_files(name)}
            unknown |= {f"{name}={option}" for option in options.split(",") if option not in stems}
    return unknown - THE_READERS_OWN


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_commands_exist(page):
    words = set(re.findall(r"(?:^ *|`|\$ |\()titan ([a-z][a-z-]*)", page.read_text(), re.M))
    assert words <= set(cli.COMMANDS)


THE_READERS_OWN = {
    "cluster=mysite",
    "sweeps=layouts16",
    "model=squared_1b",
    "model.power",
    "data.at_least",
    "cluster.nice",
    "metrics.csv.separator",
    "optimizer=adagrad",
    # options that a reader of a page writes
    "precision=halves",
    "data=weighted_tokens",
}
FILES = ("md", "json", "jsonl", "py", "yaml", "model")  # metrics.jsonl is a file, not a key


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_keys_and_options_exist(page):
    assert unknown_names(page) == set()


@pytest.mark.parametrize("group", ["pp_schedule", "ac", "precision"])
def test_a_table_of_options_has_each_option(group):
    """A table whose first column is headed by `GROUP=` has a row for each file of conf/GROUP."""
    (rows,) = re.findall(
        rf"^\| `{group}=` .*\n\|---.*\n((?:\|.*\n)+)", (ROOT / "docs/parallelism.md").read_text(), re.M
    )
    assert sorted(re.findall(r"^\| `(\w+)`", rows, re.M)) == sorted(
        file.stem for file in (ROOT / f"conf/{group}").glob("*.yaml")
    )


def test_an_unknown_name_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "`data.path` `data.paht=x` `parallelism=fsdp,fspd` `metrics.jsonl`\n    python launch.py compile=on model.n_layers=2\n"
        "\n| there | here |\n|---|---|\n| `model.theirs` | `data.path` |\n| `a` | `model.ours` |\n"
    )
    assert unknown_names(page) == {"data.paht", "parallelism=fspd", "compile=on", "model.ours"}


OVERRIDE = re.compile(r"""[+~'"]*[a-z_]+(\.[a-z_]+)*=\S""")


def unreadable(page: Path) -> list[str]:
    """Return the overrides in a page's text that Hydra cannot read once the shell has taken the quotes off."""
    code = re.findall(r"`([^`]+)`", re.sub("^```.*?^```", "", page.read_text(), flags=re.S | re.M))
    words = [word for part in code if OVERRIDE.match(part) for word in shlex.split(part)]
    found = []
    for word in filter(OVERRIDE.match, words):
        try:
            OverridesParser.create().parse_override(word)
        except HydraException:
            found.append(word)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_hydra_reads_what_the_text_shows(page):
    assert unreadable(page) == []


def test_an_override_that_hydra_cannot_read_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("`seed=1` `a.b=[c=1]` `\"a.b=['c=1']\"`\n\n```sh\na.b=[c=1]\n```\nTwo `lines\nof` `a.b=;`\n")
    assert unreadable(page) == ["a.b=[c=1]", "a.b=;"]
