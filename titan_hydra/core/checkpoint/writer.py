"""Write one step with an extension of DCP's writer, which also computes checksums, adds the rank's own file and the
manifest, and renames the folder.

All of this happens inside DCP's two collectives (plan and write), in the thread in which DCP saves, so that DCP reports
a failure on one rank to all ranks.
"""

import errno
import io
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from titan_hydra.core.base.threads import device_setter
from titan_hydra.core.job.run import checkpoints

from . import safe

SUMS = ""  # name of the entry in a rank's results that contains (size, CRC-32) of each file that the rank has written
SPARE = 2**20  # bytes that a save needs in addition to those of its tensors, for the index and the ranks' own files


class Writer(dcp.FileSystemWriter):
    """Writes a step to `path`.writing and renames it to `path` when every rank has written its part.

    `own` is (name, content) of this rank's own file. With `check`, a part of the step is read back before the rename.
    `done` is called on rank 0 after the rename. `held_out` is the held-out loss of the weights, if it was measured.
    """

    def __init__(
        self,
        path: Path,
        step: int,
        world_size: int,
        own: tuple[str, str] | None = None,
        done: Callable[[], None] = lambda: None,
        check: bool = True,
        held_out: float | None = None,
    ) -> None:
        """Prepare a save; `done` is called on this rank after it, and `held_out` is the loss that is recorded with the
        step.
        """
        self.final, self.writing = path, path.with_name(path.name + checkpoints.WRITING)
        super().__init__(self.writing, sync_files=True)
        self.set_device = device_setter()
        self.fs: SummingFiles = SummingFiles()
        self.step, self.world_size, self.own, self.done, self.check, self.held_out = (
            step,
            world_size,
            own,
            done,
            check,
            held_out,
        )

    def set_up_storage_writer(self, is_coordinator: bool, *args, **kwargs) -> None:
        """On rank 0, delete what an earlier try has left before the ranks plan their writes. Runs in DCP's thread."""
        self.set_device()
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if is_coordinator:
            shutil.rmtree(self.writing, ignore_errors=True)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Raise OSError if the disk has no room for the writes of all ranks. DCP calls this only on rank 0."""
        needed = SPARE + sum(_bytes(item) for plan in plans for item in plan.items)
        free = shutil.disk_usage(self.writing).free
        if free < needed:
            reason = f"{os.strerror(errno.ENOSPC)}: it needs {needed / 2**20:,.2f} MiB and {free / 2**20:,.2f} are free"
            raise OSError(errno.ENOSPC, reason)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors and its own file. The results, which DCP sends to rank 0, also hold the checksums."""
        try:
            results = super().write_data(plan, planner).wait()
            self._write_own()
        except Exception as error:
            if isinstance(error, OSError) or shutil.disk_usage(self.writing).free >= SPARE:
                raise
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error  # torch's zip writer hides a full disk
        future: Future[list[WriteResult]] = Future()
        future.set_result([*results, WriteResult(MetadataIndex(SUMS), 0, dict(self.fs.sums))])
        return future

    def _write_own(self) -> None:
        """Write this rank's own file, if it has one, to the disk and not only to its cache."""
        if self.own:
            name, text = self.own
            with self.fs.create_stream(self.writing / name, "wb") as stream:
                stream.write(text.encode())
                stream.flush()
                os.fsync(stream.fileno())

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index and the manifest, and rename the folder. DCP calls this on rank 0 after all ranks have written.
        Raises CheckpointError if the step cannot be read back.
        """
        sums = {}
        for part in results:
            sums |= part.pop().storage_data
        super().finish(metadata, results)
        sums[".metadata"] = self.fs.sums[".metadata.tmp"]
        checkpoints.write_manifest(self.writing, self.step, self.world_size, sums, self.held_out)
        checkpoints.sync_folder(self.writing)
        if self.check:
            safe.check_readable(self.writing)
        self.commit()
        self.done()

    def commit(self) -> None:
        """Rename the step to its final name. An existing folder of that name, such as a damaged step, is renamed first, as
        a rename cannot replace a folder that holds files.
        """
        if self.final.exists():
            self.final.rename(self.final.with_name(f"{self.final.name}.{os.getpid()}{checkpoints.DELETING}"))
        self.writing.rename(self.final)
        checkpoints.sync_folder(self.final.parent)

    def abandon(self) -> None:
        """Delete a step that could not be written."""
        shutil.rmtree(self.writing, ignore_errors=True)

    def storage_meta(self) -> StorageMeta:
        """Return DCP's metadata of a save without its path, as a checkpoint should not disclose where it was written."""
        return StorageMeta(save_id=self.save_id)


class SummingFiles(FileSystem):
    """An extension of DCP's file system that computes the checksums of files while it writes them."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[int, int]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        """Open a file. Once a written file is closed, `sums` has its (size, CRC-32) under its name."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        raw = SummedFile(path, mode)
        with io.BufferedWriter(raw, 2**20) as stream:
            yield stream
        self.sums[Path(path).name] = (raw.size, raw.crc)


class SummedFile(io.FileIO):
    """A file that is written once, from beginning to end."""

    size = crc = 0

    def write(self, data) -> int:
        """Write data, and add to the checksum the part of it that the system has accepted."""
        written = super().write(data)
        with memoryview(data).cast("B") as view:
            self.crc = zlib.crc32(view[:written], self.crc)
        self.size += written
        return written

    def close(self) -> None:
        """Sync the file, then close it. torch itself syncs the index too early, before its buffer is flushed."""
        try:
            if not self.closed:
                os.fsync(self.fileno())
        finally:
            super().close()


def _bytes(item) -> int:
    data = item.tensor_data
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize if data else 0
