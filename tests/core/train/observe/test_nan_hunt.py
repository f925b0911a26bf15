"""debug=nan_hunt names the first value that is not finite, on any layout, and the rank on which it began."""

import pytest

POISON_GRADIENT = """
after = loop.Probes.after_backward
def poisoned(self, step):
    if step == 3 and rank == 1:
        gradient = dict(self.weights.named_parameters())["{name}"].grad
        getattr(gradient, "_local_tensor", gradient)[0, 0] = float("nan")
    after(self, step)
loop.Probes.after_backward = poisoned
"""
POISON_OUTPUT = """
import torch
build = loop.build
class Poison(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * {forward}
    @staticmethod
    def backward(ctx, gradient): return gradient * {backward}
def poisoned(job, device):
    made = build(job, device)
    module = dict(made.model.named_modules()).get("{name}")
    if module is not None and rank == 1:
        forward, count = module.forward, []
        def broken(*args, **kwargs):
            count.append(1)
            # Step 3 with ac=full, which computes a forward twice.
            return Poison.apply(forward(*args, **kwargs)) if len(count) >= 5 else forward(*args, **kwargs)
        module.forward = broken
    return made
loop.build = poisoned
"""


def last_words(launcher) -> str:
    return launcher.rank(0)["error"]["message"]


@pytest.mark.parametrize(
    "layout",
    [
        "parallelism=fsdp",
        *(
            pytest.param(other, marks=pytest.mark.slow)
            for other in ("parallelism=tp", "parallelism=pp pp_schedule=1f1b")
        ),
    ],
)
def test_a_gradient_that_is_not_finite_on_one_rank_is_named(launcher, layout):
    launcher.sabotage(POISON_GRADIENT.format(name="layers.1.attention.wq.weight"))
    done = launcher.run(*launcher.TINY, "gpus=2", "debug.nan_hunt=true", *layout.split())
    assert done.returncode == 78, done.stderr
    assert "step 3: " in last_words(launcher)
    assert (
        "nan_hunt: first not finite is the gradient of parameter weight of module layers.1.attention.wq "
        "(layers.1.attention.wq.weight), on rank 1 (1 of "
    ) in last_words(launcher)
    assert "layers.1.attention.wq.weight" in done.stderr
    assert launcher.rank(1)["error"]["message"] == last_words(launcher)


@pytest.mark.parametrize(
    ("forward", "backward", "expected"),
    [
        ("float('inf')", "1", "what comes out of module layers.0.feed_forward.w2, on rank 1"),
        ("1", "float('nan')", "what comes out of the backward of module layers.0.feed_forward.w2, on rank 1"),
    ],
)
def test_a_module_that_breaks_on_one_rank_is_named(launcher, forward, backward, expected):
    """Sums over ranks carry the NaN into every gradient and parameter, but the module is still named."""
    launcher.sabotage(POISON_OUTPUT.format(name="layers.0.feed_forward.w2", forward=forward, backward=backward))
    done = launcher.run(*launcher.TINY, "gpus=2", "debug.nan_hunt=true", "parallelism=fsdp", "ac=full")
    assert done.returncode == 78, done.stderr
    assert f"step 3: loss {'nan' if backward == '1' else ''}" in last_words(launcher)
    assert f"nan_hunt: first not finite is {expected}" in last_words(launcher)
