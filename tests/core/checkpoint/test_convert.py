"""Convert checkpoints to Hugging Face's format and back: the same logits in transformers, the same bytes after a round
trip, clear refusals.
"""

import json
import os
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from titan_hydra.core.base.errors import CheckpointError, ConfigError
from titan_hydra.core.checkpoint import convert
from titan_hydra.core.job.config import to_dict
from titan_hydra.core.models import build
from titan_hydra.core.models.llama3.config import Llama3Config, RopeScaling
from titan_hydra.core.models.llama3.hf import from_config, to_config

from .conversion import assert_transformers_agrees, load, loud_model, save_run, some_tokens, titan_checkpoint

SHAPES = {
    "grouped": {},
    "tied": {"tie_embeddings": True},
    "scaled8": {"rope_scaling": RopeScaling(factor=8.0, original_max_seq_len=32)},
    "scaled32": {"rope_scaling": RopeScaling(factor=32.0, original_max_seq_len=32), "n_kv_heads": 4},
}


def tiny(**changes):
    values = {
        "name": "tiny",
        "vocab_size": 99,
        "dim": 64,
        "n_layers": 3,
        "n_heads": 4,
        "n_kv_heads": 2,
        "multiple_of": 40,
        "max_seq_len": 256,
        "norm_eps": 1e-4,
        "rope_scaling": RopeScaling(factor=1.0),
    }
    return Llama3Config(**values | changes)


@pytest.fixture
def a_run(tmp_path):
    """Return a function that saves a model as a step of a run, with the other parts of a checkpoint."""

    def make(config, step=10):
        model, run = loud_model(config), tmp_path / "run"
        save_run(model, config, run, step, optimizer={"state.norm.weight.exp_avg": torch.ones(64), "lr": 1.0})
        return model, run

    return make


@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_computes_the_same_logits(shape, a_run, tmp_path):
    model, run = a_run(tiny(**SHAPES[shape]))
    titan_checkpoint("export", run, tmp_path / "hf", "--dtype", "float32")
    assert_transformers_agrees(model, tmp_path / "hf", "LlamaForCausalLM")


def test_transformers_own_folder_can_be_imported(tmp_path):
    """The folder was written by save_pretrained, with the names that the installed version of transformers uses."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = (
        transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=99,
                hidden_size=64,
                intermediate_size=100,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                rope_parameters={
                    "rope_type": "llama3",
                    "rope_theta": 5e5,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
                max_position_embeddings=256,
            )
        )
        .float()
        .eval()
    )
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="100KB")
    assert (tmp_path / "hf/model.safetensors.index.json").exists()
    titan_checkpoint("import", tmp_path / "hf", tmp_path / "checkpoint")
    config = convert.read_model_config(tmp_path / "checkpoint")
    assert config.ffn_width == 100
    model = load(build(config, 128), tmp_path / "checkpoint")
    with torch.no_grad():
        torch.testing.assert_close(model(some_tokens()), theirs(some_tokens()).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", ["tied", "scaled8"])
def test_export_import_export_gives_the_same_bytes(shape, dtype, a_run, tmp_path):
    _, run = a_run(tiny(**SHAPES[shape]))
    shard = 0.0001  # 100 kB, so that there are several files
    titan_checkpoint("export", run, tmp_path / "a", "--dtype", dtype, "--max-shard-gb", shard)
    titan_checkpoint("import", tmp_path / "a", tmp_path / "b")
    assert {
        entry.properties.dtype for entry in convert.Reader(tmp_path / "b").metadata.state_dict_metadata.values()
    } == {convert.DTYPES[dtype]}
    titan_checkpoint("export", tmp_path / "b", tmp_path / "c", "--dtype", dtype, "--max-shard-gb", shard)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "c").iterdir())
    assert len(names) > 4
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "c" / name).read_bytes(), name
    weights = list((tmp_path / "a").glob("model-*.safetensors"))
    assert all(path.stat().st_size < 110_000 for path in weights)
    index = json.loads((tmp_path / "a/model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in weights}


def test_an_export_keeps_the_stored_number_format(a_run, tmp_path, capsys):
    """An earlier version exported a float32 run in bfloat16 without a message, and a biologist's scores changed by 16
    %.
    """
    _, run = a_run(tiny())
    for dtype in ("float32", "bfloat16"):
        titan_checkpoint("export", run, tmp_path / dtype, "--dtype", dtype)
        titan_checkpoint("import", tmp_path / dtype, tmp_path / f"{dtype}_checkpoint")
        capsys.readouterr()
        titan_checkpoint("export", tmp_path / f"{dtype}_checkpoint", tmp_path / f"{dtype}_again")
        assert f"1 file of weights in {dtype};" in capsys.readouterr().out
        assert json.loads((tmp_path / f"{dtype}_again/config.json").read_text())["torch_dtype"] == dtype
        again = load_file(tmp_path / f"{dtype}_again/model.safetensors")
        assert {tensor.dtype for tensor in again.values()} == {convert.DTYPES[dtype]}


def test_an_import_holds_one_tensor_at_a_time(a_run, tmp_path, monkeypatch):
    _, run = a_run(tiny())
    titan_checkpoint("export", run, tmp_path / "hf")
    alive, most = weakref.WeakSet(), 0

    class Watched(convert.LazySavePlanner):
        def lookup_object(self, index):
            nonlocal most
            tensor = super().lookup_object(index)
            alive.add(tensor)
            most = max(most, len(alive))
            return tensor

    monkeypatch.setattr(convert, "LazySavePlanner", Watched)
    titan_checkpoint("import", tmp_path / "hf", tmp_path / "checkpoint")
    assert 1 <= most <= 2  # two, because the next tensor is read before the name of the last one is bound again


def test_what_ranks_saved_in_parts_is_exported_whole(tmp_path):
    config = tiny(vocab_size=97)  # an odd number of rows, which two ranks split unevenly
    whole = loud_model(config).state_dict()
    folder = tmp_path / "checkpoints/step-00000001"
    context = torch.multiprocessing.get_context("fork")
    ranks = [context.Process(target=_save_half, args=(rank, whole, folder, tmp_path)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
        assert rank.exitcode == 0
    (tmp_path / "config.json").write_text(json.dumps({"model": to_dict(config)}))
    reader = convert.Reader(folder)
    assert len(reader.metadata.state_dict_metadata["model.output.weight"].chunks) == 2
    for name, tensor in whole.items():
        assert torch.equal(reader.tensor(name, tensor.shape, torch.float32), tensor), name
    titan_checkpoint("export", tmp_path, tmp_path / "hf")


def _save_half(rank, whole, folder, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    state = {"model": {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))
    os._exit(0)


def test_newest_complete_step_of_a_run_is_taken(a_run):
    for step in (2, 9, 10):
        _, run = a_run(tiny(), step)
    (run / "checkpoints/step-00000010").rename(run / "checkpoints/step-00000010.writing")
    newest = run / "checkpoints/step-00000009"
    assert [convert.find_checkpoint(path) for path in (run, run / "checkpoints", newest)] == [newest] * 3


def test_config_can_lie_elsewhere(a_run, tmp_path):
    _, run = a_run(tiny())
    (run / "config.json").rename(tmp_path / "elsewhere.json")
    with pytest.raises(ConfigError, match=r"config.json: no such file; .*--config"):
        titan_checkpoint("export", run, tmp_path / "hf")
    titan_checkpoint("export", run, tmp_path / "hf", "--config", tmp_path / "elsewhere.json")


def test_exports_that_cannot_be_are_refused_in_one_line(a_run, tmp_path):
    _, run = a_run(tiny())
    step = run / "checkpoints/step-00000010"
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    empty = tmp_path / "empty"
    empty.mkdir()
    for source, target, message in [
        (tmp_path / "nowhere", "hf", "nowhere: no such folder"),
        (empty, "hf", "not a complete checkpoint"),
        (step, "full", "full: exists and is not empty"),
        (step, "full/file/hf", "cannot be written"),
    ]:
        with pytest.raises(ConfigError, match=message) as error:
            titan_checkpoint("export", source, tmp_path / target)
        assert "\n" not in str(error.value)
    for changes, message in [
        ({"dim": 128}, r"model.tok_embeddings.weight is \(99, 64\), .* \(99, 128\)"),
        ({"n_layers": 4}, r"model.layers.3.* is nothing"),
        ({"tie_embeddings": True}, r"model.output.weight .*nothing"),
        ({"family": "other"}, "model.family=other"),
    ]:
        (tmp_path / "other.json").write_text(json.dumps({"model": to_dict(tiny(**changes))}))
        with pytest.raises(ConfigError, match=message):
            titan_checkpoint("export", step, tmp_path / "hf", "--config", tmp_path / "other.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"not the config\.json of a run"):
        titan_checkpoint("export", step, tmp_path / "hf", "--config", tmp_path / "other.json")
    assert not (tmp_path / "hf").exists()


def test_a_model_key_that_has_left_is_named_with_its_value(a_run, tmp_path):
    _, run = a_run(tiny())
    content = json.loads((run / "config.json").read_text())
    content["model"]["of_former_days"] = 3
    (run / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"config\.json: model\.of_former_days=3: .* wrote it") as refused:
        convert.read_model_config(run)
    assert str(refused.value).count("\n") == 0


def test_a_damaged_checkpoint_is_named(a_run, tmp_path):
    _, run = a_run(tiny())
    part = next((run / "checkpoints").glob("*/__0_0.distcp"))
    part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=r"model\..* cannot be read; the checkpoint is damaged"):
        titan_checkpoint("export", run, tmp_path / "hf")
    assert not (tmp_path / "hf/config.json").exists()  # so no program can mistake the folder for a complete one
    metadata = part.parent / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r".metadata: cannot be read"):
        titan_checkpoint("export", run, tmp_path / "hf2")


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("model_type", "mistral", "model_type=mistral: only llama, qwen3, qwen3_moe, deepseek_v3"),
        ("attention_bias", True, "attention_bias=True"),
        ("head_dim", 32, r"q_proj.weight is \(64, 64\); the model needs \(128, 64\)"),
        ("rope_scaling", {"rope_type": "yarn"}, "rope_type=yarn: only llama3 or default"),
        ("num_hidden_layers", 4, "has no model.layers.3.self_attn.q_proj.weight"),
        ("vocab_size", 100, r"model.embed_tokens.weight is \(99, 64\); the model needs \(100, 64\)"),
        ("vocab_size", None, "lacks 'vocab_size'"),
    ],
)
def test_imports_that_cannot_be_are_refused(key, value, message, a_run, tmp_path):
    _, run = a_run(tiny())
    titan_checkpoint("export", run, tmp_path / "hf")
    file = tmp_path / "hf/config.json"
    changed = json.loads(file.read_text()) | {key: value}
    file.write_text(json.dumps({name: changed[name] for name in changed if changed[name] is not None}))
    with pytest.raises(ConfigError, match=message) as error:
        titan_checkpoint("import", tmp_path / "hf", tmp_path / "checkpoint")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("width", [100, 171, 8192])
def test_any_feed_forward_width_survives(width, tmp_path):
    data = to_config(tiny(), torch.float32) | {"intermediate_size": width}
    assert from_config(data, tmp_path / "config.json").ffn_width == width
