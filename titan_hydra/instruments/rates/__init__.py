"""Rates of hardware: fitted to runs, tuned by runs, scored against published measurements; and useful time."""

from titan_hydra.core.job.config.additions import Word

COMMANDS = {
    "rates": Word(
        "",
        "fit the planner's rates to your devices, and score what it predicts",
        ("titan rates calibrate hardware=h100 --from c992 --into mycluster", "titan rates tune model=llama3_8b gpus=8"),
    ),
    "rates calibrate": Word(
        f"{__name__}.command_calibrate",
        "fit the rates of hardware=NAME to finished runs or sweeps, and print the error of each prediction",
        (
            "titan rates calibrate hardware=h100 --from c992 e1ee",
            "titan rates calibrate hardware=h100 --from c992 --into mycluster",
        ),
    ),
    "rates tune": Word(
        f"{__name__}.command_tune",
        "plan, run the best layouts, fit the rates to these runs, and plan again, until prediction and measurement agree",
        (
            "titan rates tune model=llama3_debug hardware=cpu gpus=2 --layouts 2 --steps 8",
            "titan rates tune model=llama3_8b hardware=h100 cluster=slurm gpus=64 --into mycluster",
        ),
    ),
    "rates goodput": Word(
        f"{__name__}.command_goodput",
        "print the share of time in which a layout makes steps that count, despite failures and saves",
        (
            "titan rates goodput model=llama3_70b hardware=h100 gpus=1024 parallelism.tp=8 ac=full",
            "titan rates goodput model=llama3_8b hardware=h100 gpus=64 --failures 0.01",
        ),
    ),
    "rates score": Word(
        f"{__name__}.command_score",
        "predict the measurements of a file (titan report --row writes one), and print the errors",
        ("titan rates score rows.yaml", "titan rates score benchmarks/planner/published.yaml --json"),
    ),
}
PREDICTED = f"{__name__}.predicted"
REPORT_CHANGES = {  # options of `titan report` that add to its rows: what each does, and its function
    "predicted": (
        "print titan plan's prediction of each run, and mark runs that are more than 20 %% slower than predicted",
        f"{PREDICTED}:with_predictions",
    ),
}
REPORT_TEXTS = {  # forms of a report: the file's name, what it is for, and the function that returns the text
    "row": ("rows.yaml", "the runs as rows that titan rates score reads", f"{PREDICTED}:measured_rows"),
}
