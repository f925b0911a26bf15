"""Check the walls between rooms: which package may import which others, and which may not import torch."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "titan_hydra"
BASE = {"core/base", "core/job"}
CORE = BASE | {f"core/{room}" for room in ("models", "parallel", "kernels", "data", "checkpoint", "train")}
EXPERIMENTS = {f"experiments/{room}" for room in ("compose", "runs", "report", "plan", "launch")}
ALLOWED = {  # the rooms of the four wings, and which others each may import, anywhere in a file
    "core/base": set(),
    "core/job": {"core/base"},
    "core/models": BASE | {"core/kernels", "core/parallel"},  # only sharding.py files import parallel, for its styles
    "core/kernels": BASE,
    "core/parallel": BASE | {"core/kernels"},
    "core/data": BASE,
    "core/checkpoint": BASE | {"core/models", "core/kernels", "core/parallel", "core/data"},
    "core/train": CORE,
    "experiments/compose": BASE,
    "experiments/runs": CORE | {"experiments/compose"},
    "experiments/report": BASE | {"experiments/compose", "experiments/runs"},
    "experiments/plan": CORE | {"experiments/compose", "experiments/runs", "experiments/report"},
    "experiments/launch": CORE | EXPERIMENTS,
    **{f"instruments/{name}": CORE | EXPERIMENTS for name in ("rates", "scaling", "search", "verify")},
    **{f"recipes/{name}": CORE | EXPERIMENTS for name in ("chat", "flux", "transformers")},
    **{f"recipes/{name}": CORE | EXPERIMENTS | {"recipes/chat"} for name in ("image_text", "policy")},
}
# an instrument or a recipe may have been deleted
WHOLE = all((PACKAGE / room).is_dir() for room in ALLOWED)
ALLOWED = {room: others for room, others in ALLOWED.items() if room in CORE | EXPERIMENTS or (PACKAGE / room).is_dir()}
# files of a recipe that only `titan verify` imports, and that may import it: cases, float64 references
PROOFS = ("cases.py", "exact.py")
NO_TORCH = (
    "core/base",
    "core/job",
    "core/train/worker.py",
    "experiments",
    "instruments/rates",
    "instruments/scaling",
    "instruments/search",
    *(f"instruments/verify/{name}.py" for name in ("case", "matrix", "many", "scaled", "reduce")),
    *(file.relative_to(PACKAGE).as_posix() for file in (PACKAGE / "instruments/verify").glob("command_*.py")),
    "cli.py",
    "extend.py",
    "notebook.py",
    "core/models/__init__.py",
    *(
        f"core/models/{family}/{file}.py"
        for family in ("llama3", "qwen3", "qwen3_moe", "deepseek_v3")
        for file in ("__init__", "config")
    ),
    "core/models/sparse.py",
    *(
        file.relative_to(PACKAGE).as_posix()
        for name in (
            "config",
            "sources",
            "rules",
            "images",
            "rows",
            "conversations",
            "template",
            "cases",
            "*_command",
        )
        for file in PACKAGE.glob(f"recipes/*/{name}.py")
    ),
)


def room_of(module: str) -> str:
    """Return the room of a dotted name below titan_hydra: its wing and the folder in it."""
    parts = module.split(".")[1:]
    return "/".join(parts[:2]) if len(parts) > 1 and (PACKAGE / parts[0] / parts[1]).is_dir() else parts[0]


def imported_rooms(file: Path) -> set[str]:
    """Return the rooms of titan_hydra that a file imports, anywhere in it."""
    rooms = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module] + [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        rooms |= {room_of(name) for name in names if name.startswith("titan_hydra.")}
    return {room for room in rooms if "/" in room}


def test_a_model_knows_nothing_of_ranks():
    """In a model family only sharding.py knows of ranks. A family's keys and its record need no torch, because login
    nodes check cells.
    """
    for file in [*(PACKAGE / "core/models").rglob("*.py"), *(PACKAGE / "recipes").rglob("model.py")]:
        assert file.name == "sharding.py" or "core/parallel" not in imported_rooms(file), file
        if file.name in ("model.py", "layers.py"):
            assert "torch.distributed" not in file.read_text(), file


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_run_one_way(room):
    for file in (PACKAGE / room).rglob("*.py"):
        proofs = {"instruments/verify"} if room.startswith("recipes/") and file.name in PROOFS else set()
        assert imported_rooms(file) <= ALLOWED[room] | {room} | proofs, file


def imported_files(file: Path) -> set[Path]:
    """Return the files of titan_hydra that a file imports, anywhere in it, and the `__init__.py` of their folders."""
    modules = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            own = file.relative_to(PACKAGE.parent).parts[: -node.level] if node.level else ()
            module = ".".join([*own, *([node.module] if node.module else [])])
            modules |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    paths = [PACKAGE.parent / module.replace(".", "/") for module in modules if module.startswith("titan_hydra.")]
    folders = {
        folder
        for path in paths
        for folder in (path, *path.parents)
        if folder.is_relative_to(PACKAGE) and folder != PACKAGE
    }
    return {found for path in paths for found in [path.with_suffix(".py")] if found.is_file()} | {
        folder / "__init__.py" for folder in folders if folder.is_dir()
    }


def test_the_schema_stands_below_what_follows_from_a_job():
    """Files in core/job/rules import the files of core/job, and these import core/job/config. So no file that core/job/*.py
    imports, directly or through other files, may import core/job/*.py.
    """
    derived = {file for file in (PACKAGE / "core/job").glob("*.py") if file.name != "__init__.py"}
    below, new = set(), derived
    while new:
        below |= new
        new = {other for file in new for other in imported_files(file)} - below
    above = {file for file in (PACKAGE / "core/job").rglob("*.py") if imported_files(file) & derived} - derived
    assert PACKAGE / "core/job/config/schema.py" in below and PACKAGE / "core/job/rules/checks.py" in above
    assert not above & below


def test_other_rooms_ask_the_rules_for_checks_alone():
    """Other rooms import only the checks from core/job/rules; facts that are derived from a job are in core/job."""
    asked = {
        alias.name
        for file in PACKAGE.rglob("*.py")
        if not file.is_relative_to(PACKAGE / "core/job") and not file.is_relative_to(PACKAGE / "experiments/compose")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("titan_hydra.core.job.rules")
        for alias in node.names
    }
    assert {"checks", "check", "warnings"} <= asked <= {"checks", "check", "warnings", "sources_find_little_wrong"}


def test_the_package_consists_of_these_wings_and_rooms():
    wings = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert wings == {room.partition("/")[0] for room in ALLOWED}
    assert {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.glob("*/*/__init__.py")} == set(ALLOWED)


# Folders of tests that do not belong to one room: tests of verify, which are the acceptance matrix; tests of all rooms
# on a CUDA device, and on a pretended one; tests on a real SLURM, and on a stand-in for Kubernetes.
OTHER_TESTS = {"equivalence", "gpu", "kubernetes", "pretended_cuda", "slurm"}


def test_the_tests_of_a_room_stand_in_its_folder():
    """Tests that do not belong to a single room have a folder of their own."""
    folders = {file.relative_to(TESTS).parent.as_posix() for file in TESTS.glob("*/**/test_*.py")}
    assert {folder for folder in folders if not (PACKAGE / folder).is_dir()} <= OTHER_TESTS


WORDS = {  # of each executor for a cluster: names that only its folder may contain
    "slurm": r"squeue|sacct|scancel|scontrol|sinfo|srun|sbatch(?!\.sh)|SLURM_|[\"']slurm[\"']",
    "kubernetes": r"kubectl|\bpods?\b|[Kk]ueue|kubernetes\.io|batch/v1|DisruptionTarget|[\"']kubernetes[\"']",
}


@pytest.mark.parametrize("executor", WORDS)
def test_what_a_cluster_calls_things_is_known_in_its_folder_alone(executor):
    """Only an executor's folder contains the names of its scheduler, except the name of a file in layout.py and the list of
    executors. No file compares an executor's name.
    """
    words, folder = (
        re.compile(rf"{WORDS[executor]}|executor [!=]=|executors\.{executor}"),
        PACKAGE / "experiments/launch/executors",
    )
    for file in PACKAGE.rglob("*.py"):
        if not file.is_relative_to(folder / executor) and file != folder / "__init__.py":
            assert not words.search(file.read_text()), file


def test_threads_of_a_rank_have_its_device():
    """Threads are created in one place, which gives them the rank's GPU. Only the wings beside core create other
    threads, which use no GPU.
    """
    for room in ("core/data", "core/checkpoint", "core/train", "core/models", "core/parallel", "recipes"):
        for file in (PACKAGE / room).rglob("*.py"):
            assert not re.search(r"\bThread\(|ThreadPoolExecutor\(", file.read_text()), file


def test_login_node_modules_import_no_torch():
    files = [
        file
        for place in NO_TORCH
        for file in ([PACKAGE / place] if place.endswith(".py") else (PACKAGE / place).rglob("*.py"))
        if file.exists() and (file.name not in PROOFS or "instruments/verify" in ALLOWED)
    ]
    modules = [".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) for file in files]
    heavy = ("torch", "optuna", "datasets", "wandb", "tiktoken", "matplotlib")
    code = f"""import importlib, sys
for module in {modules}:
    importlib.import_module(module)
    assert not (found := [name for name in {heavy} if name in sys.modules]), (module, found)"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_files_stay_short():
    for file in [*PACKAGE.rglob("*.py"), *TESTS.rglob("*.py"), PACKAGE.parent / "launch.py"]:
        assert len(file.read_text().splitlines()) <= 450, file


# Members that look private to this check but are allowed: members of foreign classes that our subclasses override or
# use, and public members of Python.
INHERITED = {
    (
        "experiments/launch/executors/slurm/sbatch.py",
        "_make_submission_file_text",
    ): "submitit.slurm.slurm:SlurmExecutor",
    ("core/parallel/whole.py", "_apply"): "torch.distributed.tensor.parallel.style:ParallelStyle",
    ("recipes/transformers/sharding.py", "_apply"): "torch.distributed.tensor.parallel.style:ParallelStyle",
    ("core/parallel/pipeline.py", "_validate_fwd_outputs"): None,  # only in torch 2.11, as is the next
    ("core/parallel/pipeline.py", "_get_init_p2p_neighbors_ops"): None,
    ("core/parallel/simple_fsdp.py", "_parameters"): None,  # a member of a module, not of its class
    ("core/train/muon.py", "_step_supports_amp_scaling"): None,  # read by `getattr`
}
PYTHON = {"os._exit", "sys._current_frames"}  # both are documented


def is_private(name: object) -> bool:
    return isinstance(name, str) and any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def own_names(tree: ast.AST) -> set[str]:
    """Return the functions, classes and attributes that a file defines itself. A name that the file reads as `self._x`
    or `module._x` may be one of these.
    """
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) in ("self", "cls")
        ):
            names.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def foreign_privates(tree: ast.AST) -> set[str]:
    """Return the private members that a file imports or reads, as `torch.x._y` or `_y`, except those that it defines
    itself.
    """
    own, found = own_names(tree), set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and not node.level
            and node.module.partition(".")[0] not in ("titan_hydra", "__future__")
        ):
            found |= {name for alias in node.names if is_private(name := f"{node.module}.{alias.name}")}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if is_private(alias.name)}
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and ast.unparse(node) not in PYTHON:
            found |= {node.attr} - (own if ast.unparse(node.value) in ("self", "cls", "super()") else set())
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("getattr", "hasattr", "setattr")
            and len(node.args) > 1
        ):
            name = node.args[1]
            found |= {name.value} if isinstance(name, ast.Constant) and is_private(name.value) else set()
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch.optim import _muon",
        "from hydra._internal.utils import get_args_parser",
        "mesh._flatten('x')",
        "getattr(weight, '_tensor', None)",
        "torch._foreach_norm(x)",
        "self._stages",
        "job._process",
    ],
)
def test_private_members_are_seen(source):
    assert foreign_privates(ast.parse(source))


def test_private_members_of_libraries_stand_in_one_file():
    for file in PACKAGE.rglob("*.py"):
        name = file.relative_to(PACKAGE).as_posix()
        if name != "core/base/private.py":
            known = {member for place, member in INHERITED if place == name}
            assert foreign_privates(ast.parse(file.read_text())) <= known, file


def test_private_members_exist_and_are_used():
    from titan_hydra.core.base import private

    used = "\n".join(file.read_text() for file in PACKAGE.rglob("*.py") if file.name != "private.py")
    for name in private.MEMBERS:
        member = getattr(private, name)
        assert member is not None and (re.search(rf"\b{name}\b", used) or not WHOLE), name
        assert not hasattr(member, "__deprecated__"), f"{name}: {member.__deprecated__}"
    for (_, member), place in INHERITED.items():
        if place:
            module, _, kind = place.partition(":")
            assert hasattr(getattr(importlib.import_module(module), kind), member), member


def test_functions_fit_a_screen():
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 50, (file, node.name)


# Names that several files give to functions with the same meaning, so that callers can rely on these names. Sections of
# the schema have the names of the parts that they configure.
CONVENTIONS = {
    "add_arguments",
    "apply",
    "before_forward",
    "build",
    "convert",
    "faults",
    "flops",
    "from_config",
    "linears",
    "main",
    "parameters",
    "plain",
    "plan",
    "to_config",
}
SECTIONS = {"Metrics", "Objective", "Tokenizer"}


def test_public_names_are_unique():
    places: dict[str, list[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        for node in ast.parse(file.read_text()).body if "assets" not in file.parts else ():
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(file.relative_to(PACKAGE).as_posix())
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert {name: files for name, files in twice.items() if name not in CONVENTIONS | SECTIONS} == {}
    assert twice.keys() >= CONVENTIONS or not WHOLE
    assert all(
        len(twice[name]) == 2 and {"core/job/config/schema.py", "core/job/config/operation.py"} & set(twice[name])
        for name in SECTIONS
    )
