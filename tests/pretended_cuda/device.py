"""Pretend in this process that torch has a CUDA device, an H100. `build_guard` compiles the functions that torch's C++
code calls, and `pretend` installs them. The device has tensors without data (FakeTensorMode). It has streams and
events, whose order `streams.py` tracks, and computes nothing.
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

SOURCE = Path(__file__).with_name("guard.cpp")
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=80 << 30,
    multi_processor_count=132,
    warp_size=32,
    L2_cache_size=50 << 20,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_multiprocessor=233472,
    shared_memory_per_block_optin=232448,
)


def build_guard(cache: Path) -> Path | None:
    """Return the compiled guard for this environment's torch, which is kept in the folder `cache`; None if there is no
    C++ compiler.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if compiler is None:
        return None
    # found without an import, as the library must be loaded before torch
    torch = Path(importlib.util.find_spec("torch").origin).parent
    key = hashlib.sha256(f"{torch} {importlib.metadata.version('torch')} {SOURCE.read_text()}".encode()).hexdigest()[
        :16
    ]
    library = cache / f"guard-{key}.so"
    if not library.exists():
        unfinished = cache / f"{library.name}.{os.getpid()}"
        subprocess.run(
            [
                compiler,
                "-O0",
                "-std=c++20",
                "-shared",
                "-fPIC",
                f"-I{torch}/include",
                SOURCE,
                "-o",
                unfinished,
                f"-L{torch}/lib",
                "-ltorch_cpu",
                "-lc10",
                f"-Wl,-rpath,{torch}/lib",
            ],
            check=True,
        )
        unfinished.rename(library)
    return library


def pretend(library: Path) -> None:
    """Give this process the pretended device, and hide all real devices. Call it before torch is imported."""
    guard = ctypes.CDLL(str(library))
    import torch
    import torch.utils._device
    from torch._subclasses import fake_tensor
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    from tests.pretended_cuda import streams

    guard.install_guard()
    find = importlib.util.find_spec  # a Triton kernel would need the memory of these tensors, which they do not have
    importlib.util.find_spec = lambda name, package=None: None if name == "triton" else find(name, package)
    cuda = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_capability": lambda device=None: (H100.major, H100.minor),
        "get_device_properties": lambda device=None: H100,
        "get_device_name": lambda device=None: H100.name,
        "empty_cache": lambda: None,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "_lazy_init": lambda: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "Stream": streams.Stream,
        "Event": streams.Event,
        "stream": streams.use,
        "current_stream": streams.current,
        "default_stream": lambda device=None: streams.DEFAULT,
        "synchronize": lambda device=None: streams.host_waits("synchronize"),
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
    }
    for name, value in cuda.items():
        setattr(torch.cuda, name, value)
    torch.version.cuda = torch.version.cuda or "13.0"
    torch.backends.cudnn.version = lambda: 91900
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    torch.accelerator.current_stream = streams.current
    torch.Tensor.record_stream = streams.record_stream
    torch.Tensor.pin_memory = pin_memory
    torch.cuda.device = lambda device: nullcontext()
    # A small constant that is copied to the device has no data there. This setter is needed for releases of torch that
    # set the option in each mode.
    FakeTensorMode.avoid_device_init = property(lambda mode: True, lambda mode, value: None)
    # torch 2.11 initializes CUDA by creating a real tensor, whenever it creates a fake one
    fake_tensor.init_gpu_context = lambda device: None
    ShardingPropagator._propagate_tensor_meta_non_cached = unseen(ShardingPropagator._propagate_tensor_meta_non_cached)
    # keeps a reference to torch's own function, which `with torch.device("meta")` recognizes
    torch.utils._device._device_constructors()
    torch.empty = without_data(torch.empty)
    torch.empty_like, torch.zeros_like = pinned_on_request(torch.empty_like), pinned_on_request(torch.zeros_like)


def streams_module():
    """Return the module of streams, which imports torch."""
    from tests.pretended_cuda import streams

    return streams


def pin_memory(tensor, device=None):
    """Return a copy of a host tensor that counts as page-locked."""
    copy = tensor.clone()
    streams_module().pin(copy)
    return copy


def pinned_on_request(make):
    """Let what a function creates with pin_memory=True count as page-locked."""

    def made(*args, pin_memory=False, **kwargs):
        tensor = make(*args, **kwargs)
        if pin_memory:
            streams_module().pin(getattr(tensor, "_local_tensor", tensor))
        return tensor

    return made


def unseen(propagate):
    """Let DTensor compute the shape of a result where no mode sees its operators, which are not those of the step."""
    from torch.utils._python_dispatch import _disable_current_modes

    def propagated(*args):
        with _disable_current_modes():
            return propagate(*args)

    return propagated


def without_data(make):
    """Let a function that creates tensors work on the device before a FakeTensorMode is entered: FSDP creates an empty
    tensor then.
    """
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensorMode

    def made(*args, device=None, **kwargs):
        early = str(device).startswith("cuda") and detect_fake_mode() is None
        with FakeTensorMode() if early else nullcontext():
            return make(*args, device=device, **kwargs)

    return made
