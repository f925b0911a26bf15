"""Scaling curves: ladders of sizes and numbers of tokens, the law L(N, D) = E + A / N^alpha + B / D^beta fitted to their
held-out losses, and what follows for larger runs. Imports no torch; scipy is imported by law.py when it fits.
"""

from titan_hydra.core.job.config.additions import Word

COMMANDS = {
    "scale": Word(
        "titan_hydra.instruments.scaling.command_scale",
        "fit a scaling law to a ladder of sizes: predict larger runs, compare two recipes; --make writes a ladder",
        ("titan scale ladder --flops 1e13", "titan scale adamw muon --flops 1e21"),
    ),
}
