"""Reading a checkpoint runs no code from it. DCP keeps its index, `.metadata`, as a pickle, and reads what is not a tensor with an
unrestricted torch.load; here the index may name only the classes it is made of, and everything else goes through weights_only=True.
"""
from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from titan_hydra.config.status import CheckpointError

CLASSES = {(kind.__module__, kind.__qualname__): kind for kind in (
    metadata.Metadata, metadata.TensorStorageMetadata, metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata,
    metadata.TensorProperties, metadata.MetadataIndex, metadata.StorageMeta, metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo,
)}
CLASSES |= {("torch", "Size"): torch.Size, ("torch.serialization", "_get_layout"): torch.serialization._get_layout}
CLASSES |= {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
# Where the checkpoint was written, which nobody reads back: any path becomes a text.
CLASSES |= {(module, name): lambda *parts: "/".join(map(str, parts))
            for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")}


class Unpickler(pickle.Unpickler):
    """Knows the classes of DCP's index and no others; what a pickle can call is only these."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in CLASSES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs: refused, as it could run code")
        return CLASSES[module, name]


class Reader(dcp.FileSystemReader):
    """DCP's reader with an index that cannot run code. Raises CheckpointError where that cannot be read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.index = read_index(path)
        self.index.storage_meta = metadata.StorageMeta(load_id=self.load_id)

    def read_metadata(self) -> Metadata:
        """The index, read once: it can be large."""
        return self.index


class Planner(dcp.DefaultLoadPlanner):
    """DCP's planner, which reads what is not a tensor (learning rates, flags) without running it."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value in its place in the state dict."""
        place = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, place, torch.load(value, weights_only=True))


def read_index(path: Path) -> Metadata:
    """A checkpoint's `.metadata`. Raises CheckpointError for one that is cut short, is not DCP's, or wants to run code."""
    file = path / ".metadata"
    try:
        with file.open("rb") as stream:
            index = Unpickler(stream).load()
        if type(index) is not Metadata or not isinstance(index.storage_data, dict):
            raise ValueError("not the index of a checkpoint")
        for entry in index.storage_data.values():
            if Path(entry.relative_path).name != entry.relative_path:
                raise ValueError(f"it points out of its folder, to {entry.relative_path}")
    except Exception as error:  # bytes of any kind may be in there
        raise CheckpointError(f"{file}: cannot be read ({error})") from error
    return index


def load(state: dict[str, Any], path: Path, group: Any = None, no_dist: bool = False) -> None:
    """Fill a state dict in place from a checkpoint folder, whatever layout wrote it. Raises what DCP raises."""
    dcp.load(state, storage_reader=Reader(path), planner=Planner(), process_group=group, no_dist=no_dist)
