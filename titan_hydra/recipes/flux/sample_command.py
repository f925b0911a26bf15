"""`titan generate images`: draw images with the model of a run or checkpoint."""

import argparse
import math
import re
from pathlib import Path

import numpy as np

from titan_hydra.core.base.errors import ConfigError, Exit
from titan_hydra.core.job.config.fault import bad_value
from titan_hydra.experiments.runs.command_model import add_model, checkpoint_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--prompt", nargs="+", required=True, metavar="TEXT", help="prompts, one per image")
    parser.add_argument(
        "--to", type=Path, default=Path("."), metavar="FOLDER", help="folder for 01-NAME.png and so on (.)"
    )
    parser.add_argument("--sheet", action="store_true", help="also write all images side by side as FOLDER/sheet.png")
    parser.add_argument("--steps", type=int, default=50, metavar="N", help="Euler steps from noise to image (50)")
    parser.add_argument(
        "--guidance", type=float, default=1.0, metavar="G", help="guidance strength; above 1: closer to the prompt (1)"
    )
    parser.add_argument(
        "--shift",
        type=float,
        default=0.0,
        metavar="MU",
        help="shift of the steps; above 0: more steps at high noise; FLUX.1-dev uses 0.5 for 256 pixels and 1.15 for 1024 (0)",
    )
    parser.add_argument(
        "--encoders",
        metavar="FOLDER",
        help="folder of the text encoders and the autoencoder; a run on data=synthetic_images needs no folder",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise (0)")


def main(args: argparse.Namespace) -> int:
    """Write an image for each prompt."""
    if args.steps < 1:
        raise bad_value("--steps", args.steps, "must be at least 1", 1)
    for name in ("guidance", "shift"):
        if not (math.isfinite(value := getattr(args, name)) and value >= 0):
            raise bad_value(f"--{name}", value, "must be a number, and not negative", 0, 1)
    from PIL import Image

    from .sample import sample

    images = sample(
        checkpoint_of(args), args.prompt, args.steps, args.guidance, args.shift, args.seed, args.dtype, args.encoders
    )
    names = [
        f"{number:02}-{re.sub(r'[^a-z0-9]+', '-', prompt.lower())[:60].strip('-')}.png"
        for number, prompt in enumerate(args.prompt, 1)
    ]
    files = {"sheet.png": np.concatenate(images, axis=1)} if args.sheet else dict(zip(names, images, strict=True))
    try:
        args.to.mkdir(parents=True, exist_ok=True)
        for name, image in files.items():
            Image.fromarray(image).save(args.to / name)
            print(args.to / name)
    except OSError as error:
        raise ConfigError(f"--to={args.to}: cannot be written ({error.strerror})") from error
    return Exit.DONE
