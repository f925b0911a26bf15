"""The report as one HTML page: tables, interactive plots, the keys in which cells differ, the environment, and the
commands that reproduce the report.

The page needs no network, and its content security policy forbids all requests. plotly draws the plots; the page's
template and script are in assets.
"""

from __future__ import annotations

import base64
import datetime
import gzip
import json
from collections.abc import Iterable
from dataclasses import asdict
from functools import cache
from math import isfinite
from typing import TYPE_CHECKING, Any

from titan_hydra.core.job.config.fault import as_typed, quoted
from titan_hydra.core.job.config.files import ASSETS
from titan_hydra.experiments.compose.sweep import key_of

from . import charts, timeline
from .row import NONE, ReportRow
from .style import DARK, LIGHT
from .table import Report

if TYPE_CHECKING:
    from jinja2 import Template

# config groups that do not belong to the experiment; the table of differing keys leaves them out
QUIET = ("name", "notes", "paths", "sweep", "launch", "metrics", "cluster")


def page(report: Report, live: float = 0) -> str:
    """Return the page as HTML. If `live` is not 0, the page fetches new data every `live` seconds."""
    from markupsafe import Markup

    light, dark = (Markup(" ".join(f"--{key}: {value};" for key, value in shades.items())) for shades in (LIGHT, DARK))
    css, script = (Markup((ASSETS / f"report.{ending}").read_text(encoding="utf-8")) for ending in ("css", "js"))
    caption = " \N{MIDDLE DOT} ".join(filter(None, (report.caption, created(report))))
    return template("report.html").render(
        name=report.name,
        caption=caption,
        table=_table(report),
        more=details_of(report),
        data=data(report),
        live=live,
        light=light,
        dark=dark,
        css=css,
        script=script,
        plotly=Markup(packed_plotly()),
    )


@cache
def packed_plotly() -> str:
    """Return plotly's script, gzipped and in base64: a third of its size. The page's own script unpacks plotly's."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


def news(report: Report) -> dict[str, Any]:
    """Return the data that a live page fetches: its tables as HTML, and the data of its charts."""
    parts: Any = template("report_parts.html").module
    over = sum(row.cell.state.kind != "new" and not row.cell.state.active for row in report.own)
    state = f"{datetime.datetime.now():%H:%M:%S}: {over} of {len(report.own)} cells are over"
    results, details = parts.results(_table(report)), parts.details(details_of(report))
    return {"results": str(results), "details": str(details), "data": data(report), "state": state}


@cache
def template(name: str) -> Template:
    """Load a Jinja template from assets. The template escapes inserted values for HTML. A missing value raises an
    exception.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(loader=FileSystemLoader(ASSETS), autoescape=True, undefined=StrictUndefined).get_template(name)


def _table(report: Report) -> dict[str, Any]:
    """Return the table and its notes in the form that the template needs."""
    rows = []
    for row, texts in zip(report.rows, report.texts, strict=True):
        cells = []
        for column, text in zip(report.columns, texts, strict=True):
            title = column.title
            bad = (title == "loss in band" and row.flagged) or (title == "tokens/s per device" and row.cell.lost)
            doubt = title == "difference" and row.doubt
            kinds = [kind for kind, so in (("word", column.word), ("bad", bad), ("doubt", doubt)) if so]
            cells.append({"text": text, "kind": " ".join(kinds)})
        kind = "failed" if row.cell.lost else "flagged" if row.flagged else "baseline" if row.baseline else ""
        rows.append({"kind": kind, "cells": cells})
    return {
        "head": [{"title": column.title, "word": column.word} for column in report.columns],
        "rows": rows,
        "notes": [
            {"text": note, "bad": "left the baseline" in note}
            for note in filter(None, (*report.notes, report.left_out))
        ],
    }


def data(report: Report) -> dict[str, Any]:
    """Return the data of the charts: the runs, with their colours and coordinates, and the charts themselves."""
    report = report.drawn
    drawn: list[dict[str, Any]] = [{"kind": "bars", **asdict(chart)} for chart in charts.bar_charts(report)]
    drawn += [
        {"kind": "histogram" if chart.name == "step_seconds" else "lines", **asdict(chart)}
        for chart in charts.drawn(report)
    ]
    drawn += [
        pipeline(number, chart_or_line) for number, chart_or_line in enumerate(timeline.pipelines(report), start=1)
    ]
    for chart in drawn:
        for chart_or_line in (*chart.get("lines", ()), *chart.get("bars", ())):
            chart_or_line.update(
                {
                    name: [digits(value) for value in values]
                    for name, values in chart_or_line.items()
                    if isinstance(values, list)
                }
            )
            chart_or_line.update(
                {
                    name: None
                    for name, value in chart_or_line.items()
                    if isinstance(value, float) and not isfinite(value)
                }
            )
    runs = [_run(look, row, report) for look, row in zip(charts.looks(report), report.rows, strict=True)]
    return {"runs": runs, "charts": drawn}


def digits(value: float | None) -> float | None:
    """Round to six significant digits. Charts cannot show more digits, and most of the page of a large sweep consists
    of these numbers.
    """
    if not isinstance(value, float):
        return value
    if not isfinite(value):
        return None
    return int(value) if value.is_integer() else float(f"{value:.6g}")


def pipeline(number: int, drawn: timeline.Timeline) -> dict[str, Any]:
    """Return the data of a pipeline's timeline: its boxes, and the names of the kinds of box that occur."""
    kinds = {box.kind for box in drawn.boxes}
    return {
        "kind": "timeline",
        "name": f"pipeline-{number}",
        "title": drawn.title,
        "unit": "",
        "note": drawn.note,
        "boxes": [{**asdict(box), "length": box.length} for box in drawn.boxes],
        "kinds": [(name, kind) for kind, name in timeline.NAMES.items() if kind in kinds],
    }


def _run(look: charts.Look, row: ReportRow, report: Report) -> dict[str, Any]:
    """Return the chart data of a row of the table: its label, how its lines are drawn, and the coordinates of its steps
    on each axis.
    """
    axes = {
        axis: [digits(coordinate) for coordinate in charts.thin(list(row.cell.places(axis).values()), report)]
        for axis in charts.AXES
    }
    return {
        "label": row.label,
        **asdict(look),
        "reference": row.baseline,
        "partial": row.cell.partial,
        "flagged": row.flagged,
        **axes,
    }


def details_of(report: Report) -> dict[str, Any]:
    """Return the parts of the page below the charts: differing keys, environment, commands."""
    return {
        "section": report.section,
        "differing": _differing(report),
        **environment(report),
        "commands": "\n".join(commands(report)),
    }


def _differing(report: Report) -> dict[str, list[Any]]:
    """Return a table of the keys in which the cells' configurations differ. Keys of the groups in QUIET are left out."""
    rows = [row for row in report.rows if row.cell.config]
    every = {key: None for row in rows for key in row.cell.config}  # each key occurs once, in the order of config.json
    keys = [
        key
        for key in every
        if key.partition(".")[0] not in QUIET and len({_value(row.cell.config.get(key)) for row in rows}) > 1
    ]
    return {
        "head": ["", *keys],
        "rows": [[row.label, *(_value(row.cell.config.get(key)) for key in keys)] for row in rows if keys],
    }


def environment(report: Report) -> dict[str, Any]:
    """Return the software and hardware of the cells: the entries equal in all cells, and a table of those that differ."""
    facts: dict[str, list[str]] = {}
    for row in report.rows:
        env, load = row.cell.env, {"cores": 0, "start": 0, "end": 0} | row.cell.load
        known = {
            "commit": row.cell.commit,
            "device": row.cell.device,
            "host": env.get("host"),
            "platform": env.get("platform"),
            "python": row.cell.version("python"),
            "torch": row.cell.version("torch"),
            "torchao": row.cell.version("torchao"),
            "triton": row.cell.version("triton"),
            "hydra-core": (env.get("versions") or {}).get("hydra-core"),
            "load": row.cell.load and f"{load['start']:.1f} to {load['end']:.1f} on {load['cores']:.0f} cores",
        }
        for name, value in known.items():
            facts.setdefault(name, []).append(value or NONE)
    facts = {name: values for name, values in facts.items() if set(values) != {NONE}}
    alike = {name: max(set(values) - {NONE}) for name, values in facts.items() if len(set(values) - {NONE}) == 1}
    others = [name for name in facts if name not in alike]
    apart = (
        [[row.label, *(facts[name][index] for name in others)] for index, row in enumerate(report.rows)]
        if others
        else []
    )
    return {"alike": list(alike.items()), "apart": {"head": ["", *others], "rows": apart}}


def commands(report: Report) -> Iterable[str]:
    """Yield the commands that reproduce the report: the checkout, the sweep, and each single cell."""
    sweep = report.selection.sweep
    commits = {row.cell.commit for row in report.own} - {None}
    if len(commits) == 1 and not (commit := commits.pop()).endswith("+"):
        yield f"git checkout {commit}"
    if sweep:
        yield report.command
        yield f"titan report {quoted([report.name])} --html"
        yield ""
    typed = {key_of(word) for word in sweep["command"]} | {"sweeps", "sweep.cell"} if sweep else set()
    for row in report.own:
        for run in row.cell.single:
            # with +sweeps, some overrides come from the sweep's file and were not typed
            implied = any(key_of(word) == "sweeps" for word in run.overrides)
            words = [word for word in run.overrides if not implied or key_of(word) in typed or not typed]
            yield f"# {row.label}: {run.directory.name}"
            yield f"python launch.py {quoted(words)}".rstrip()


def created(report: Report) -> str:
    """Return the date at which the sweep was started; "" if it is unknown."""
    moment = report.selection.sweep.get("created")
    return datetime.date.fromtimestamp(moment).isoformat() if moment else ""


def _value(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else as_typed(value)
