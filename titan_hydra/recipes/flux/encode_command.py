"""`titan data encode-images FILE FOLDER`: compute the latents and embeddings of captioned images."""

import argparse
from pathlib import Path

from titan_hydra.core.base.errors import Exit
from titan_hydra.core.job.config.fault import bad_value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `titan data encode-images`."""
    parser.add_argument(
        "lines", type=Path, metavar="FILE", help='.jsonl: {"image": path relative to it, "caption": text} on each line'
    )
    parser.add_argument("target", type=Path, metavar="FOLDER", help="folder to write; new or empty")
    parser.add_argument(
        "--encoders",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="folder of FLUX in Hugging Face's format: text_encoder, text_encoder_2, vae, tokenizer, tokenizer_2",
    )
    parser.add_argument(
        "--size", type=int, default=256, metavar="N", help="side length in pixels of the scaled central square (256)"
    )
    parser.add_argument(
        "--text-len", type=int, default=256, metavar="N", help="tokens per caption, model.text_len (256)"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="dtype of the computation (bfloat16)"
    )
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="images per batch (8)")
    parser.add_argument("--per-file", type=int, default=1000, metavar="N", help="images per file (1000)")


def main(args: argparse.Namespace) -> int:
    """Encode captioned images into a folder."""
    for name in ("size", "text_len", "batch", "per_file"):
        if (value := getattr(args, name)) < 1:
            raise bad_value(f"--{name.replace('_', '-')}", value, "must be at least 1", 1)
    import torch

    from .encode import encode_files

    described = encode_files(
        args.lines,
        args.target,
        args.encoders,
        args.size,
        args.text_len,
        getattr(torch, args.dtype),
        args.batch,
        args.per_file,
        print,
    )
    side = described["shapes"]["mean"][-1] // 2
    print(
        f"{args.target}: {sum(described['images']):,} images; train with data=encoded_images data.path={args.target} "
        f"model.text_len={args.text_len} data.seq_len={args.text_len + side * side}"
    )
    return Exit.DONE
