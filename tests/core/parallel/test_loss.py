"""The chunked loss has the value and gradients of the plain loss, and never holds the logits of all tokens; bf16
recipes are compared with float32.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from titan_hydra.core import data, models
from titan_hydra.core.kernels import cross_entropy as kernel
from titan_hydra.core.models.init import reset_buffers
from titan_hydra.core.parallel import loss_head
from titan_hydra.core.train.objectives.language import IGNORED, cross_entropy
from titan_hydra.core.train.trainer import build
from titan_hydra.experiments.compose.compose import compose_job, later_wins
from titan_hydra.instruments.verify.case import BASE, Case
from titan_hydra.instruments.verify.verify import job_of, trace

BATCH, SEQ, DIM, VOCABULARY = 4, 33, 48, 1031


def arguments(dtype=torch.float32, ignored=0.3):
    """Return hidden states, a head's weight, and labels of which some do not count."""
    torch.manual_seed(0)
    hidden = torch.randn(BATCH, SEQ, DIM, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY, DIM, dtype=dtype).mul_(0.3).requires_grad_()
    labels = torch.randint(VOCABULARY, (BATCH, SEQ)).masked_fill_(torch.rand(BATCH, SEQ) < ignored, IGNORED)
    return hidden, weight, labels


def gradients(loss, *tensors):
    """Return the gradients of the loss divided by some number of tokens, as in a step."""
    return torch.autograd.grad(loss / 77, tensors)


@pytest.mark.parametrize("chunk", [1, 50, 132, 10000])
@pytest.mark.parametrize("ignored", [0.0, 0.3, 1.0])
def test_value_and_gradients_are_those_of_the_plain_loss(chunk, ignored):
    hidden, weight, labels = arguments(ignored=ignored)
    plain = cross_entropy(hidden @ weight.T, labels)
    chunked = loss_head.linear_cross_entropy(hidden, weight, labels, chunk)
    torch.testing.assert_close(chunked, plain, rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(gradients(chunked, hidden, weight), gradients(plain, hidden, weight), strict=True):
        assert (ours - theirs).norm() <= 2e-6 * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_entropies_come_from_one_softmax(dtype, monkeypatch):
    """With entropies, the losses stay the same bit for bit, and no second softmax is computed."""
    hidden, weight, labels = (tensor.detach() for tensor in arguments(dtype))
    alone = loss_head.linear_cross_entropy(hidden, weight, labels.unsqueeze(-1), 50)
    monkeypatch.setattr(loss_head, "softmax_sums", None)
    pairs = loss_head.linear_cross_entropy(hidden, weight, labels.unsqueeze(-1).expand(-1, -1, 2), 50)
    exact = torch.distributions.Categorical(logits=(hidden @ weight.T).double()).entropy()
    assert torch.equal(pairs[..., 0], alone)
    torch.testing.assert_close(pairs[..., 1].double(), exact, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(loss_head.entropies(hidden @ weight.T), pairs[..., 1], rtol=0, atol=0)


def test_an_entropy_is_a_number_where_logits_are_far_apart():
    logits = torch.tensor([[[0.0, 0.0, -torch.inf, -1e38], [0.0, -1e4, -300.0, -199.0], [3e38, -3e38, -3e38, 0.0]]])
    torch.testing.assert_close(loss_head.entropies(logits)[0], torch.tensor([2.0, 1.0, 1.0]).log())


def test_huge_logits_do_not_overflow():
    hidden, weight, labels = arguments()
    with torch.no_grad():
        weight.mul_(1000)
    plain = cross_entropy(hidden @ weight.T, labels)
    chunked = loss_head.linear_cross_entropy(hidden, weight, labels, 50)
    assert plain.isfinite() and plain > 1e5
    torch.testing.assert_close(chunked, plain)
    assert all(gradient.isfinite().all() for gradient in gradients(chunked, hidden, weight))


def test_bf16_is_as_close_to_the_truth_as_the_plain_loss():
    hidden, weight, labels = arguments(torch.bfloat16)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    logits = (exact[0] @ exact[1].T).flatten(0, 1)
    truth = gradients(
        nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum"), *exact
    )

    def errors(loss):
        return [
            ((ours - right).norm() / right.norm()).item()
            for ours, right in zip(gradients(loss, hidden, weight), truth, strict=True)
        ]

    plain = errors(cross_entropy(hidden @ weight.T, labels))
    chunked = errors(loss_head.linear_cross_entropy(hidden, weight, labels, 20))
    # The gradient of the hidden state is rounded once more, as it is scaled in the backward.
    assert all(ours <= 1.3 * theirs for ours, theirs in zip(chunked, plain, strict=True)), (chunked, plain)


class Float32(TorchDispatchMode):
    """Record the shapes of float32 tensors that operators return."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.shapes |= {
            tuple(value.shape)
            for value in torch.utils._pytree.tree_leaves(result)
            if isinstance(value, torch.Tensor) and value.dtype == torch.float32
        }
        return result


def test_one_chunk_needs_no_float32_gradient_of_the_weight():
    """With one chunk the sum over chunks has one term. The gradients are bitwise those of several chunks of which only
    one counts.
    """
    hidden, weight, labels = arguments(torch.bfloat16)
    half = BATCH * SEQ // 2
    labels.flatten()[half:] = IGNORED
    several = gradients(loss_head.linear_cross_entropy(hidden, weight, labels, half), hidden, weight)
    with Float32() as seen:
        one = gradients(loss_head.linear_cross_entropy(hidden, weight, labels, BATCH * SEQ), hidden, weight)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(one, several, strict=True))
    assert (VOCABULARY, DIM) not in seen.shapes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_scaled_in_float32_and_rounded_once(dtype):
    values, factor = torch.randn(500, 7).to(dtype), torch.tensor(1 / 77)
    assert torch.equal(loss_head.scaled(values, factor, torch.bfloat16), (values.float() * factor).bfloat16())


class Wide(TorchDispatchMode):
    """Record the bytes of storages that are at least as large as a chunk's logits."""

    def __init__(self, numel):
        super().__init__()
        self.numel, self.sizes = numel, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.numel() == self.numel:
                # kept alive, so that no two have the same address
                self.sizes[value.untyped_storage()] = value.untyped_storage().nbytes()
        return result


@pytest.mark.parametrize("each", [False, True])
def test_a_chunk_holds_its_logits_alone_which_become_their_gradient(each, monkeypatch):
    """A logit takes 2 bytes in bfloat16, also inside the operators. With a float32 softmax beside the logits, it took
    8.
    """
    hidden, weight, labels = arguments(torch.bfloat16)
    monkeypatch.setattr(kernel, "AT_ONCE", 10 * VOCABULARY)
    labels = labels.unsqueeze(-1) if each else labels
    for operator in (
        "softmax_sums",
        "logits_to_slopes",
    ):  # called without torch.library, below which a mode sees nothing
        monkeypatch.setattr(loss_head, operator, getattr(kernel, operator)._init_fn)
    with Wide(44 * VOCABULARY) as seen:
        loss_head.linear_cross_entropy(hidden, weight, labels, 44).sum().backward()
    chunks = BATCH * SEQ // 44 * (1 + each)  # the backward computes the loss of each token again
    assert sum(seen.sizes.values()) == chunks * 44 * VOCABULARY * 2


class Largest(TorchDispatchMode):
    """Record the number of elements of the largest tensor that any operator returns."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor):
                self.numel = max(self.numel, value.numel())
        return result


@pytest.fixture
def one_rank(tmp_path):
    """Start a world of this process alone; return its device."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield torch.device("cpu")
    dist.destroy_process_group()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("train", [True, False])
def test_the_logits_of_all_tokens_are_never_held(tied, train, one_rank):
    """In a step no tensor is larger than the head's weight, which is as large as the logits of two chunks. The plain
    loss holds all logits.
    """
    largest = {}
    for name, *loss in (
        ("cross_entropy",),
        ("linear_cross_entropy", "loss=linear_cross_entropy", "loss.chunk_tokens=32"),
    ):
        job = compose_job(
            *later_wins(
                *BASE,
                *loss,
                f"model.tie_embeddings={tied}",
                "parallelism=single",
                "data.local_batch=16",
                "model.vocab_size=2048",
            )
        )
        trainer = build(job, one_rank)
        batch = data.build(job, 0, 1).next()
        with Largest() as seen, torch.set_grad_enabled(train):
            if train:
                trainer.forward_backward(batch)
            else:
                trainer.step.forward(trainer.prepare(batch))
        largest[name] = seen.numel
    assert largest == {"cross_entropy": 16 * 32 * 2048, "linear_cross_entropy": 64 * 2048}


def test_no_gradients_are_computed_where_none_are_asked_for():
    hidden, weight, labels = arguments()
    with torch.no_grad():
        held = loss_head.linear_cross_entropy(hidden, weight, labels, 10000)
    assert held.grad_fn is None
    calls = []

    class Matmuls(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            calls.append(function)
            return function(*args, **(kwargs or {}))

    with torch.no_grad(), Matmuls():
        loss_head.linear_cross_entropy(hidden, weight, labels, 10000)
    assert sum(function is torch.ops.aten.mm.default for function in calls) == 1


def test_the_head_keeps_its_name_and_gives_logits_without_targets():
    job = compose_job(*BASE, "loss=linear_cross_entropy")
    with torch.device("meta"):
        plain = models.build(job.model, job.data.seq_len)
    model = copy.deepcopy(plain)
    loss_head.convert(model, job.loss)
    model = copy.deepcopy(model)  # as a pipeline does; the copy must use its own weight
    assert list(model.state_dict()) == list(plain.state_dict())
    for module in (model, plain):
        module.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    reset_buffers(model)
    tokens, labels = torch.randint(512, (2, 2, 32))
    logits = model(tokens)
    assert logits.shape == (2, 32, 512) and logits.device.type == "cpu"
    torch.testing.assert_close(model(tokens, targets=labels), cross_entropy(logits, labels))


@pytest.mark.parametrize("precision", ["bf16", "bf16_full", "float8_emulate"])
def test_recipes_learn_what_float32_learns(precision, one_rank):
    """After ten steps on one process, losses are within 1 % of those of float32. The losses must not be equal: that
    would mean that the recipe is not in use.
    """
    exact, ours = (
        trace(job_of(Case("", 1, ("parallelism=single", "data.local_batch=16", f"precision={name}"))), one_rank)
        for name in ("fp32", precision)
    )
    assert ours.losses == pytest.approx(exact.losses, rel=1e-2)
    assert ours.losses != exact.losses
    kind = torch.bfloat16 if precision == "bf16_full" else torch.float32
    assert all(weight.dtype == kind for weight in ours.weights.values())


def test_a_step_without_labels_has_a_loss_of_zero(one_rank):
    trainer = build(compose_job(*later_wins(*BASE, "parallelism=single", "data.local_batch=16")), one_rank)
    batch = data.build(trainer.job, 0, 1).next()
    batch["labels"].fill_(IGNORED)
    assert trainer.forward_backward(batch).item() == 0
    assert all((parameter.grad == 0).all() for parameter in trainer.model.parameters())
