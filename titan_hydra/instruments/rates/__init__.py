"""Rates of hardware: fitted to runs, tuned by runs, scored against published measurements; and useful time."""

PLAN = {  # options of `titan plan`: the module of each has add_arguments, asked and main
    "score": f"{__name__}.command_plan_score",
    "calibrate": f"{__name__}.command_calibrate",
    "tune": f"{__name__}.command_tune",
    "goodput": f"{__name__}.command_goodput",
}
PREDICTED = f"{__name__}.predicted"
REPORT_CHANGES = {  # options of `titan report` that add to its rows: what each does, and its function
    "predicted": (
        "print titan plan's prediction of each run, and mark runs that are more than 20 %% slower than predicted",
        f"{PREDICTED}:with_predictions",
    ),
}
REPORT_TEXTS = {  # forms of a report: the file's name, what it is for, and the function that returns the text
    "row": ("rows.yaml", "the runs as rows that titan plan --score reads", f"{PREDICTED}:measured_rows"),
}
