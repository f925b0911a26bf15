"""The acceptance matrix of layouts, and its verification."""

from titan_hydra.core.job.config.additions import Word

COMMANDS = {
    "verify": Word(
        "titan_hydra.instruments.verify.command_verify",
        "prove that layouts, or a module of yours, learn what one process learns",
        ('titan verify --only "fsdp 4"', "titan verify --list"),
        "Before a run",
    ),
    "coordcheck": Word(
        "titan_hydra.instruments.verify.command_coordcheck",
        "whether what a model learns, or its best learning rate, depends on its width or depth",
        (
            "titan coordcheck parametrization=mup parametrization.base_dim=16",
            "titan coordcheck parametrization=mup parametrization.base_dim=16 --plot widths.png",
        ),
    ),
    "certify": Word(
        "titan_hydra.instruments.verify.command_certify",
        "a certificate for a layout: proven at a reduced size, resumed from a kill, exported",
        (
            "titan certify debug=tiny precision=fp32 gpus=2 parallelism=fsdp hardware=cpu",
            "titan certify +sweeps=paper_table1",
        ),
    ),
}
