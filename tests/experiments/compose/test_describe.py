"""The page and the help text are generated from the schema and conf/. They must be up to date, and their sources
complete.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.core.job import corpus
from titan_hydra.core.job.config import read
from titan_hydra.core.job.config.fault import as_typed
from titan_hydra.core.job.config.ranges import Interval, Text, range_of
from titan_hydra.core.job.config.schema import default_of
from titan_hydra.experiments.compose import describe
from titan_hydra.experiments.compose.compose import CONF, compose_unchecked, own_composer

ROOT = CONF.parent
OPTIONS = [(group, file) for group in describe.groups() for file in describe.option_files(group)]


def test_the_page_in_docs_is_what_the_schema_and_conf_say():
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == describe.configuration_page(), (
        "run python -m titan_hydra.experiments.compose.describe docs/configuration.md"
    )


def test_every_folder_of_conf_is_a_group_of_the_schema():
    assert {folder.name for folder in CONF.iterdir() if folder.is_dir()} <= set(describe.groups())


@pytest.mark.parametrize(("group", "file"), OPTIONS, ids=lambda value: getattr(value, "stem", value))
def test_an_option_says_when_to_choose_it_and_composes_into_the_schema(group, file):
    assert describe.when(file).endswith("."), f"{file}: the first comment line must say when to choose it"
    job, faults = read(own_composer()([f"{'+' * (group == 'sweeps')}{group}={file.stem}"]))
    assert not faults
    if group not in describe.GROUPS_OF_RECIPES:
        assert getattr(job, group).name == file.stem


def test_every_key_has_help():
    for key, spec in describe.KEYS.items():
        assert spec.metadata["help"] and not spec.metadata["help"].endswith("."), key


def test_every_key_has_a_range_or_needs_none():
    needed = {int: Interval, float: Interval, str: Text, list: Text}
    for key, spec in corpus.LEAVES.items():
        plain, group = corpus.plain_type(key), key.rpartition(".")[0]
        if plain in needed and not spec.metadata["choices"]:
            assert isinstance(range_of(spec), needed[plain]), key
        if isinstance(range_of(spec), Interval) and default_of(spec) not in (None, "???"):
            assert default_of(spec) in range_of(spec), f"{key}: the default is out of range"
        assert set(spec.metadata["only"]) <= {file.stem for file in describe.option_files(group)}, (
            f"{key}: only names options of {group}"
        )


def test_help_of_the_launcher_is_one_screen_and_its_groups_lead_to_every_option_and_key(tmp_path):
    command = [sys.executable, str(ROOT / "launch.py"), "--help"]
    text = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert max(map(len, text.splitlines())) <= 80 and len(text.splitlines()) <= 30
    words = set(re.sub(r"=[\w-]+", " ", text).split())
    assert {*describe.groups(), *describe.plain_keys()} <= words
    assert list(tmp_path.iterdir()) == []
    for group in describe.groups():
        entries = describe.help_text([group])
        assert all(f"={file.stem}**" in entries for file in describe.option_files(group))
        assert all(f"`{key}`" in entries for key in describe.keys_of(group))


def test_defaults_are_what_a_plain_line_composes():
    composed = compose_unchecked()
    for group, option in describe.plain_options().items():
        section = getattr(composed, group, None)
        if hasattr(section, "name") and isinstance(section.name, str):
            assert section.name == option, group
    for key in describe.plain_keys():
        shown = describe.help_text([key]).partition(";")[2].partition("`")[2].partition("`")[0]
        if shown and key not in ("name", "notes"):
            assert shown == as_typed(getattr(composed, key)), key


def test_writing_and_printing_give_the_same_page(tmp_path):
    module = [sys.executable, "-m", "titan_hydra.experiments.compose.describe"]
    printed = subprocess.run(module, capture_output=True, text=True, check=True).stdout
    subprocess.run([*module, str(tmp_path / "page.md")], check=True)
    assert Path(tmp_path / "page.md").read_text() == printed == describe.configuration_page()


def test_describing_imports_no_torch():
    module = "titan_hydra.experiments.compose.describe"
    code = f"import sys, {module}; {module}.configuration_page(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
