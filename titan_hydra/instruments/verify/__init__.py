"""Proofs that a layout learns what one process learns: of the matrix of layouts, of a job, of a module; and what a
model's size decides.
"""

from titan_hydra.core.job.config.additions import Word

COMMANDS = {
    "verify": Word(
        "titan_hydra.instruments.verify.command_verify",
        "prove that layouts, the layout of a job, or a module of yours learn what one process learns; compare widths",
        (
            "titan verify model=llama3_8b parallelism=fsdp_tp gpus=8 hardware=h100",
            'titan verify --only "fsdp 4"',
            "titan verify --module mine.py:subject",
            "titan verify widths parametrization=mup parametrization.base_dim=16",
        ),
        "Before a run",
    ),
}
