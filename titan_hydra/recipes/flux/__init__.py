"""FLUX.1: text to image by rectified flow, with a transformer over image and text (MMDiT, arXiv 2403.03206)."""

from titan_hydra.core.job.config.additions import Word
from titan_hydra.core.job.config.family import Family
from titan_hydra.core.job.config.registry import DataSourceKind, ObjectiveKind, register

from .config import (
    CaptionSource,
    EncodedImagesSource,
    FluxConfig,
    ImageFilesSource,
    flops,
    no_linears,
    parameters,
    running_order,
    stacks_of_flux,
)

COMMANDS = {
    "generate images": Word(
        f"{__name__}.sample_command",
        "draw images with the model of a run or checkpoint",
        (
            'titan generate images c992 --prompt "a red circle" --to drawn',
            'titan generate images c992 --sheet --prompt "a cat" "a dog"',
        ),
    ),
    "data encode-images": Word(
        f"{__name__}.encode_command",
        "write latents and embeddings of captioned images, for data=encoded_images",
        (
            "titan data encode-images images.jsonl encoded --encoders FLUX.1-schnell",
            "titan data encode-images images.jsonl encoded --encoders FLUX.1-schnell --size 256",
        ),
    ),
}
ELSEWHERE = {"sample draw paint": "titan generate images"}
GIVEN = ("latents", "noise", "time", "text", "pooled")
register(
    Family(
        "flux",
        FluxConfig,
        model=f"{__name__}.model:Flux",
        hf=f"{__name__}.hf:HF",
        modules=running_order,
        parameters=parameters,
        flops=flops,
        linears=no_linears,
        stacks=stacks_of_flux,
        takes="latents",
        pipeline=False,
    )
)
register(
    ObjectiveKind(
        "diffusion",
        f"{__name__}.diffusion:Diffusion",
        needs=GIVEN,
        cases=f"{__name__}.cases:CASES",
        exact=f"{__name__}.exact:squared_error",
        makes="latents",
        faults=f"{__name__}.rules:faults",
    )
)
register(
    DataSourceKind(
        "encoded_images",
        f"{__name__}.images:open_encoded",
        EncodedImagesSource,
        documents=False,
        needs_path=True,
        gives=GIVEN,
        faults=f"{__name__}.images:faults",
    )
)
register(
    DataSourceKind(
        "image_files",
        f"{__name__}.encode:open_image_files",
        ImageFilesSource,
        documents=False,
        needs_path=True,
        suffixes=(".jsonl",),
        gives=GIVEN,
        faults=f"{__name__}.images:faults_of_files",
        warnings=f"{__name__}.images:unknown_words",
        beside="the frozen text encoders and the autoencoder, in float32",
    )
)
register(
    DataSourceKind("synthetic_images", f"{__name__}.images:draw_images", CaptionSource, documents=False, gives=GIVEN)
)
