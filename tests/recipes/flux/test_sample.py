"""Test `titan generate images`: Euler steps from noise to the image, guidance, PNG files."""

import numpy as np
import pytest
import torch
from torch import nn

from titan_hydra import cli
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.recipes.flux.images import Caption
from titan_hydra.recipes.flux.sample import flow, times


class Straight(nn.Module):
    """The velocity of a flow from any noise to one image. All values of the image equal the caption's first number."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.calls = 0

    def forward(self, x, text, pooled, time, positions, guidance=None):
        self.calls += 1
        return (x - pooled[:, :1, None]) / time[:, None, None]


def caption(value):
    return Caption(np.zeros((1, 2), np.float32), np.array([value, 0], np.float32))


@pytest.mark.parametrize("shift", [0.0, 1.15])
def test_a_straight_flow_ends_at_its_image_in_any_number_of_steps(shift):
    for steps in (1, 7):
        found = flow(
            Straight(), torch.randn(2, 4, 8), [caption(0.5), caption(-2)], caption(0), times(steps, shift), 1.0
        )
        torch.testing.assert_close(found, torch.tensor([0.5, -2.0]).view(2, 1, 1).expand(2, 4, 8), rtol=1e-5, atol=1e-5)


def test_guidance_goes_beyond_the_empty_prompt():
    model = Straight()
    found = flow(model, torch.randn(1, 4, 8), [caption(0.5)], caption(0.25), times(5, 0.0), 3.0)
    torch.testing.assert_close(found, torch.full((1, 4, 8), 0.25 + 3 * 0.25), rtol=1e-5, atol=1e-5)
    assert model.calls == 10


def test_times_fall_from_noise_to_image():
    assert times(4, 0.0) == pytest.approx([1, 0.75, 0.5, 0.25, 0])
    assert times(2, 1.0) == pytest.approx([1, np.e / (np.e + 1), 0])


def test_a_run_draws_its_prompts(run_job, tmp_path, capsys):
    run = run_job(
        compose_job("experiment=flux_laptop", "gpus=1", "steps=1", "data.local_batch=2", "validation.steps=1")
    )
    words = [
        "generate",
        "images",
        str(run),
        "--prompt",
        "a red circle",
        "A blue Cross!",
        "--steps",
        "2",
        "--guidance",
        "2",
        "--to",
        str(tmp_path),
    ]
    assert cli.main(words) == 0
    assert [file.name for file in sorted(tmp_path.glob("*.png"))] == ["01-a-red-circle.png", "02-a-blue-cross.png"]
    before = (tmp_path / "01-a-red-circle.png").read_bytes()
    assert cli.main(words) == 0 and (tmp_path / "01-a-red-circle.png").read_bytes() == before
    assert cli.main([*words, "--sheet"]) == 0 and (tmp_path / "sheet.png").is_file()
    capsys.readouterr()
    for more, line in (
        (["--steps", "0"], "--steps=0: must be at least 1; nearest legal: 1"),
        (["--guidance", "nan"], "--guidance=nan: must be a number, and not negative; nearest legal: 0 or 1"),
    ):
        assert cli.main([*words, *more]) == 2
        assert capsys.readouterr().err.strip() == line
