"""Read a checkpoint without running code from it. DCP stores its index, `.metadata`, as a pickle, and reads values that
are not tensors with an unrestricted torch.load. Here an index that names other classes than CLASSES is refused, and all
other values are read with weights_only=True.
"""

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.metadata import Metadata

from titan_hydra.core.base.errors import CheckpointError
from titan_hydra.core.base.private import MemoryFormat, StorageInfo, get_layout

from .planner import LoadPlanner

# DCP prints this warning even if a single process is used on purpose
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

CLASSES = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        metadata.Metadata,
        metadata.TensorStorageMetadata,
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.TensorProperties,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        MemoryFormat,
        StorageInfo,
    )
}
CLASSES |= {("torch", "Size"): torch.Size, ("torch.serialization", "_get_layout"): get_layout}
CLASSES |= {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def member(kind: Any, name: Any) -> Any:
    """Return a memory format by its name. This function replaces getattr, which Python 3.11.0 to 3.11.3 write into the
    pickle of an Enum's member (cpython#105332). Raises UnpicklingError for any other attribute.
    """
    if kind is not MemoryFormat or name not in MemoryFormat.__members__:
        raise pickle.UnpicklingError(
            f"it asks for {name} of {kind}, which no checkpoint needs: refused, as it could run code"
        )
    return MemoryFormat[name]


CLASSES["builtins", "getattr"] = member
# The index may contain the path at which the checkpoint was written. This path is read as a string and never used.
CLASSES |= {
    (module, name): lambda *parts: "/".join(map(str, parts))
    for module in ("pathlib", "pathlib._local")
    for name in ("PosixPath", "WindowsPath")
}


class Unpickler(pickle.Unpickler):
    """An unpickler that can call the classes of DCP's index and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in CLASSES:
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which no checkpoint needs: refused, as it could run code"
            )
        return CLASSES[module, name]


class SafeReader(dcp.FileSystemReader):
    """DCP's reader, with an index that is read without running code. Raises CheckpointError if it cannot be read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.index = read_index(path)
        self.index.storage_meta = metadata.StorageMeta(load_id=self.load_id)

    def read_metadata(self) -> Metadata:
        """Return the index that __init__ has read. It can be too large to be read again for each tensor."""
        return self.index


def read_index(path: Path) -> Metadata:
    """Read a checkpoint's `.metadata`. Raises CheckpointError if it is truncated, is not DCP's, or would run code."""
    file = path / ".metadata"
    try:
        with file.open("rb") as stream:
            index = Unpickler(stream).load()
        if type(index) is not Metadata or not isinstance(index.storage_data, dict):
            raise ValueError("not the index of a checkpoint")
        for entry in index.storage_data.values():
            if Path(entry.relative_path).name != entry.relative_path:
                raise ValueError(f"it points out of its folder, to {entry.relative_path}")
    except Exception as error:  # unpickling arbitrary bytes may raise any exception
        raise CheckpointError(f"{file}: cannot be read ({error})") from error
    return index


def check_readable(path: Path) -> None:
    """Read a checkpoint's index and one tensor (the one with the fewest parts), in the same way as a resumed run.
    Raises CheckpointError if one of them cannot be read.
    """
    reader = SafeReader(path)
    tensors = {
        name: entry
        for name, entry in reader.index.state_dict_metadata.items()
        if isinstance(entry, metadata.TensorStorageMetadata)
    }
    name = min(tensors, key=lambda name: (len(tensors[name].chunks), tensors[name].size.numel()))
    state = {name: torch.empty(tensors[name].size, dtype=tensors[name].properties.dtype)}
    try:
        dcp.load(state, storage_reader=reader, planner=LoadPlanner(), no_dist=True)
    except (Exception, dcp.CheckpointException) as error:
        raise CheckpointError(f"{path}: {name} cannot be read back ({error})") from error


def load_checkpoint(state: dict[str, Any], path: Path, group: Any = None) -> None:
    """Load a checkpoint of any layout into a state dict, in place. Raises what DCP raises."""
    dcp.load(state, storage_reader=SafeReader(path), planner=LoadPlanner(), process_group=group)
