"""Write a report's table as text: for a terminal, as Markdown, CSV or LaTeX. The same report always gives the same
bytes.
"""

import csv
import io
import re
from dataclasses import asdict
from typing import Any

from titan_hydra.core.base.text import table

from .digits import truncated_percent
from .table import Report

LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\N{MINUS SIGN}": "$-$",
    "\N{EN DASH}": "--",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
}

LEAVES = (
    "FLOPs of a token",
    "tokens seen",
    "IQR",
    "steps",
    "parameters",
    "runs",
    "mean loss",
)  # a narrow terminal lacks them


def terminal(report: Report) -> None:
    """Print the table. Rows that failed or left the band are red; the baseline's row is bold."""
    titles = [column.title for column in report.columns]
    colours = []
    for row in report.rows:
        red = row.cell.lost or row.flagged
        colour = dict.fromkeys(titles, "red" if red else "bold") if red or row.baseline else {}
        colours.append(colour | ({"difference": "dim"} if row.doubt else {}))
    right = [column.title for column in report.columns if not column.word]
    lines = table(titles, report.texts, right, ("technique",), colours, [title for title in LEAVES if title in titles])
    print(report.name, *lines, "", *filter(None, [report.caption]), *report.notes, sep="\n")
    if section := report.section:
        print(
            "", section.name, *table(section.head, section.rows, section.head, ("state",)), "", *section.notes, sep="\n"
        )


def markdown(report: Report) -> str:
    """Return the table in Markdown, with its caption above and a list of its notes below."""
    titles = [column.title for column in report.columns]
    lines = [f"**{_md(report.name)}**" + (f" ({_md(report.caption)})" if report.caption else ""), ""]
    lines += [
        _pipes([_md(title) for title in titles]),
        _pipes(["---" if column.word else "---:" for column in report.columns], pad=False),
    ]
    lines += [_pipes([_md(text) for text in texts]) for texts in report.texts]
    if report.notes:
        lines += ["", *(f"- {_md(note)}" for note in report.notes)]
    if section := report.section:
        lines += [
            "",
            f"**{_md(section.name)}**",
            "",
            _pipes([_md(title) for title in section.head]),
            _pipes(["---"] * len(section.head), pad=False),
        ]
        lines += [*(_pipes([_md(text) for text in row]) for row in section.rows), ""]
        lines += [f"- {_md(note)}" for note in section.notes]
    return "\n".join(lines) + "\n"


def comma_separated(report: Report) -> str:
    """Return all columns as CSV, even those that are empty or constant, one for each varied key, and further facts about
    each run. Values are not rounded.
    """
    out, rows = io.StringIO(), values_of_rows(report)
    writer = csv.DictWriter(out, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def report_document(report: Report) -> dict[str, Any]:
    """Return the report as JSON values: the columns of the CSV file, with the names of those that are varied keys, and,
    for each row, the untruncated differences and the rule by which its loss was judged.
    """
    further = [
        {
            "difference": row.difference,
            "noise": row.noise,
            "in_band": None if row.band is None else row.band.inside,
            "band": row.band and asdict(row.band),
            "loss_difference_error": row.change and row.change[1],
        }
        for row in report.rows
    ]
    repeats = [
        {"directory": cell.directory.name, "tokens_per_second": cell.rate, "state": cell.word}
        for cell in report.repeats
    ]
    return {
        "name": report.name,
        "command": report.command,
        "caption": report.caption,
        "over": report.over,
        "varied": [*report.varied],
        "rows": [row | more for row, more in zip(values_of_rows(report), further, strict=True)],
        "baseline_again": repeats,
        "differences": [
            {
                "key": difference.key,
                "values": difference.values,
                "work": difference.work,
                "learning": difference.learning,
                "purpose": difference.purpose,
            }
            for difference in report.found
        ],
        "notes": report.notes,
        **({"foreign": foreign_documents(report)} if len(report.own) < len(report.rows) else {}),
        **({report.section.name: report.section.document} if report.section else {}),
    }


def foreign_documents(report: Report) -> list[dict[str, Any]]:
    """Return for each row of another program its name, its program, its file, and what its user states about it."""
    from .foreign import ForeignCell

    return [
        {
            "technique": row.label,
            "program": row.cell.program,
            "file": str(row.cell.directory),
            "stated": asdict(row.cell.stated),
        }
        for row in report.rows
        if isinstance(row.cell, ForeignCell)
    ]


def values_of_rows(report: Report) -> list[dict[str, Any]]:
    """Return for each row all columns, even those that are empty or constant, further facts about the row's run, and the
    values of `report.varied`. Values are not rounded.
    """
    rows = []
    for number, row in enumerate(report.rows):
        state, load = row.cell.state, row.cell.load
        rows.append(
            {"technique": row.label}
            | {key: values[number] for key, values in report.varied.items()}
            | {column.name: column.value(row) for column in report.every}
            | {
                "baseline": row.baseline,
                "state": row.cell.word,
                "partial": row.cell.partial,
                "reason": state.failure.line if state.failure else state.damage,
                "directory": row.cell.directory.name,
                "doubt": row.doubt,
                "noise_percent": truncated_percent(row.noise),
                "load": max(load.get("start", 0), load.get("end", 0)) if load else None,
                "cores": load.get("cores"),
                "beside": len(row.cell.beside),
                "lowest_held_out_step": row.cell.lowest and row.cell.lowest[1],
                "best_checkpoint": row.cell.result.get("best_checkpoint"),
            }
        )
    return rows


def latex(report: Report) -> str:
    """Return the table in LaTeX with booktabs, for \\input."""
    titles = [column.title for column in report.columns]
    align = "".join("l" if column.word else "r" for column in report.columns)
    caption = _tex(report.name) + (f" ({_tex(report.caption)})" if report.caption else "")
    lines = [
        r"% needs \usepackage{booktabs}",
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{caption}}}",
        rf"  \begin{{tabular}}{{{align}}}",
        r"    \toprule",
        f"    {_ampersands(titles)}",
        r"    \midrule",
    ]
    lines += [f"    {_ampersands(texts)}" for texts in report.texts]
    lines += [r"    \bottomrule", r"  \end{tabular}"]
    if report.notes:
        lines += ["", r"  \footnotesize", *(rf"  {_tex(note)}\\" for note in report.notes)]
    return "\n".join([*lines, r"\end{table}"]) + "\n"


def _pipes(texts: list[str], pad: bool = True) -> str:
    return f"| {' | '.join(texts)} |" if pad else f"|{'|'.join(texts)}|"


def _ampersands(texts: list[str]) -> str:
    return " & ".join(map(_tex, texts)) + r" \\"


def _md(text: str) -> str:
    """Escape a text for Markdown, so that it does not end a table cell or begin emphasis."""
    return re.sub(r"([\\|*_`<>\[\]])", r"\\\1", text.replace("\n", " "))


def _tex(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in text.replace("\n", " "))
