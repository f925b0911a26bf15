"""A cell has the configuration that Hydra itself would compose, for everything that Hydra's grammar allows. A command
line gives the right cells.
"""

import functools
import random
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict

from tests.core.job import corpus
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.experiments.compose.cells import Composer, combinations, with_count
from titan_hydra.experiments.compose.compose import CONF, register_schema

# a user's folder: plain options, options that set other groups, nested groups, interpolated lists of defaults
OWN = {
    "model/mine": "name: mine\nvocab_size: 4096\ndim: ${data.seq_len}\nn_layers: 2\nn_heads: 4\nn_kv_heads: 4",
    "model/family/small": "name: small\nvocab_size: 4096\ndim: 64\nn_layers: 2\nn_heads: 4\nn_kv_heads: 4",
    "optimizer/warm": "# @package _global_\noptimizer: {name: sgd, lr: 0.5}\nlr_scheduler: {warmup_steps: 77}",
    "lr_scheduler/late": "defaults: [cosine, _self_]\nwarmup_steps: 99",
    "experiment/nested": """# @package _global_
defaults: [{override /model: llama3_1b}, {override /optimizer: muon}]
steps: 33
optimizer: {muon_lr: 0.5}""",
    "paired": """# @package _global_
defaults: [schema, {model: llama3_1b}, {parallelism: fsdp}, {precision: bf16}, {optional pair: "${precision}_${parallelism}"}, _self_]
steps: 44""",
    "pair/fp32_tp": "# @package _global_\nseed: 4321\nprecision: {reduce_dtype: bfloat16}",
    "broken/file": "# @package _global_\nsteps: [",
    "sweeps/own": """# @package _global_
defaults: [{override /data: synthetic}]
sweep: {name: own, cells: {a: [steps=5], b: [parallelism=tp]}}""",
}
GROUPS = {
    group: [file.stem for file in (CONF / group).glob("*.yaml")]
    for group in (
        "model",
        "parallelism",
        "pp_schedule",
        "ac",
        "precision",
        "compile",
        "optimizer",
        "lr_scheduler",
        "loss",
        "data",
        "checkpoint",
        "validation",
        "metrics",
        "cluster",
        "debug",
        "fault_tolerance",
    )
}
ODD = [
    "+sweeps=own",
    "+sweeps=laptop_layouts",
    "experiment=llama3_8b_c4",
    "experiment=nested",
    "model=mine",
    "model=family/small",
    "optimizer=warm",
    "lr_scheduler=late",
    "+broken=file",
    "debug=tiny",
    "~experiment",
    "~debug",
    "~debug=off",
    "~seed",
    "~cluster.sbatch",
    "+model.rope_scaling.width=3",
    "+cluster.sbatch={a: 1, b: [2]}",
    "++steps=8",
    "+steps=8",
    "+new=1",
    "+new.key=${seed}",
    "steps=${seed}",
    "name=${model.name}-${oc.env:HOME}",
    "notes='${steps}, \\'quoted\\''",
    "seed=${nothing}",
    "data={name: synthetic}",
    "model.rope_scaling={factor: 16}",
    "metrics.trackers=[wandb]",
    "++cluster.environment={A: b}",
    "+cluster.sbatch.mem=0",
    "model=[llama3_1b]",
    "model@other=llama3_1b",
    "+model@other=llama3_1b",
    "hydra.job.name=x",
    "hydra.verbose=true",
    "steps=1,2",
    "hydra/job_logging=none",
    "model=nosuch",
    "stesp=3",
    "steps=x",
    "model.dim=null",
    "sweep.cell=a",
    "precision=fp32",
    "parallelism=tp",
]


@pytest.fixture(scope="module")
def composers(tmp_path_factory):
    """Return two composers, Hydra's own and ours, that also search a folder as if --config-dir had added it."""
    folder = tmp_path_factory.mktemp("own")
    for name, text in OWN.items():
        (folder / f"{name}.yaml").parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.yaml").write_text(text)
    register_schema()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        sources = GlobalHydra.instance().config_loader().get_search_path()
        sources.prepend(provider="command-line", path=f"file://{folder}", anchor="schema")
        loader = type(GlobalHydra.instance().config_loader())(sources)
        GlobalHydra.instance().hydra.config_loader = loader
        yield functools.partial(by_hydra, loader), Composer(loader)


def by_hydra(loader, overrides, config_name="config"):
    """Return a configuration as @hydra.main gives it to a function."""
    config = loader.load_configuration(config_name, overrides, RunMode.RUN)
    with open_dict(config):
        del config["hydra"]
    return config


def drawn(draw: random.Random) -> list[str]:
    """Draw a command line: options, values, and sometimes an unusual form."""
    groups = draw.sample(list(GROUPS), draw.choice([0, 0, 1, 1, 2, 3, 4]))
    line = [f"{group}={draw.choice(GROUPS[group])}" for group in groups] + draw.sample(ODD, draw.choice([0, 1, 1, 2]))
    for key in draw.sample(list(corpus.LEAVES), draw.choice([0, 1, 2, 3])):
        line += [f"{key}={value}" for value in corpus.inside(corpus.LEAVES[key], corpus.plain_type(key), draw)[:1]]
    draw.shuffle(line)
    return line


def outcome(composition, overrides):
    """Return all visible properties of a configuration (order, types, flags, interpolations), or of the exception."""
    try:
        config = composition(list(overrides))
    except Exception as error:
        causes = [error]
        while causes[-1].__cause__:
            causes.append(causes[-1].__cause__)
        return [(type(cause).__name__, str(cause)) for cause in causes]
    types = {key: OmegaConf.get_type(config, key) for key in config if not OmegaConf.is_interpolation(config, key)}
    return (
        OmegaConf.to_yaml(config),
        types,
        OmegaConf.is_struct(config),
        {key: config._get_node(key)._get_flag("struct") for key in config},
    )


@pytest.mark.parametrize(("seed", "number"), [(0, 40), pytest.param(1, 800, marks=pytest.mark.slow)])
def test_a_cell_is_what_hydra_composes(composers, seed, number):
    hydras, ours = composers
    draw = random.Random(seed)
    for _ in range(number):
        line = drawn(draw)
        expected, found = outcome(hydras, line), outcome(ours, line)
        assert found == expected, line


def test_groups_whose_options_know_of_each_other_are_not_taken_apart(composers):
    hydras, ours = composers
    for line in (
        ["optimizer=warm", "lr_scheduler=constant"],
        ["debug=tiny", "lr_scheduler=cosine", "metrics=wandb"],
        ["experiment=nested", "optimizer=sgd", "model=mine", "ac=op"],
        ["lr_scheduler=late", "ac=op", "precision=fp32"],
    ):
        assert outcome(ours, line) == outcome(hydras, line)
    paired, line = Composer(ours.loader, "paired"), ["precision=fp32", "parallelism=tp"]
    assert outcome(paired, line) == outcome(lambda overrides: hydras(overrides, "paired"), line)
    assert paired(line).seed == 4321


def test_each_option_is_composed_once_however_they_are_combined(composers):
    ours = Composer(composers[1].loader)
    for parallelism in ("ddp", "fsdp", "tp", "pp"):
        for precision in ("bf16", "fp32"):
            for ac in ("none", "op", "full"):
                ours([f"parallelism={parallelism}", f"precision={precision}", f"ac={ac}", "seed=3"])
    assert len(ours.composed) == 1 + 4 + 2 + 3


def cells(*overrides):
    return combinations(OverridesParser.create().parse_overrides(list(overrides)))


def test_cells_are_every_combination_in_order():
    assert cells("seed=1,2", "steps=range(3,5)", "ac=op", "~debug") == [
        ["seed=1", "steps=3", "ac=op", "~debug=null"],
        ["seed=1", "steps=4", "ac=op", "~debug=null"],
        ["seed=2", "steps=3", "ac=op", "~debug=null"],
        ["seed=2", "steps=4", "ac=op", "~debug=null"],
    ]


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("steps=range(0,0)", "the sweep has no cell"),
        ("seed=range(1000000000000)", "more cells than 10,000"),
        ("seed=interval(1,2)", "give the values"),
    ],
)
def test_a_sweep_has_cells_and_not_too_many(override, text):
    with pytest.raises(ConfigError, match=text):
        cells(override)


def test_a_counter_is_shown_only_where_it_takes_long(capsys, monkeypatch):
    times = iter([0.0, 0.2, 0.4, 0.9, 1.1, 1.2, 1.3])
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    assert list(with_count("abc", "composed")) == ["a", "b", "c"] and capsys.readouterr().err == ""
    assert list(with_count("ab", "composed")) == ["a", "b"]
    assert Path(capsys.readouterr().err) == Path()
