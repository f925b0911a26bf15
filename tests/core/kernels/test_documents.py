"""Test attention within packed documents: the operator against a mask of all pairs, and every layout against one
process with that mask.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.kernels.documents import attend_documents, attend_within, document_mask, document_offsets
from titan_hydra.core.models.layers import SDPA, Decoder
from titan_hydra.core.train.count import count_rank
from titan_hydra.core.train.objectives.language import ends_of
from titan_hydra.experiments.compose.compose import compose_unchecked
from titan_hydra.instruments.verify.case import LATENT, MOE, QWEN, case
from titan_hydra.instruments.verify.verify import verify

PACKINGS = {  # lengths of the documents of two samples
    "lengths of 1": ([1, 1, 20, 1, 9], [1] * 32),
    "one document": ([32], [32]),
    "the last token alone": ([31, 1], [5, 26, 1]),
    "many and one": ([3, 4, 5, 6, 7, 7], [32]),
}
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}


def ids_of(lengths):
    return np.stack([np.repeat(np.arange(len(row)), row) for row in lengths])


def offsets_of(lengths):
    return document_offsets(torch.from_numpy(ends_of(ids_of(lengths))))


def mask_of(lengths):
    return document_mask(torch.from_numpy(ends_of(ids_of(lengths))), 32)


def differences(attend, lengths, dtype=torch.float32, heads=4, kv_heads=2, value_dim=16, form=offsets_of):
    """Return the relative differences of output and gradients between `attend(q, k, v, documents)` and attention with a
    mask made from the ids.
    """
    torch.manual_seed(0)
    ids = torch.from_numpy(ids_of(lengths))
    mask = (ids.unsqueeze(2) == ids.unsqueeze(1)).tril().unsqueeze(1)
    qkv = [
        torch.randn(2, ids.shape[1], number, width, dtype=dtype).transpose(1, 2).requires_grad_()
        for number, width in ((heads, 16), (kv_heads, 16), (kv_heads, value_dim))
    ]
    gradient = torch.randn(2, heads, ids.shape[1], value_dim, dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    right = F.scaled_dot_product_attention(*exact, mask, enable_gqa=True)
    out = attend(*qkv, form(lengths))
    pairs = [
        (out, right),
        *zip(
            torch.autograd.grad(out, qkv, gradient), torch.autograd.grad(right, exact, gradient.double()), strict=True
        ),
    ]
    return [((one.double() - other).norm() / other.norm()).item() for one, other in pairs]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("form", [offsets_of, mask_of])
def test_documents_see_what_a_mask_would_show_them(form, packing, dtype):
    assert max(differences(SDPA("auto"), PACKINGS[packing], dtype, form=form)) < TOLERANCE[dtype]


@pytest.mark.parametrize("options", [{"kv_heads": 4}, {"kv_heads": 1}, {"value_dim": 8}])
@pytest.mark.parametrize("backend", ["auto", "flash", "math"])
def test_heads_are_shared_and_values_are_narrower(backend, options):
    if backend == "flash" and "value_dim" in options:
        options = options | {"kv_heads": 4}
    form = mask_of if backend == "math" else offsets_of
    assert max(differences(SDPA(backend), PACKINGS["many and one"], form=form, **options)) < 1e-6


def test_all_layers_share_one_mask():
    model = Decoder(compose_unchecked("model=llama3_debug", "model.attention=math").model, 32)
    seen = []
    for block in model.layers.values():
        block.attention.sdpa.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[3]))
    model(torch.zeros(2, 32, dtype=torch.long), ends=torch.from_numpy(ends_of(ids_of(PACKINGS["many and one"]))))
    assert len(seen) == len(model.layers)
    assert all(mask is seen[0] and mask.dtype == torch.bool for mask in seen)


@pytest.mark.parametrize("shift", [-1, 1])
def test_offsets_that_are_off_by_one_are_found(shift):
    def shifted(q, k, v, offsets):
        offsets = offsets.clone()
        offsets[1] += shift
        return SDPA("auto")(q, k, v, offsets)

    assert max(differences(shifted, PACKINGS["many and one"])) > 1e-2


def test_where_documents_end():
    ids = np.array([[0, 0, 0, 1, 1, 2], [7, 7, 7, 7, 7, 7]])
    assert ends_of(ids).tolist() == [[3, 5, 6, 6], [6, 6, 6, 6]]  # padded to 4, a power of two
    assert ends_of(ids[1:]).tolist() == [[6]]
    room = {number: ends_of(np.arange(number)[None]).shape[1] for number in (1, 2, 3, 9, 16, 17, 33, 100, 512)}
    assert room == {1: 1, 2: 2, 3: 4, 9: 16, 16: 16, 17: 32, 33: 48, 100: 112, 512: 512}
    assert document_offsets(torch.from_numpy(ends_of(ids))).tolist() == [0, 3, 5, 6, 6, 12, 12, 12, 12]


def test_any_number_of_documents_is_compiled_twice():
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    attend = torch.compile(attend_within, backend=counter, fullgraph=True)
    q, k, v = (torch.randn(1, 2, 96, 16, requires_grad=True) for _ in range(3))
    for number in (20, 3, 40, 1, 90, 60, 96):
        offsets = document_offsets(torch.from_numpy(ends_of((np.arange(96) * number // 96)[None])))
        torch.testing.assert_close(attend(q, k, v, offsets), attend_within(q, k, v, offsets))
    assert counter.frame_count == 2
    torch.compiler.reset()


def test_the_operator_is_one_that_torch_accepts():
    """Its fake results have the shapes and strides of the real ones, and its gradients are registered as a compiler
    needs them.
    """
    for kv_heads in (4, 2):
        q, k, v = (torch.randn(64, heads, 16, requires_grad=True) for heads in (4, kv_heads, kv_heads))
        torch.library.opcheck(attend_documents, (q, k, v, offsets_of(PACKINGS["many and one"]), 32))


def test_memory_is_linear_in_the_tokens():
    def live(*overrides):
        return count_rank(
            freeze(
                compose_unchecked(
                    "model=llama3_debug",
                    "data=embedded",
                    "precision=fp32",
                    "data.document_mask=true",
                    "data.local_batch=1",
                    "gpus=1",
                    "parallelism=single",
                    "comm=fake",
                    "model.vocab_size=4096",
                    *overrides,
                )
            ),
            0,
        ).live

    short, long, dense = (
        live("data.seq_len=2048"),
        live("data.seq_len=4096"),
        live("data.seq_len=4096", "model.attention=math"),
    )
    assert long < 2.1 * short
    assert dense > long + 4 * 4096**2  # the difference is at least the scores of one head


DENSE, LINEAR = ("model.attention=math",), "model.attention=auto"
LAYOUTS = [
    case("fsdp 2", 2, "parallelism=fsdp", "data.local_batch=8"),
    case(
        "fsdp 2, compile by inductor, ac lean", 2, "parallelism=fsdp", "data.local_batch=8", "compile=block", "ac=lean"
    ),
    *(
        case(f"fsdp 2, ac {ac}", 2, "parallelism=fsdp", "data.local_batch=8", f"ac={ac}")
        for ac in ("full", "layer", "op", "lean")
    ),
    *(
        case(
            f"fsdp 2, compile, ac {ac}",
            2,
            "parallelism=fsdp",
            "data.local_batch=8",
            "compile=block",
            "compile.backend=aot_eager",
            f"ac={ac}",
        )
        for ac in ("none", "op", "memory_budget")
    ),
    case("tp 2", 2, "parallelism=tp", "data.local_batch=16"),
    case("pp 2, zbv", 2, "parallelism=pp", "pp_schedule=zbv", "data.local_batch=16"),
    case("cp 2, ulysses", 2, "parallelism=cp", "parallelism.cp_rotate=ulysses", "data.local_batch=16"),
    case("qwen3, tp 2", 2, "parallelism=tp", "data.local_batch=16", base=QWEN),
    case("qwen3_moe, fsdp 2", 2, "parallelism=fsdp", "data.local_batch=8", base=MOE),
    case(
        "deepseek_v3, cp 2, ulysses",
        2,
        "parallelism=cp",
        "parallelism.cp_rotate=ulysses",
        "data.local_batch=16",
        base=(*LATENT, "model.v_head_dim=8"),
    ),
]


@pytest.mark.slow
def test_every_layout_learns_what_one_process_learns_with_a_mask():
    cases = [
        replace(
            one,
            base=(*one.base, *DENSE),
            overrides=(*one.overrides, LINEAR),
            documents=True,
            loss=1e-6,
            norm=1e-6,
            gradients=1e-6,
        )
        for one in LAYOUTS
    ]
    outcomes = verify(cases)
    assert all(outcome.passed for outcome in outcomes), [outcome for outcome in outcomes if not outcome.passed]
