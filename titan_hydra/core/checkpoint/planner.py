"""DCP's planners for writing and reading. A checkpoint's weights are float32 even if a rank holds them as two 16-bit
halves (split masters). The halves are joined on the host when they are written, and split on the host when they are
read, so that the device never holds a second copy.
"""

import dataclasses
import io
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem

from titan_hydra.core.base.private import set_element
from titan_hydra.core.kernels.split_masters import halve_into, join

# parts of a state to save; a checkpoint never contains LOWER, as the halves are joined when they are written
MODEL, LOWER = "model", "lower_halves"
# how the names of options of parameter groups begin that an optimizer's steps have changed; most checkpoints have none
CHANGED = "changed_options."


class SavePlanner(dcp.DefaultSavePlanner):
    """Writes split masters as float32, and other tensors in the dtype that `dtypes` gives their flat names, if any."""

    def __init__(self, dtypes: Mapping[str, torch.dtype] = {}) -> None:
        super().__init__()
        self.dtypes = dtypes

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Receive the state dict to write, or its copy on the host."""
        content, self.lower = without_lower(state_dict)
        self.dtypes = dict.fromkeys(self.lower, torch.float32) | dict(self.dtypes)
        super().set_up_planner(content, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        """Return DCP's plan, changed to the dtypes that are written, which may differ from those that the rank holds."""
        plan = super().create_local_plan()
        self.plan = dataclasses.replace(plan, items=list(map(self._planned, plan.items)))
        return self.plan

    def _planned(self, item: WriteItem) -> WriteItem:
        if item.index.fqn not in self.dtypes:
            return item
        properties = dataclasses.replace(item.tensor_data.properties, dtype=self.dtypes[item.index.fqn])
        return dataclasses.replace(item, tensor_data=dataclasses.replace(item.tensor_data, properties=properties))

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Return the tensor that is written. A tensor whose dtype changes is converted on the host."""
        name = write_item.index.fqn
        if name not in self.dtypes:
            return super().transform_object(write_item, object)
        held = object.cpu()
        return (join(held, self.lower[name].cpu()) if name in self.lower else held).to(self.dtypes[name])


class LoadPlanner(dcp.DefaultLoadPlanner):
    """Reads into the tensors of a state dict. Other values are unpickled without running code."""

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Any = None, is_coordinator: bool = False) -> None:
        """Receive the state dict into whose tensors DCP reads. Options of parameter groups that the checkpoint lacks
        keep the values of the state dict.
        """
        content, self.lower = without_lower(state_dict)
        content = {part: present(part, values, metadata.state_dict_metadata) for part, values in content.items()}
        super().set_up_planner(content, metadata, is_coordinator)
        self.original_state_dict = state_dict

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the tensor into which a piece is read. For split masters, this is a float32 tensor on the host."""
        if read_item.dest_index.fqn in self.lower:
            return torch.empty(read_item.lengths, dtype=torch.float32)
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """After a piece has been read, split it into the two halves that the rank holds."""
        if read_item.dest_index.fqn in self.lower:
            upper, lower = self.lookup_tensor(read_item.dest_index), self.lower[read_item.dest_index.fqn]
            halve_into(tensor, self.transform_tensor(read_item, upper), self.transform_tensor(read_item, lower))

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Read a value that is not a tensor into its place in the state dict."""
        path = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, path, torch.load(value, weights_only=True))


def present(part: str, values: Any, saved: Mapping[str, Any]) -> Any:
    """Return the values of a part of a state dict, without the CHANGED options that no step had changed when the
    checkpoint was `saved`.
    """
    if not isinstance(values, dict):
        return values
    return {name: value for name, value in values.items() if not name.startswith(CHANGED) or f"{part}.{name}" in saved}


def without_lower(content: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a state dict without lower halves, and the lower halves by the flat names of their upper halves."""
    lower = {f"{MODEL}.{name}": half for name, half in content.get(LOWER, {}).items()}
    return {part: value for part, value in content.items() if part != LOWER}, lower
