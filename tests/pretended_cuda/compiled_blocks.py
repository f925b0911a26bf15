"""What the compiler makes of each family's blocks on an H100, without one: the kernels of forward and backward, what ptxas says of them, and
the operators that are called beside them.

    python tests/pretended_cuda/compiled_blocks.py                 # the table of docs/performance.md: every family in every precision
    python tests/pretended_cuda/compiled_blocks.py qwen3 fused     # only the rows with these words, and every kernel of theirs

It needs torch's CUDA build with triton and a C compiler; `.ci/on-torch` makes such an environment. A step of the trainer runs on fake
tensors under a stand-in for the driver (compiled_driver.c), so all that is compiled is what a run compiles; the compiler's own graph runs
in place of its code.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
COMMON = ("data.seq_len=8192", "data.local_batch=1", "parallelism=single", "gpus=1", "comm=fake", "compile=block", "tokenizer=embedded")
MODELS = {
    "llama3": ("model=llama3_8b", "data=synthetic", "model.n_layers=1"),
    "qwen3": ("model=qwen3_8b", "data=synthetic", "model.n_layers=1"),
    "qwen3_moe": ("model=qwen3_30b_a3b", "data=synthetic", "model.n_layers=1"),
    "deepseek_v3": ("model=deepseek_v3", "data=synthetic", "model.n_layers=2", "model.n_dense_layers=1"),
    "image_text": ("data=synthetic_image_text", "model=llama3_8b_vision", "model.n_layers=1"),
    "flux": ("data=synthetic_images", "model=flux_dev", "model.n_layers=2", "model.double_layers=1", "data.seq_len=4608"),
}
PRECISIONS = {
    "bf16": ("precision=bf16",),
    "bf16 op": ("precision=bf16", "ac=op"),
    "float8": ("precision=float8_rowwise",),
    "fused": ("precision=float8_rowwise", "precision.kernels=fused"),
}
CASES = {f"{model} {precision}": (*COMMON, *words, *how) for model, words in MODELS.items() for precision, how in PRECISIONS.items()}


@dataclass
class Kernel:
    """A kernel of Triton. inductor chooses among a few settings of it by measuring; here it has the setting that spills least: registers,
    and bytes spilled, of a thread.
    """

    name: str
    registers: int
    spilled: int


@dataclass
class Graph:
    """The code of one compiled part in one direction: its kernels in their order, the bytes that they read and write in total, and how often
    which operators are called beside them.
    """

    part: str
    backward: bool
    kernels: list[Kernel]
    bytes: int
    called: dict[str, int]


class Written(BaseException):
    """Ends a compilation once the code is written."""


class Compiler:
    """A back end for torch.compile that keeps the code which inductor writes, and runs the graph that it was written for."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []

    def __call__(self, module: Any, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        part = part_of(module)
        return compile_fx(module, inputs, inner_compile=lambda *args, **options: self.write(part, *args, **options))

    def write(self, part: str, module: Any, inputs: Any, **options: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.graph import GraphLowering

        def written(graph: Any) -> None:
            self.graphs.append(graph_of(part, graph))
            raise Written

        original, GraphLowering.compile_to_module = GraphLowering.compile_to_module, written
        try:
            compile_fx_inner(copy.deepcopy(module), inputs, **options)
        except Written:
            pass
        finally:
            GraphLowering.compile_to_module = original
        return module


def part_of(module: Any) -> str:
    """Return the function that was compiled, from what the compiler remembers of the first operator's source."""
    traces = (re.findall(r'File "(.*?)", line \d+, in (\w+)', node.meta.get("stack_trace") or "") for node in module.graph.nodes)
    return next((f"{Path(trace[0][0]).stem} {trace[0][1]}" for trace in traces if trace), "?")


def graph_of(part: str, graph: Any) -> Graph:
    """Return what the code of a graph calls, with its kernels assembled for sm_90."""
    code, backward = graph.codegen()[0], graph.is_backward
    code = getattr(code, "value", code)
    if folder := os.environ.get("KEEP_CODE"):
        Path(folder, f"{part.replace(' ', '-')}-{'backward' if backward else 'forward'}-{len(code)}.py").write_text(code)
    body = code[code.index("def call("):code.index("\nrunner = ")]
    names = re.findall(r"(\w+)\.run\(", body)
    called = Counter(map("".join, re.findall(r"extern_kernels\.(\w+)\(|torch\.ops\.([\w.]+)\(|\.(sum)\(dim", body)))
    sources = dict(re.findall(r"^(\w+) = async_compile\.triton\('\w+', '''(.*?)'''", code, re.M | re.S))
    kernels = {name: assembled(name, sources[name]) for name in dict.fromkeys(names)}
    read_or_written = sum(node.get_read_write_buffers_sizes() for node in graph.scheduler.nodes if not node.is_extern())
    return Graph(part, backward, [kernels[name] for name in names], read_or_written, dict(called))


def assembled(name: str, source: str) -> Kernel:
    """Return a kernel as ptxas assembled it."""
    import triton
    from torch._inductor.codecache import PyCodeCache

    results, compile = [], triton.compile
    triton.compile = lambda *args, **options: results.append(compile(*args, **options)) or results[-1]
    try:
        getattr(PyCodeCache.load(source), name).precompile(warm_cache_only=True)
    finally:
        triton.compile = compile
    return Kernel(name, *min((usage(result.asm["cubin"]) for result in results), key=lambda pair: pair[::-1]))


def usage(cubin: bytes) -> tuple[int, int]:
    """Return the registers of a thread of a kernel, and the bytes that it spills."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    registers, stack, local = (int(re.search(rf"{what}:(\d+)", text)[1]) for what in ("REG", "STACK", "LOCAL"))
    return registers, stack + local


class Driver:
    """Triton's driver as the compiler asks it: for the target, not for the device."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0


def compile_case(words: tuple[str, ...]) -> list[Graph]:
    """Return the graphs that a step of the job compiles on one H100."""
    import torch
    import torch._inductor.config
    import triton
    from torch._inductor.runtime import triton_helpers
    from torch._subclasses.fake_tensor import FakeTensorMode

    from titan_hydra.config import freeze
    from titan_hydra.config.compose import compose_unchecked
    from titan_hydra.train.trainer import assemble
    from titan_hydra.verify.fake import fake_world

    triton.runtime.driver.set_active(Driver())
    triton_helpers.set_driver_to_gpu = lambda: None  # would make Triton's own, which asks the device
    torch._inductor.config.joint_graph_constant_folding = False  # computes on the device
    torch.Tensor.pin_memory = lambda self, *_: self  # fake tensors have no such operator
    job, device, compiler = freeze(compose_unchecked(*words)), torch.device("cuda", 0), Compiler()
    job.compile.backend, job.debug.balance_experts = compiler, job.model.sparse
    with fake_world(job):
        parts = assemble(job, device)
        with FakeTensorMode(allow_non_fake_inputs=True):
            for stage in parts.stages:
                stage.to_empty(device=device)
            trainer = parts.trainer(device)
            samples = job.data.global_batch // trainer.mesh.data_ranks
            trainer.forward_backward(trainer.objective.example(samples).each(lambda tensor, dims: torch.zeros_like(tensor)))
    return compiler.graphs


def pretend(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this file with arguments on the pretended device, in a process of its own, without any cache. Returns what it printed."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        driver = Path(folder, "libcuda.so.1")
        headers = Path(triton.__file__).parent / "backends/nvidia/include"
        subprocess.run(["cc", "-shared", "-fPIC", f"-Wl,-soname,{driver.name}", f"-I{headers}", HERE / "compiled_driver.c", "-o", driver],
                       check=True)
        environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        environment |= {"LD_PRELOAD": str(driver), "TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        return subprocess.run([sys.executable, __file__, *arguments], env=environment, capture_output=True, text=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps([asdict(graph) for graph in compile_case(CASES[sys.argv[2]])]))
