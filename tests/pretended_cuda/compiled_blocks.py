"""Compile the blocks of each family for an H100 without having one, and show the kernels of forward and backward, their
registers and spills, and the operators that are called beside them.

    python tests/pretended_cuda/compiled_blocks.py                 # the table of docs/lab/performance.md: every family in every precision
    python tests/pretended_cuda/compiled_blocks.py qwen3 fused     # only the rows with these words, and every kernel of theirs

It needs torch's build for CUDA 13 with triton and a C compiler; `.ci/on-torch` makes such an environment. A step of the
trainer runs on fake tensors, with a replacement of the driver (compiled_driver.c), so it compiles exactly what a run
compiles. The compiler's graph is executed instead of the compiled code.
"""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import files, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
COMMON = (
    "data.seq_len=8192",
    "data.local_batch=1",
    "parallelism=single",
    "gpus=1",
    "comm=fake",
    "compile=block",
    "tokenizer=embedded",
)
# The compiled parts, in the order in which they run in a forward, and the overrides of a job with one block of each
# kind.
SPARSE = ("attention", "router", "order of rows", "experts", "sum of experts")
FORWARD_ONLY = ("order of rows",)
MODELS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "llama3": (("block",), ("model=llama3_8b", "data=synthetic", "model.n_layers=1")),
    "qwen3": (("block",), ("model=qwen3_8b", "data=synthetic", "model.n_layers=1")),
    "qwen3_moe": (SPARSE, ("model=qwen3_30b_a3b", "data=synthetic", "model.n_layers=1")),
    "deepseek_v3": (
        ("dense block", *SPARSE, "shared experts"),
        ("model=deepseek_v3", "data=synthetic", "model.n_layers=2", "model.first_k_dense_replace=1"),
    ),
    "image_text": (("block",), ("data=synthetic_image_text", "model=llama3_8b_vision", "model.n_layers=1")),
    "flux": (
        ("double block", "single block"),
        ("data=synthetic_images", "model=flux_dev", "model.n_layers=2", "model.double_layers=1", "data.seq_len=4608"),
    ),
}
PRECISIONS = {
    "bf16": ("precision=bf16",),
    "bf16 op": ("precision=bf16", "ac=op"),
    "float8": ("precision=float8_rowwise",),
    "fused": ("precision=float8_rowwise", "precision.kernels=fused"),
}


@dataclass
class Kernel:
    """A Triton kernel, its registers, and the bytes that it spills per thread. Inductor chooses among a few settings by
    measuring. Here a kernel has the first setting that spills nothing or, if all spill, the one that spills least.
    """

    name: str
    registers: int
    spilled: int


@dataclass
class Graph:
    """The code of one compiled part in one direction: its kernels in order, the number of bytes that they read and
    write, and the operators that are called beside them, with counts.
    """

    backward: bool
    kernels: list[Kernel]
    bytes: int
    called: dict[str, int]


class Written(BaseException):
    """End a compilation as soon as the code is written."""


class Compiler:
    """A back end for torch.compile that keeps the code that inductor writes, but runs the graph from which inductor
    wrote it.
    """

    def __init__(self) -> None:
        self.graphs: list[Graph] = []

    def __call__(self, module: Any, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        return module if of_objective(module) else compile_fx(module, inputs, inner_compile=self.write)

    def write(self, module: Any, inputs: Any, **options: Any) -> Any:
        """Keep the code that inductor writes for a module; return the module."""
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.graph import GraphLowering

        def written(graph: Any) -> None:
            self.graphs.append(graph_of(graph))
            raise Written

        original, GraphLowering.compile_to_module = GraphLowering.compile_to_module, written
        try:
            with suppress(Written):
                compile_fx_inner(copy.deepcopy(module), inputs, **options)
        finally:
            GraphLowering.compile_to_module = original
        return module


def of_objective(module: Any) -> bool:
    """Return whether the compiled part is the loss, as the compiler's record of its operators' sources shows."""
    from titan_hydra.core.job.config.registry import OBJECTIVES

    files = [kind.build.partition(":")[0].replace(".", "/") + ".py" for kind in OBJECTIVES.values()]
    return any(file in (node.meta.get("stack_trace") or "") for node in module.graph.nodes for file in files)


def graph_of(graph: Any) -> Graph:
    """Return what the code of a graph calls, with its kernels assembled for sm_90."""
    code = graph.codegen()[0].value
    body = code[code.index("def call(") : code.index("\nrunner = ")]
    names = re.findall(r"(\w+)\.run\(", body)
    called = Counter(map("".join, re.findall(r"extern_kernels\.(\w+)\(|torch\.ops\.([\w.]+)\(|\.(sum)\(dim", body)))
    sources = dict(re.findall(r"^(\w+) = async_compile\.triton\('\w+', '''(.*?)'''", code, re.M | re.S))
    kernels = {name: assembled(name, sources[name]) for name in dict.fromkeys(names)}
    nodes = (
        node
        for node in graph.scheduler.nodes
        if not node.is_extern() or re.search("titan_hydra.(float8|norm)", str(getattr(node.node, "op_overload", "")))
    )
    read_or_written = sum(node.get_read_write_buffers_sizes() for node in nodes)
    return Graph(graph.is_backward, [kernels[name] for name in names], read_or_written, dict(called))


@cache  # several parts may share a kernel, and its module discards its settings once they are compiled
def assembled(name: str, source: str) -> Kernel:
    """Return a kernel as ptxas assembled it."""
    import triton
    from torch._inductor.codecache import PyCodeCache

    tuner, compile, uses = getattr(PyCodeCache.load(source), name), triton.compile, []

    def keep(*args: Any, **options: Any) -> Any:
        result = compile(*args, **options)
        uses.append(usage(result.asm["cubin"]))
        return result

    triton.compile = keep
    try:
        for setting in list(tuner.configs):
            if not uses or uses[-1][1]:
                tuner.configs, tuner.compile_results = [setting], []
                tuner.precompile(warm_cache_only=True)
    finally:
        triton.compile = compile
    return Kernel(name, *min(uses, key=lambda use: use[1]))


def usage(cubin: bytes) -> tuple[int, int]:
    """Return the number of registers of a kernel's thread, and the bytes that it spills."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    registers, stack, local = (int(re.search(rf"{what}:(\d+)", text)[1]) for what in ("REG", "STACK", "LOCAL"))
    return registers, stack + local


class Driver:
    """Triton's driver as the compiler uses it: it answers for the target, not for a device."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0


def compile_step(words: tuple[str, ...]) -> list[Graph]:
    """Return the graphs that a step of the job compiles on one H100."""
    import torch
    import torch._inductor.config
    import triton
    from torch._inductor.runtime import triton_helpers
    from torch._subclasses.fake_tensor import FakeTensorMode

    from titan_hydra.core.job.freeze import freeze
    from titan_hydra.core.train.fake import fake_world
    from titan_hydra.core.train.trainer import assemble
    from titan_hydra.experiments.compose.compose import compose_unchecked

    triton.runtime.driver.set_active(Driver())
    triton_helpers.set_driver_to_gpu = lambda: None  # this would create Triton's own driver, which asks the device
    torch._inductor.config.joint_graph_constant_folding = False  # constant folding computes on the device
    torch.Tensor.pin_memory = lambda self, *_: self  # fake tensors do not support this operator
    job, device, compiler = freeze(compose_unchecked(*words)), torch.device("cuda", 0), Compiler()
    job.compile.backend, job.debug.balance_experts = compiler, job.model.sparse
    with fake_world(job):
        parts = assemble(job, device)
        with FakeTensorMode(allow_non_fake_inputs=True):
            for stage in parts.stages:
                stage.to_empty(device=device)
            trainer = parts.trainer(device)
            samples = job.data.global_batch // trainer.mesh.data_ranks
            trainer.forward_backward(
                trainer.objective.example(samples).each(lambda tensor, dims: torch.zeros_like(tensor))
            )
    return compiler.graphs


@contextmanager
def pretended() -> Iterator[dict[str, str]]:
    """Yield the environment of a process on the pretended device, with empty caches for its compilers."""
    import triton

    # torch's own CUDA, as triton's headers may be older; only macros of the host's compiler come from triton's
    runtime = next(file for file in files("nvidia-cuda-runtime") or () if file.name == "cuda_runtime_api.h").locate()
    headers = runtime.parent, Path(triton.__file__).parent / "backends/nvidia/include"
    with tempfile.TemporaryDirectory() as folder:
        driver = Path(folder, "libcuda.so.1")
        subprocess.run(
            [
                "cc",
                "-shared",
                "-fPIC",
                f"-Wl,-soname,{driver.name}",
                *(f"-I{path}" for path in headers),
                HERE / "compiled_driver.c",
                "-o",
                driver,
            ],
            check=True,
        )
        environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        yield environment | {
            "LD_PRELOAD": str(driver),
            "TORCHINDUCTOR_CACHE_DIR": folder,
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }


def graphs_of(model: str, precision: str) -> list[tuple[str, Graph, Graph]]:
    """Return the forward and the backward of each compiled part of a model's blocks. Raise RuntimeError if the process
    on the pretended device fails, or if it compiled other parts.
    """
    with pretended() as environment:
        done = subprocess.run(
            [sys.executable, __file__, "--case", model, precision], env=environment, capture_output=True, text=True
        )
    if done.returncode:
        raise RuntimeError(f"{model}, {precision}: exit status {done.returncode}\n{done.stderr[-4000:]}")
    graphs = [
        Graph(**graph | {"kernels": [Kernel(**kernel) for kernel in graph["kernels"]]})
        for graph in json.loads(done.stdout)
    ]
    forward = [graph for graph in graphs if not graph.backward]
    backward = [graph for graph in graphs if graph.backward]
    parts = MODELS[model][0]
    if (len(parts), len(parts) - len(set(FORWARD_ONLY) & set(parts))) != (len(forward), len(backward)):
        raise RuntimeError(
            f"{model}, {precision}: compiled {len(forward)} forwards, {len(backward)} backwards, not {parts}"
        )
    return [
        (part, graph, Graph(True, [], 0, {}) if part in FORWARD_ONLY else backward.pop())
        for part, graph in zip(parts, forward, strict=True)
    ]


def cell(forward: Graph, backward: Graph) -> str:
    """Return a cell of the table: kernels of forward and backward, the bytes that they read and write, and the largest
    spill of a thread.
    """
    spilled = max((kernel.spilled for kernel in forward.kernels + backward.kernels), default=0)
    return (
        f"{len(forward.kernels)} + {len(backward.kernels)}, {(forward.bytes + backward.bytes) / 1e9:.2f} GB"
        + f", spills {spilled} B" * (spilled > 0)
    )


def show(*words: str) -> None:
    """Print the table. With words, print only rows and columns that contain one of them, and below these every kernel
    and operator.
    """
    columns = [precision for precision in PRECISIONS if precision in words] or list(PRECISIONS)
    print(
        f"| torch {version('torch').split('+')[0]}: family | compiled | {' | '.join(columns)} |\n{'|---' * (len(columns) + 2)}|"
    )
    for model, (parts, _) in MODELS.items():
        if model in words or not set(words) & set(MODELS):
            found = {precision: graphs_of(model, precision) for precision in columns}
            for number, part in enumerate(parts):
                print(
                    f"| {model} | {part} | {' | '.join(cell(*found[column][number][1:]) for column in columns)} |",
                    flush=True,
                )
            for precision in columns if words else ():
                for part, *both in found[precision]:
                    for graph in both:
                        print(
                            f"\n{model}, {part}, {precision}, {'backward' if graph.backward else 'forward'}: {graph.called}"
                        )
                        for kernel in graph.kernels:
                            print(f"    {kernel.registers:>3} registers, {kernel.spilled} B spilled: {kernel.name}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        model, precision = sys.argv[2:]
        print(
            json.dumps([asdict(graph) for graph in compile_step((*COMMON, *MODELS[model][1], *PRECISIONS[precision]))])
        )
    else:
        show(*sys.argv[1:])
