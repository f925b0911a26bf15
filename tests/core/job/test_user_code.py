"""Test which files belong to a user's module; they are found without executing any of them."""

import sys
from pathlib import Path

import pytest

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config import identity, user_code
from titan_hydra.core.job.config.files import CONF
from titan_hydra.core.job.config.user_code import digest, load_user_modules, sources
from titan_hydra.core.job.rules.checks import check
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.experiments.compose.overrides import mistakes

FILES = {
    "mine.py": "import os, json, torch, titan_hydra\nimport helper\nfrom parts import inner\nRECORD = 'lazy:build'\nraise SystemExit",
    "helper.py": "def late():\n    import late_helper\n",
    "late_helper.py": "",
    "lazy.py": "",
    "alone.py": "",
    "json.py": "# shadowed by Python's own",
    "parts/__init__.py": "",
    "parts/inner.py": "from . import sibling\nfrom ..nowhere import x\nfrom .deep.leaf import thing\n",
    "parts/sibling.py": "",
    "parts/stranger.py": "",
    "parts/deep/leaf.py": "",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in {name.partition("/")[0].removesuffix(".py") for name in FILES} - {"json"}:
        sys.modules.pop(name, None)


def test_sources_are_what_is_imported_from_the_same_folder(folder):
    assert list(sources(["mine"])) == [
        "helper.py",
        "late_helper.py",
        "lazy.py",
        "mine.py",
        "parts/__init__.py",
        "parts/deep/leaf.py",
        "parts/inner.py",
        "parts/sibling.py",
    ]
    assert list(sources(["parts.sibling"])) == ["parts/__init__.py", "parts/sibling.py"]
    assert "mine" not in sys.modules, "it was executed"


def test_of_an_installed_package_only_its_own_files_count(folder, monkeypatch):
    installed = folder / "site-packages"
    (installed / "plugin").mkdir(parents=True)
    (installed / "plugin/__init__.py").write_text("import other\nimport helper\nfrom plugin import part")
    (installed / "plugin/part.py").touch()
    (installed / "other.py").touch()
    monkeypatch.syspath_prepend(installed)
    assert list(sources(["plugin"])) == ["plugin/__init__.py", "plugin/part.py"]


def test_any_edit_that_counts_changes_the_digest_and_no_other(folder):
    before = digest(["mine"])
    (folder / "alone.py").write_text("x = 1")
    assert digest(["mine"]) == before
    (folder / "parts/deep/leaf.py").write_text("thing = 1")
    assert digest(["mine"]) != before


def test_an_edited_module_is_another_experiment(folder):
    line = ("debug=tiny", "train.imports=[helper]")
    before = compose_job(*line)
    assert identity(compose_job(*line)) == identity(before) != identity(compose_job("debug=tiny"))
    (folder / "late_helper.py").write_text("x = 1")
    assert identity(compose_job(*line)) != identity(before)
    (fault,) = check(before)
    assert str(fault).startswith(
        f"train.sources={before.train.sources}: the modules of train.imports are"
    ) and "a new run" in str(fault)
    before.train.imports = []
    assert "where train.imports names modules" in str(check(before)[0])


@pytest.mark.parametrize(
    ("module", "text", "words"),
    [
        ("nowhere", None, "there is no module nowhere"),
        ("parts.nothing", None, "there is no module parts.nothing"),
        ("a/b.py", None, "a/b.py is not the name of a module"),
        ("..up", None, "is not the name of a module"),
        ("broken", "def f(:", "broken cannot be imported: SyntaxError: "),
        ("broken", "\n1 / 0", "broken cannot be imported: ZeroDivisionError: division by zero ({}/broken.py:2)"),
        ("broken", "import sys\nsys.exit(3)", "broken cannot be imported: SystemExit: 3 ({}/broken.py:2)"),
        ("broken", "\nimport safetensors.numpy\nsafetensors.numpy.save_file(3, '/nowhere')", "({}/broken.py:3)"),
        (
            "broken",
            "import nowhere_else",
            "broken cannot be imported: ModuleNotFoundError: No module named 'nowhere_else'",
        ),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line(folder, module, text, words):
    if text is not None:
        (folder / "broken.py").write_text(text)
    (fault,) = load_user_modules([module])
    assert (
        str(fault).startswith(f"train.imports=[{module}]: ")
        and words.format(folder) in str(fault)
        and "\n" not in str(fault)
    )


def test_what_is_read_needs_no_import(folder):
    assert user_code.folders(["mine", "parts.inner", "json"])[0] == str(folder)


def test_a_job_is_composed_with_options_of_ones_own(folder):
    options = folder / "conf" / "optimizer"
    options.mkdir(parents=True)
    (options / "fast.yaml").write_text("name: adamw\nlr: 1.5\n")
    assert compose_job("optimizer=fast", "debug=tiny", config_dir=folder / "conf").optimizer.lr == 1.5
    for wrong, words in (("nowhere", "--config-dir nowhere: no such folder"), (None, "optimizer=fast: no such option")):
        with pytest.raises(ConfigError, match=words):
            compose_job("optimizer=fast", config_dir=wrong and Path(wrong))


def test_an_option_that_hydra_would_not_use_is_refused(tmp_path):
    """If the user and the package have an option of the same name, Hydra uses the package's file. So a user's
    `+sweeps=scaling` composed the package's cells for 64 GPUs.
    """
    override = "defaults:\n  - override /validation: "
    for name, text in {
        "sweeps/scaling": "sweep: {}\n",
        "model/llama3_1b": "dim: 64\n",
        "experiment/mine": f"{override}on\n",
        "experiment/broken": "defaults: [\n",
        "sweeps/mine": f'{override}"on"\n',
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text)
    hidden = [
        f"{tmp_path / name}.yaml: is never read, as the package has an option of this name, {CONF / name}.yaml; rename it"
        for name in ("model/llama3_1b", "sweeps/scaling")
    ]
    boolean = (
        f"{tmp_path}/experiment/mine.yaml: override /validation: YAML reads on and off as true and false; "
        'write "on" or "off" in quotes'
    )
    assert mistakes(["seed=1"], [CONF, tmp_path]) == [*hidden, boolean]
    assert mistakes(["seed=1"]) == []


def test_a_module_of_python_is_none_of_the_users(folder):
    """`import json` gives Python's own module, and the file beside it would never run."""
    (fault,) = load_user_modules(["json"])
    assert fault.key == user_code.KEY and "Python's own" in fault.reason
