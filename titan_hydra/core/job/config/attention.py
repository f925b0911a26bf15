"""Which of torch's attention kernels may compute a call. Models, ring attention, the checks of a cell and its
predictions all use this file.

torch has checks of its own (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp) and takes the first kernel that
passes them. This file repeats those checks that determine how a call is prepared. It also refuses calls that torch
would compute wrongly; each such check names the issue.
"""

from typing import NamedTuple

from .fault import Fault
from .registry import CP_ROTATIONS
from .schema import Job

# the order in which `auto` tries kernels; on an H200, cuDNN was 1.7 to 1.9 times as fast as torch's flash kernel
KERNELS = ("cudnn", "flash", "efficient", "math")
HALF = ("bfloat16", "float16")


class Machine(NamedTuple):
    """A GPU and torch's libraries for it. `cuda` is empty if torch is built for ROCm; cuDNN 9.26.0 is written 92600."""

    capability: tuple[int, int]
    cuda: tuple[int, ...]
    cudnn: int


class Call(NamedTuple):
    """The facts on which the choice of a kernel depends. Without `machine`, as on a login node, no check of the GPU
    applies.
    """

    device: str
    dtype: str = "bfloat16"
    width: int = 128  # width of one head's query and key
    value_width: int = 128
    keys: int = 0  # number of keys in a sequence
    causal: bool = True
    masked: bool = False  # whether a tensor masks pairs of queries and keys
    ring: bool = False
    deterministic: bool = False
    machine: Machine | None = None


def kernels(asked: str, call: Call) -> list[str]:
    """Return the kernels that may compute a call, fastest first. `asked` is the value of model.attention. Raises
    ConfigError if no kernel may compute it.
    """
    usable = [kernel for kernel in (KERNELS if asked == "auto" else (asked,)) if refusal(kernel, call) is None]
    if not usable:
        raise kernel_fault(asked, call).error
    return usable


def kernel_fault(asked: str, *calls: Call) -> Fault | None:
    """Return a fault if no kernel that model.attention (`asked`) allows may compute any of the calls. If a kernel is
    named, the fault gives the reason why this kernel may not compute the last call.
    """
    legal = [kernel for kernel in KERNELS if any(refusal(kernel, call) is None for call in calls)]
    if legal if asked == "auto" else asked in legal:
        return None
    reason = "no kernel computes this attention" if asked == "auto" else refusal(asked, calls[-1]) or ""
    return Fault("model.attention", asked, reason, legal=("auto", *legal) if legal else ())


def refusal(kernel: str, call: Call) -> str | None:
    """Return why a kernel may not compute a call; None if it may."""
    if kernel == "math":
        # torch would compute as if the order of the ranks were the order of the sequence, without an error.
        return "has no ring (pytorch #147793)" if call.ring else None
    if call.device != "cuda":
        return None if kernel == "flash" else f"does not exist on the {call.device.upper()}"
    if kernel == "cudnn":
        return _of_cudnn(call)
    if kernel == "efficient":
        if call.ring:
            return "computes wrong gradients in a ring (seen on an H200 with torch 2.11)"
        return None if call.dtype in (*HALF, "float32") else f"does not compute in {call.dtype}"
    if call.dtype not in HALF:
        return f"does not compute in {call.dtype}"
    if call.masked:
        return "takes no mask"
    return f"takes no heads of {call.width}, but up to 256" if call.width > 256 else None


def _of_cudnn(call: Call) -> str | None:
    """Return why cuDNN may not compute a call on CUDA. Calls that torch itself refuses are included, so that a job with
    attention=cudnn fails with one line.

    Calls with a single query, which cuDNN before 9.24.1 computes wrongly on B200 (pytorch #193893), are not checked,
    because this package makes no such calls.
    """
    widths, machine = (call.width, call.value_width), call.machine
    if call.dtype not in HALF:
        return f"does not compute in {call.dtype}"
    if call.ring:  # in torch's ring, the output and its gradient have different memory layouts
        return "fails in a ring, or computes wrong gradients (pytorch #176915)"
    if call.deterministic:
        return "is refused by debug.deterministic=true, as its backward is not deterministic"
    if call.masked:
        return "may compute gradients that are not finite under a mask (pytorch #196678)"
    # later releases of torch accept 256, which has not been verified
    if any(width % 8 for width in widths) or (max(widths) > 128 and widths != (192, 128)):
        return f"takes no heads of {call.width} with values of {call.value_width}, but up to 128 in steps of 8"
    if machine is None:
        return None
    if not machine.cuda:
        return "is not part of this torch, which is built for ROCm"
    if machine.cuda < (12, 9):  # torch then disables cuDNN by default, but uses it if the kernel is named
        has = ".".join(map(str, machine.cuda))
        return f"reads memory that is not its own before CUDA 12.9, and this torch has {has} (pytorch #169849)"
    if max(widths) > 128 and machine.capability[0] not in (9, 10):  # pytorch #172621
        return f"takes no heads of {call.width} on a GPU of capability {machine.capability[0]}.{machine.capability[1]}"
    if not call.causal and call.keys % 128 == 64 and machine.cudnn < 92600:  # fixed in cuDNN 9.26, pytorch #196861
        return f"may compute gradients that are not finite for {call.keys} keys (pytorch #196678)"
    return None


def takes_offsets(asked: str, call: Call) -> bool:
    """Whether flash attention computes attention within packed documents from their offsets (core/kernels/documents.py). If
    it does not, a mask of all pairs is needed.
    """
    return asked in ("auto", "flash") and (
        call.device != "cuda" or (refusal("flash", call) is None and call.width % 8 == 0)
    )


def call_of(job: Job, device: str = "cuda", machine: Machine | None = None) -> Call:
    """Return the attention call of a job's blocks on a device."""
    model, layout = job.model, job.parallelism
    ring = layout.cp > 1 and CP_ROTATIONS[layout.cp_rotate].ring
    dtype, width = job.precision.compute_dtype, model.head_width
    masked = job.data.document_mask and not takes_offsets(model.attention, Call(device, dtype, width))
    return Call(
        device=device,
        dtype=dtype,
        width=width,
        value_width=model.value_width,
        keys=job.data.seq_len,
        causal=model.causal,
        masked=masked,
        ring=ring,
        deterministic=job.debug.deterministic,
        machine=machine,
    )
