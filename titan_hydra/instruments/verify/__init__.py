"""The acceptance matrix of layouts, and its verification."""

COMMANDS = {
    "verify": ("titan_hydra.instruments.verify.command_verify", "prove that layouts learn what one process learns"),
    "coordcheck": (
        "titan_hydra.instruments.verify.command_coordcheck",
        "whether what a model learns, or its best learning rate, depends on its width or depth",
    ),
    "certify": (
        "titan_hydra.instruments.verify.command_certify",
        "a certificate for a layout: proven at a reduced size, resumed from a kill, exported",
    ),
}
