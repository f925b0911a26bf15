"""The keys of FLUX and of its data sources, its size and its FLOPs. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt
from typing import Any

from titan_hydra.core.job.config.family import Linear, Stack
from titan_hydra.core.job.config.fault import Fault
from titan_hydra.core.job.config.field import key
from titan_hydra.core.job.config.model import Model
from titan_hydra.core.job.config.ranges import COUNT, NOT_NEGATIVE, PATH, SHARE, WIDTH, Interval
from titan_hydra.core.job.config.source import FileSource, Source

PATCH = 2  # side length in latents of an image token
TIME = 256  # number of sines and cosines in the embedding of the time


@dataclass
class FluxConfig(Model):
    double_layers: int = key(
        19,
        "number of double-stream blocks (separate weights for image and text); they come first, and the "
        "other blocks are single-stream",
        Interval(0, 10_000),
    )
    channels: int = key(16, "channels of the autoencoder's latents", WIDTH)
    text_len: int = key(
        512,
        "number of tokens of a caption; the rest of data.seq_len, which must be a square number, are the "
        "tokens of the image",
        COUNT,
    )
    text_dim: int = key(4096, "width of the text encoder's embeddings", WIDTH)
    pooled_dim: int = key(768, "width of the pooled embedding of a caption", WIDTH)
    rope_first: int = key(
        16,
        "width within a head that RoPE rotates by the first coordinate, which is 0; the other two, the image's row and "
        "column, share the rest",
        Interval(0, 1_000_000),
    )
    guidance: float | None = key(
        None,
        "guidance strength, an input of a guidance-distilled model; null: the model has no such input",
        NOT_NEGATIVE,
    )

    @property
    def causal(self) -> bool:
        """Whether each token attends only to itself and to earlier tokens."""
        return False

    @property
    def patch_width(self) -> int:
        """The number of elements of an image token, a square of latents."""
        return PATCH * PATCH * self.channels

    @property
    def rope_axes(self) -> tuple[int, int, int]:
        """The numbers of elements of a head that RoPE rotates by each of the three coordinates."""
        rest = (self.head_width - self.rope_first) // 2
        return self.rope_first, rest, rest

    def latent_side(self, seq_len: int) -> int:
        """Return the side length, in latents, of an image whose tokens fill the part of the sequence that is not text;
        0 if there is no such part.
        """
        return PATCH * isqrt(max(seq_len - self.text_len, 0))

    def arithmetic(self) -> dict[str, Any]:
        return (
            super().arithmetic()
            | dict.fromkeys(("text_len", "vocab_size", "norm_eps"))
            | {"guidance": self.guidance is not None}
        )

    def faults(self) -> Iterator[Fault]:
        """RoPE rotates each element of a head, in pairs, by one of three coordinates. Attention has no grouped queries."""
        if self.rope_first % 2 or (self.head_width - self.rope_first) % 4 or self.rope_first > self.head_width:
            legal = range(self.head_width % 4, self.head_width + 1, 4)
            yield Fault(
                "model.rope_first",
                self.rope_first,
                f"must be even, and the rest of a head's width {self.head_width} divide by 4",
                legal=tuple(sorted(legal, key=lambda width: abs(width - self.rope_first))[:2]),
            )
        if self.double_layers > self.n_layers:
            yield Fault(
                "model.double_layers",
                self.double_layers,
                f"the model has {self.n_layers} blocks",
                legal=(self.n_layers,),
            )
        if self.n_kv_heads != self.n_heads:
            yield Fault("model.n_kv_heads", self.n_kv_heads, "each query head has its own keys", legal=(self.n_heads,))
        if self.tie_embeddings:
            yield Fault("model.tie_embeddings", True, "the model has no embedding of tokens", legal=(False,))


def running_order(config: FluxConfig) -> list[str]:
    """Return the modules in running order."""
    guidance = ["guidance_in"] if config.guidance is not None else []
    blocks = [f"layers.{block}" for block in range(config.n_layers)]
    return ["img_in", "txt_in", "time_in", "vector_in", *guidance, *blocks, "modulation", "output"]


def no_linears(config: FluxConfig) -> tuple[Linear, ...]:
    """Return an empty list. FLUX has two kinds of blocks, so features that need one list of linears (adapters) are
    refused.
    """
    return ()


def stacks_of_flux(job: Any) -> tuple[Stack, ...]:
    """Return the double-stream and the single-stream blocks, for predictions."""
    config: FluxConfig = job.model
    dim, width, seq_len = config.dim, config.ffn_width, job.data.seq_len
    text = config.text_len / seq_len
    sides = ("", 1 - text), ("txt_", text)
    # With several samples, attention's outputs for image and for text are not contiguous, so they are copied.
    copied = job.data.local_batch > 1
    double = (
        *(Linear(f"{side}modulation", dim, 6 * dim, tokens=1 / seq_len) for side, _ in sides),
        *(Linear(f"{side}{name}", dim, dim, tokens=share) for side, share in sides for name in ("wq", "wk", "wv")),
        *(Linear(f"{side}wo", dim, dim, column=False, tokens=share) for side, share in sides),
        *(
            Linear(f"{side}{name}", *widths, column=name == "w1", tokens=share)
            for side, share in sides
            for name, widths in (("w1", (dim, width)), ("w2", (width, dim)))
        ),
    )
    single = (
        Linear("modulation", dim, 3 * dim, tokens=1 / seq_len),
        Linear("w1", dim, width),
        *(Linear(name, dim, dim) for name in ("wq", "wk", "wv")),
        Linear("w2", dim + width, dim, column=False),
    )
    # A double-stream block keeps twice, for attention and for the feed-forward: the input, the normalized input, the
    # modulated input and the gated output. It keeps once: q and k before they are normalized; q, k, v and attention's
    # output; the feed-forward before and after its activation. A single-stream block modulates once, and concatenates
    # attention's output and the feed-forward.
    return (
        Stack(
            depth=config.double_layers,
            linears=double,
            parameters=parameters_of(config)[0],
            kept=14 * dim + 2 * width + copied * dim,
            again=2 * dim,
            backward=dim,
        ),
        Stack(
            depth=config.n_layers - config.double_layers,
            linears=single,
            parameters=parameters_of(config)[1],
            kept=11 * dim + 2 * width,
            again=dim,
            backward=3 * dim + width,
        ),
    )


def parameters_of(config: FluxConfig) -> tuple[int, int]:
    """Return the numbers of parameters of a double-stream and of a single-stream block."""
    dim, width = config.dim, config.ffn_width
    double = (
        12 * dim * dim
        + 2 * (4 * dim * dim + 2 * dim * width)
        + 2 * (6 * dim + 4 * dim + width + dim)
        + 4 * config.head_width
    )
    single = 3 * dim * dim + 4 * dim * dim + 2 * dim * width + 3 * dim + 3 * dim + width + dim + 2 * config.head_width
    return double, single


def parameters(config: FluxConfig) -> int:
    """Return the number of parameters."""
    double, single = parameters_of(config)
    *_, embeddings = matrices(config)
    dim, inputs = config.dim, 2 if config.guidance is None else 3
    around = (2 * config.patch_width + config.text_dim + 2 * dim) * dim + embeddings
    biases = 2 * dim + inputs * 2 * dim + 2 * dim + config.patch_width
    return config.double_layers * double + (config.n_layers - config.double_layers) * single + around + biases


def matrices(config: FluxConfig) -> tuple[int, int, int, int, int]:
    """Return five numbers of weights. The first three are weights that multiply an image token, a text token, and a
    token of either kind. The last two are weights of the modulations and of a sample's embeddings, used once for each
    sample.
    """
    dim, width = config.dim, config.ffn_width
    single, double = config.n_layers - config.double_layers, config.double_layers
    block = 4 * dim * dim + 2 * dim * width  # attention, feed-forward
    embeddings = (TIME * dim + dim * dim) * (1 if config.guidance is None else 2) + config.pooled_dim * dim + dim * dim
    modulations = double * 12 * dim * dim + single * 3 * dim * dim + 2 * dim * dim
    return (
        double * block + 2 * config.patch_width * dim,
        double * block + config.text_dim * dim,
        single * block,
        modulations,
        embeddings,
    )


def flops(config: FluxConfig, seq_len: int, parameters: int) -> int:
    """Return the FLOPs of forward and backward of a sample, divided by the number of its tokens: 6 per weight that
    multiplies a token, and attention over all tokens.
    """
    per_image, per_text, per_both, *per_sample = matrices(config)
    image = seq_len - config.text_len
    met = per_image * image + per_text * config.text_len + per_both * seq_len + sum(per_sample)
    return 6 * met // seq_len + 12 * config.n_layers * config.dim * seq_len


@dataclass
class CaptionSource(Source):
    caption_dropout: float = key(
        0.447,
        "fraction of captions that the empty caption replaces, drawn for each text encoder independently "
        "(classifier-free guidance)",
        SHARE,
    )


@dataclass
class EncodedImagesSource(CaptionSource, FileSource):
    pass


@dataclass
class ImageFilesSource(CaptionSource, FileSource):
    encoders: str | None = key(
        None,
        "folder of FLUX in Hugging Face's format: text_encoder, text_encoder_2, vae and two tokenizers",
        PATH,
        reads="data",
    )
