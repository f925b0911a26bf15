"""Find the faults of a layout in the JSON records of its ranks (record.py), and make the table of its kernels. Imports
no torch.
"""

from ast import literal_eval
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

Records = dict[str, dict[str, Any]]  # by rank
ONE_WAIT = {"event.synchronize at core/train/step.py Agreement.read": 1}  # the one wait of each step
COPIES = {
    "to the device at core/data/batch.py onto",
    "to the host at core/train/step.py Agreement.__init__",
    "to the host at core/parallel/offload.py Host.transfer",
    "to the device at core/parallel/offload.py Host.transfer",
    "to the host at core/train/offloaded.py transfer",
    "to the device at core/train/offloaded.py transfer",
}


def faults(records: Records, waits: dict[str, int], gathers: int | None = None) -> list[str]:
    """Return one line for each fault. `waits` has the places where the host may wait in addition to the one wait of a
    step, and how often; `gathers` is the number of gathers of parameters in the step.
    """
    found = []
    for rank, record in records.items():
        found += [f"rank {rank}: {fault}" for fault in record["faults"]]
        expected = ONE_WAIT | waits
        found += [
            f"rank {rank}: {place}: the host waits {record['waits'].get(place, 0)} times, not {expected.get(place, 0)}"
            for place in record["waits"].keys() | expected.keys()
            if record["waits"].get(place, 0) != expected.get(place, 0)
        ]
        found += [f"rank {rank}: a copy {place}" for place in record["copies"].keys() - COPIES]
        issued = [one for sequence in record["collectives"].values() for one in sequence]
        count = sum(one.startswith(("_allgather_base_", "all_gather")) for one in issued)
        if gathers not in (None, count):
            found.append(f"rank {rank}: {count} gathers, not {gathers}")
    return [*found, *mixed_strides(records), *disagreements(records), *lost_messages(records)]


def mixed_strides(records: Records) -> Iterator[str]:
    """Yield each key of cuDNN's cache of backward graphs for which the output and its gradient had different strides in
    different calls.
    """
    strides = defaultdict(set)
    for record in records.values():
        for key, found in record["cudnn"].items():
            strides[key].update(found)
    for key, found in strides.items():
        if len(found) > 1:
            yield f"cuDNN's backward of {key} has several strides: {'; '.join(sorted(found))}"


def disagreements(records: Records) -> Iterator[str]:
    """Yield the first collective in which a rank differs from the first rank of its group."""
    groups = defaultdict(dict)
    for rank, record in records.items():
        for group, sequence in record["collectives"].items():
            groups[group][rank] = sequence
    for group, sequences in groups.items():
        ranks = [str(rank) for rank in literal_eval(group.partition(" of ")[2]) if str(rank) in records]
        first = sequences.get(ranks[0], [])
        for rank in ranks[1:]:
            pairs = zip([*first, "none"], [*sequences.get(rank, []), "none"], strict=False)
            yield from [
                f"collective {number} of group {group}: {one} on rank {ranks[0]}, {other} on rank {rank}"
                for number, (one, other) in enumerate(pairs)
                if one != other
            ][:1]


def lost_messages(records: Records) -> Iterator[str]:
    """Yield each pair of ranks whose receiver expects other tensors than the sender sends, or another order."""
    sides = defaultdict(dict)
    for record in records.values():
        for way, tensors in record["messages"].items():
            pair, _, side = way.partition(" ")
            sides[pair][side] = tensors
    for pair, both in sides.items():
        if all(rank in records for rank in pair.split(">")) and both.get("sent") != both.get("received"):
            yield f"messages {pair}: {both.get('sent')} are sent, {both.get('received')} received"


def table(records: Records) -> str:
    """Return a table of the kernels and casts that each layer uses in its forward on any of the ranks, one line per
    layer.
    """
    layers = defaultdict(set)
    for record in records.values():
        for layer, found in record["kernels"].items():
            layers[layer].update(found)
    return "\n".join(
        f"{layer:36} {', '.join(sorted(found))}" for layer, found in sorted(layers.items()) if layer != "-"
    )
