"""Choose an attention kernel on the pretended device. Torch's own choice cannot be used: its code needs a driver, or is
not in this build.
"""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

aten = torch.ops.aten
# torch's order on an H100
DEFAULT = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
UNORDERED = torch._C._get_sdp_priority_order()  # the order for a caller who asks for none
plain = F.scaled_dot_product_attention


def choose_kernels():
    """Let attention on the device use the first kernel of the caller's order that supports the arguments."""
    F.scaled_dot_product_attention = chosen


def takes(kernel, q, k, v, mask):
    """Return whether a kernel supports these arguments on an H100 (as torch's sdp_utils.cpp decides)."""
    half, wide = q.dtype in (torch.bfloat16, torch.float16), max(q.shape[-1], v.shape[-1])
    if kernel == SDPBackend.CUDNN_ATTENTION:
        return half and wide <= 256 and q.shape[-1] % 8 == v.shape[-1] % 8 == 0
    if kernel == SDPBackend.FLASH_ATTENTION:
        return half and mask is None and wide <= 256 and q.shape[-1] == v.shape[-1]
    return kernel == SDPBackend.MATH or q.shape[1] == k.shape[1]


def chosen(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Compute attention as torch does, with the operator of the kernel."""
    if not q.is_cuda:
        return plain(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    allowed = _cur_sdpa_kernel_backends(with_priority=True)
    order = DEFAULT if torch._C._get_sdp_priority_order() == UNORDERED else allowed
    kernel = next((kernel for kernel in order if kernel in allowed and takes(kernel, q, k, v, attn_mask)), None)
    if kernel == SDPBackend.CUDNN_ATTENTION:
        return aten._scaled_dot_product_cudnn_attention(
            q, k, v, attn_mask, True, dropout_p, is_causal, False, scale=scale
        )[0]
    if kernel == SDPBackend.FLASH_ATTENTION:
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
    if kernel == SDPBackend.EFFICIENT_ATTENTION:
        return aten._scaled_dot_product_efficient_attention(
            q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale
        )[0]
    if kernel is None:
        raise RuntimeError("No available kernel. Aborting execution.")
    return aten._scaled_dot_product_attention_math(
        q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
