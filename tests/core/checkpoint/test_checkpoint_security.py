"""A checkpoint is only data: loading it never runs code from it, whatever its bytes are, and the refusal is one line."""

import enum
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

from titan_hydra.core.base.errors import CheckpointError
from titan_hydra.core.checkpoint import safe
from titan_hydra.core.job.run import checkpoints, layout


class Evil:
    """Run a command that creates a file when this object is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


@pytest.fixture
def saved(tmp_path):
    """Return a checkpoint of a tensor and a number, written by DCP itself."""
    step = tmp_path / "step-00000002"
    dcp.save({"model": {"w": torch.arange(4.0)}, "lr": 0.5}, storage_writer=dcp.FileSystemWriter(step), no_dist=True)
    return step


def loaded(step: Path, load=safe.load_checkpoint):
    state = {"model": {"w": torch.zeros(4)}, "lr": 0.0}
    load(state, step)
    return state


def dcp_load(state, step):
    dcp.load(state, storage_reader=dcp.FileSystemReader(step), no_dist=True)


def test_what_dcp_writes_is_read(saved):
    state = loaded(saved)
    assert state["lr"] == 0.5 and torch.equal(state["model"]["w"], torch.arange(4.0))


def test_an_index_that_would_run_code_is_refused(saved, tmp_path):
    content = pickle.dumps(Evil(tmp_path / "owned"))
    (saved / ".metadata").write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"\.metadata: cannot be read \(it names posix\.system, .*could run code\)$"
    ):
        loaded(saved)
    assert not (tmp_path / "owned").exists()
    pickle.loads(content)
    assert (tmp_path / "owned").exists(), "the trap is not one"


class ByName(pickle.Pickler):
    """Pickle members of enums as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, found):
        return (getattr, (type(found), found.name)) if isinstance(found, enum.Enum) else NotImplemented


def test_an_index_that_python_3_11_2_wrote_is_read(saved):
    index = safe.read_index(saved)
    with (saved / ".metadata").open("wb") as file:
        ByName(file).dump(index)
    assert b"getattr" in (saved / ".metadata").read_bytes()
    assert safe.read_index(saved) == index
    assert torch.equal(loaded(saved)["model"]["w"], torch.arange(4.0))


@pytest.mark.parametrize(
    "given",
    [
        (safe.MemoryFormat, "__class__"),
        (safe.MemoryFormat, "mro"),
        (Path, "home"),
        ("text", "format"),
        (torch.Size, "__reduce__"),
        (safe.MemoryFormat, ["TORCH_STRIDED"]),
    ],
)
def test_getattr_gives_nothing_but_a_memory_format(saved, given):
    class Asked:
        def __reduce__(self):
            return getattr, given

    (saved / ".metadata").write_bytes(pickle.dumps(Asked()))
    with pytest.raises(CheckpointError, match=r"refused|unhashable"):
        loaded(saved)


@pytest.mark.parametrize(
    "name",
    [
        "builtins.eval",
        "builtins.setattr",
        "torch.load",
        "torch.serialization.load",
        "os.system",
        "torch.distributed.checkpoint.filesystem.pickle",
        "torch.hub.load",
    ],
)
def test_only_the_classes_of_an_index_have_names(saved, name):
    module, _, attribute = name.rpartition(".")
    (saved / ".metadata").write_bytes(
        b"\x80\x04\x8c"
        + bytes([len(module)])
        + module.encode()
        + b"\x8c"
        + bytes([len(attribute)])
        + attribute.encode()
        + b"\x93."
    )
    with pytest.raises(CheckpointError, match="refused"):
        loaded(saved)


def test_a_value_that_would_run_code_is_refused(saved, tmp_path):
    """Values that are not tensors are pickled in the shards, and DCP would load them without limits."""
    shutil.rmtree(saved)
    dcp.save(
        {"model": {"w": torch.arange(4.0)}, "lr": Evil(tmp_path / "owned")},
        storage_writer=dcp.FileSystemWriter(saved),
        no_dist=True,
    )
    with pytest.raises(BaseException, match=r"(?s)Weights only load failed"):
        loaded(saved)
    assert not (tmp_path / "owned").exists()
    loaded(saved, dcp_load)
    assert (tmp_path / "owned").exists(), "the trap is not one"


@pytest.mark.filterwarnings("ignore:Detected pickle protocol 4 in the checkpoint")
def test_a_tensor_that_would_run_code_is_refused(saved, tmp_path):
    index = safe.read_index(saved)
    place = index.storage_data[MetadataIndex("model.w", [0])]
    evil = pickle.dumps(Evil(tmp_path / "owned"))
    shard = saved / place.relative_path
    content = bytearray(shard.read_bytes())
    content[place.offset : place.offset + len(evil)] = evil
    shard.write_bytes(content)
    with pytest.raises(BaseException, match=r"(?s)Error|failed"):
        loaded(saved)
    assert not (tmp_path / "owned").exists()


def test_an_index_cannot_point_out_of_its_folder(saved):
    index = safe.read_index(saved)
    for place in index.storage_data.values():
        place.relative_path = "../elsewhere"
    (saved / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match="points out of its folder"):
        loaded(saved)


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"no pickle at all", pickle.dumps([1, 2])])
def test_an_index_that_is_none_is_a_line(saved, content):
    (saved / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata: cannot be read"):
        loaded(saved)


def test_a_run_refuses_it_in_a_line(tiny, run_job, tmp_path):
    """The manifest has the right checksums: checksums protect against accidents, not against people."""
    job = tiny("steps=2", "checkpoint.interval=2")
    run = run_job(job)
    (run / "result.json").unlink()
    step = checkpoints.newest(run / "checkpoints")
    (step / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "owned")))
    files = [path for path in step.iterdir() if path.name != layout.MANIFEST.name]
    sums = {path.name: (path.stat().st_size, int(checkpoints.checksum(path), 16)) for path in files}
    checkpoints.write_manifest(step, 2, 1, sums)
    assert checkpoints.damage(step) == []
    run_job(job, run, expect=1)
    message = (run / "attempts/2/error_0").read_text()
    assert "could run code" in message and "Traceback" not in message and len(message.splitlines()) == 1
    assert not (tmp_path / "owned").exists()
