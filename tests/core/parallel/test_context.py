"""Test context parallelism beyond the acceptance matrix: the cut of a batch, the attention kernels alone, and options
that torch keeps for the whole process.
"""

import multiprocessing
import os
import traceback
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import _attention as ring

from tests.kits.forked import PRELOADED
from titan_hydra.core import data, models
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.data.batch import Batch
from titan_hydra.core.job.config.schema import Parallelism
from titan_hydra.core.kernels.documents import document_mask, document_offsets
from titan_hydra.core.parallel import build_mesh, context, ring_cpu
from titan_hydra.core.train.objectives.language import Language
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.instruments.verify.case import case
from titan_hydra.instruments.verify.verify import job_of, verify

SMALL = (
    "precision=fp32",
    "model.dim=32",
    "model.n_layers=1",
    "model.n_heads=8",
    "model.n_kv_heads=4",
    "model.vocab_size=64",
    "data=synthetic",
    "data.seq_len=32",
)
MANNERS = [("allgather", True), ("allgather", False), ("alltoall", True), ("alltoall", False), ("ulysses", True)]


def job_with(rotate="allgather", balance=True, cp=2, *overrides):
    return compose_job(
        *SMALL,
        "parallelism=cp",
        f"gpus={cp}",
        f"parallelism.cp={cp}",
        f"parallelism.cp_rotate={rotate}",
        *([] if rotate == "ulysses" else [f"parallelism.cp_load_balance={balance}"]),
        *overrides,
    )


def applied(job, mesh):
    """Return the attention kernel of a block after `context.apply`."""
    with torch.device("meta"):
        model = models.build(job.model, job.data.seq_len)
    context.apply(model, mesh, job)
    return model.layers["0"].attention.sdpa


@pytest.mark.parametrize("cp", [2, 4])
def test_the_balanced_order_is_the_one_that_torchs_ring_takes_for_granted(world, cp):
    expected = ring._HeadTailLoadBalancer(32, cp, "cpu")._generate_indices()[0].chunk(cp)
    for rank in range(cp):
        assert context.local_index(32, world(job_with(cp=cp).parallelism, rank)).tolist() == expected[rank].tolist()


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "documents"])
@pytest.mark.parametrize(("rotate", "balance"), MANNERS)
def test_a_token_keeps_its_label_and_its_position(world, rotate, balance, packed):
    """If tokens, labels and positions were cut differently, training would continue without an error."""
    tokens = torch.arange(64).view(2, 32)
    positions = torch.arange(32) % 5 if packed else torch.arange(32)
    documents = {"documents": torch.arange(32).expand(2, 32) // 5} if packed else {}
    whole = Batch(
        {"tokens": tokens, "labels": tokens + 1000, "positions": positions.expand(2, 32)} | documents, Language.dims
    )
    seen = []
    for rank in range(4):
        part = context.shard_batch(whole, world(job_with(rotate, balance, 4).parallelism, rank))
        assert part["tokens"].shape == (2, 8)
        assert torch.equal(part["labels"], part["tokens"] + 1000)
        assert torch.equal(part["positions"], positions[part["tokens"] % 32])
        assert not packed or part["documents"] is whole["documents"]
        seen.append(part["tokens"])
    assert torch.equal(torch.cat(seen, 1).sort().values, tokens)  # the ranks together have every token


def test_parameters_are_sharded_and_losses_summed_over_the_ranks_of_a_sequence(world):
    """A gradient that is not reduced over these ranks is the gradient of a part of the text only (TorchTitan #685)."""
    mesh = world(Parallelism(name="", dp_replicate=2, dp_shard=2, cp=2))
    assert mesh.fsdp.shape == (2, 4)
    assert dist.get_world_size(mesh.loss) == 8
    assert dist.get_world_size(mesh.batch) == 4


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("rotate", "balance"), MANNERS)
def test_attention_on_parts_is_attention_on_the_whole(tmp_path, rotate, balance, ranks):
    in_ranks(ranks, tmp_path, attend, rotate, balance)


def attend(rotate, balance):
    """Compare every rank's outputs and gradients with those of the whole sequence, with grouped queries, in float32 and
    bfloat16. Check that torch's ring runs where it should.
    """
    job = job_with(rotate, balance, dist.get_world_size())
    mesh = build_mesh(job.parallelism, "cpu")
    sdpa, index = applied(job, mesh), context.local_index(32, mesh)
    ends = torch.tensor([[5, 10, 15, 20, 25, 30, 32], [7, 14, 21, 28, 32, 32, 32]], dtype=torch.int32)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        for packed in (False, True) if rotate == "ulysses" else (False,):
            documents, mask = (document_offsets(ends), document_mask(ends, 32)) if packed else (None, None)
            torch.manual_seed(0)
            whole = [torch.randn(2, heads, 32, 8, requires_grad=True) for heads in (8, 4, 4)]
            weight = torch.randn(2, 8, 32, 8)
            expected = F.scaled_dot_product_attention(*whole, mask, is_causal=mask is None, enable_gqa=True)
            (expected * weight).sum().backward()
            parts = [x.detach()[:, :, index].to(dtype).requires_grad_() for x in whole]
            with Counted("ring_forward") as forwards, Counted("ring_backward") as backwards:
                h = sdpa(*parts, documents)
                (h * weight[:, :, index]).sum().backward()
            assert forwards == backwards == ([] if rotate == "ulysses" else [dtype])
            for got, want in [(h, expected), *((part.grad, x.grad) for part, x in zip(parts, whole, strict=True))]:
                assert got.dtype == dtype
                want = want[:, :, index]
                assert (got.float() - want).norm() <= tolerance * want.norm()


class Counted:
    """Record the dtypes of the queries in all calls of one of torch's functions."""

    def __init__(self, name):
        self.name, self.calls, self.original = name, [], getattr(ring_cpu.private, name)

    def __enter__(self):
        def count(*args, query, **kwargs):
            self.calls.append(query.dtype)
            return self.original(*args, query=query, **kwargs)

        setattr(ring_cpu.private, self.name, count)
        return self.calls

    def __exit__(self, *error):
        setattr(ring_cpu.private, self.name, self.original)


def test_no_job_inherits_the_ring_of_the_one_before(world):
    first = job_with("alltoall", False)
    stale = applied(first, world(first.parallelism))
    assert context.ring_options() == (ring._RotateMethod.ALL_TO_ALL, False)
    assert ring_cpu.FORWARD in DTensor._op_dispatcher._custom_op_handlers
    second = job_with("allgather", True)
    applied(second, world(second.parallelism))
    assert context.ring_options() == (ring._RotateMethod.ALL_GATHER, True)
    with pytest.raises(RuntimeError, match="another job"):
        stale(*[torch.zeros(1, 8, 16, 4)] * 3)
    for rotate, cp in (("ulysses", 2), ("allgather", 1)):
        job = job_with(rotate, cp=cp)
        kernel = applied(job, world(job.parallelism))
        assert not isinstance(kernel, context.Ring)
        assert ring_cpu.FORWARD not in DTensor._op_dispatcher._custom_op_handlers


def test_a_kernel_that_cannot_work_in_a_ring_is_refused_before_it_could_fall_back(world):
    for attention in ("math", "efficient"):
        job = job_with()
        job.model.attention = attention
        with pytest.raises(ConfigError, match=rf"model\.attention={attention}.*auto, flash"):
            applied(job, world(job.parallelism))
    with pytest.raises(ConfigError, match=r"compute_dtype=float32.*bfloat16"):
        context.enable_ring(job_with(), "cuda")


@pytest.mark.slow
def test_documents_are_kept_apart_across_ranks(tmp_path):
    for number in range(200):
        (tmp_path / f"{number}.txt").write_text("abc " * (1 + number % 9))
    packed = case(
        "cp 2, ulysses, documents",
        2,
        "parallelism=cp",
        "parallelism.cp_rotate=ulysses",
        "data.local_batch=16",
        base=("data=text_files", f"data.path={tmp_path}/*.txt", "data.document_mask=true", "model.vocab_size=4096"),
    )
    assert (data.build(job_of(packed), 0, 1).next()["documents"].amax(1) > 0).all()
    (outcome,) = verify([packed])
    assert outcome.passed, outcome


@pytest.mark.slow
def test_a_compiled_block_is_not_reused_for_another_order_of_the_sequence():
    """torch.compile does not see the options of the ring unless it is told to: before it was told, gradients were wrong
    by half.
    """
    outcomes = verify(
        [
            case(
                f"balance {balance}",
                2,
                "parallelism=cp",
                f"parallelism.cp_load_balance={balance}",
                "data.local_batch=16",
                "compile=block",
                "compile.backend=aot_eager",
                base=("steps=2", "model.n_layers=1"),
            )
            for balance in (True, False)
        ]
    )
    assert all(outcome.passed for outcome in outcomes), outcomes


def in_ranks(ranks, folder, function, *args):
    """Run a function of this file on gloo ranks, where a warning is an error. Raise AssertionError with the error of a
    rank.
    """
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(PRELOADED)
    started = [processes.Process(target=_rank, args=(rank, ranks, folder, function, args)) for rank in range(ranks)]
    for process in started:
        process.start()
    for process in started:
        process.join(120)
        process.kill()
    errors = [path.read_text() for path in folder.glob("error_*")]
    assert not errors, errors[0]
    assert [process.exitcode for process in started] == [0] * ranks


def _rank(rank, ranks, folder, function, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            function(*args)
        dist.barrier()
    except BaseException:
        (folder / f"error_{rank}").write_text(traceback.format_exc())
        os._exit(1)
