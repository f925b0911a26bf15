"""Plant faults that change nothing where parallel degrees are 2. For each fault, a case of many ranks must find it; the
entry's last case, of two or four ranks, must not.

    python tests/equivalence/planted_many.py [NAME]
"""

import sys

from planted import found

FAULTS = {
    "the balanced order of a sequence ends with its fourth part": (
        "core/parallel/context.py",
        "chunks[-1 - rank]",
        "chunks[3 - rank]",
        "16 ranks, cp 8, tp 2",
        "cp 2, allgather, sequence 32",
    ),
    "replicas read samples at a stride of two": (
        "core/parallel/mesh.py",
        'self.coordinate("dp_replicate") * self.degrees.dp_shard +',
        'self.coordinate("dp_replicate") * 2 +',
        "32 ranks, simple_fsdp, dp_replicate 4, dp_shard 4, tp 2",
        "hsdp 4",
    ),
    "the norm adds the degrees that split a gradient": (
        "core/parallel/gradients.py",
        "math.prod(gradient.device_mesh.size(dim) for dim, placement in enumerate(gradient.placements) if not placement.is_replicate())",
        "max(1, sum(gradient.device_mesh.size(dim) for dim, placement in enumerate(gradient.placements) if not placement.is_replicate()))",
        "32 ranks, dp_shard 4, tp 8",
        "fsdp 4, tp 2, uneven mask, vocabulary 2047, loss parallel on",
    ),
    "the vocabulary's offset is that of halves": (
        "core/parallel/loss_head.py",
        "* -(-weight.shape[0] // mesh.size())",
        "* -(-weight.shape[0] // 2)",
        "32 ranks, qwen3, dp_shard 4, tp 8",
        "linear_cross_entropy, fsdp 4, tp 2, vocabulary 2047",
    ),
}


if __name__ == "__main__":
    for name, (*fault, many, few) in FAULTS.items():
        if all(word in name for word in sys.argv[1:]):
            print(
                f"{name}:\n  {found((*fault, many)) or f'GREEN at {many}'}\n  {found((*fault, few)) or f'green at {few}'}",
                flush=True,
            )
