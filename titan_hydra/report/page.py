"""The report as one HTML page: table, plots, what differs between the cells, environment, and how to do it again. Needs no network."""
from __future__ import annotations

import datetime
import json
import re
import shlex
from html import escape
from typing import Any

from titan_hydra.config.fault import as_typed
from titan_hydra.config.files import read_json

from . import plots
from .style import DARK, LIGHT
from .table import NONE, WORDS, Report, Row

QUIET = ("name", "notes", "paths", "sweep", "launch", "metrics", "cluster")  # groups that are no part of an experiment
STYLE = """
:root { color-scheme: light dark; %(light)s --paper: #ffffff; --flag: #fdeee8; }
@media (prefers-color-scheme: dark) { :root { %(dark)s --paper: #15181c; --flag: #3a2118; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1.25rem 3rem; background: var(--paper); color: var(--ink);
       font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", "Helvetica Neue", sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.5rem 0 .75rem; }
.soft { color: var(--soft); margin: 0 0 1.25rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
.results table { width: 100%%; }
th, td { padding: .4rem .7rem .4rem 0; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; vertical-align: top; }
th { color: var(--soft); font-weight: 500; white-space: normal; vertical-align: bottom; }
.word { text-align: left; }
.results th:first-child, .results td:first-child, .keys th:first-child, .keys td:first-child { position: sticky; left: 0;
       background: var(--paper); white-space: normal; min-width: 7rem; }
tr.baseline td { font-weight: 600; }
tr.flagged td, tr.flagged td:first-child { background: var(--flag); }
tr.flagged td.bad, tr.failed td.bad { color: var(--red); font-weight: 600; }
.notes { margin: 1rem 0 0; padding-left: 1.1rem; font-size: .9rem; color: var(--soft); overflow-wrap: anywhere; }
.notes .bad { color: var(--red); }
figure { margin: 0 0 2rem; }
figure .wide svg { display: block; width: 100%%; height: auto; min-width: 30rem; max-width: 46rem; }
pre { background: var(--wash); padding: .75rem .9rem; border-radius: 6px; overflow-x: auto; font-size: .82rem; line-height: 1.55; }
code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
.keys td, .keys th { text-align: left; padding-right: 1.2rem; }
.keys + .keys { margin-top: 1rem; }
@media print {
  :root { %(light)s --paper: #ffffff; --flag: #fdeee8; }
  body { max-width: none; padding: 0; font-size: 10pt; } .wide { overflow: visible; }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; }
  figure, tr { break-inside: avoid; } h2 { break-after: avoid; } figure .wide svg { min-width: 0; }
}
"""
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
<h1>{title}</h1>
<p class="soft">{caption}</p>
{body}
</html>
"""


def page(report: Report) -> str:
    """The whole page."""
    variables = {name: " ".join(f"--{key}: {value};" for key, value in colours.items()) for name, colours in
                 (("light", LIGHT), ("dark", DARK))}
    parts = [results(report), *map(picture, plots.svgs(report)), section("What differs between the cells", differing(report)),
             section("Environment", environment(report)), section("To reproduce", commands(report))]
    return PAGE.format(title=escape(report.name), caption=escape(" · ".join(filter(None, (report.caption, created(report))))),
                       style=STYLE % variables, body="\n".join(filter(None, parts)))


def results(report: Report) -> str:
    """The table and its notes."""
    head = "".join(f"<th{_word(title)}>{escape(title)}</th>" for title, *_ in report.columns)
    rows = []
    for row, texts in zip(report.rows, report.texts, strict=True):
        cells = []
        for (title, *_), text in zip(report.columns, texts, strict=True):
            bad = (title == "loss in band" and _flagged(row)) or (title == "tokens/s per device" and row.cell.state.failure)
            cells.append(f'<td class="{" ".join(("word",) * (title in WORDS) + ("bad",) * bool(bad))}">{escape(text)}</td>')
        kind = "failed" if row.cell.state.failure else "flagged" if _flagged(row) else "baseline" if row.baseline else ""
        rows.append(f'<tr class="{kind}">{"".join(cells)}</tr>')
    notes = "".join(f"<li{' class=bad' if 'left the baseline' in note else ''}>{escape(note)}</li>" for note in report.notes)
    return (f'<div class="results"><div class="wide"><table><tr>{head}</tr>{"".join(rows)}</table></div>'
            + (f'<ul class="notes">{notes}</ul>' if notes else "") + "</div><h2>Plots</h2>")


def picture(drawn: tuple[str, str]) -> str:
    """A plot in the page itself, its colours those of the page."""
    name, svg = drawn
    svg = svg[svg.index("<svg"):]
    for key, colour in LIGHT.items():
        svg = re.sub(colour, f"var(--{key})", svg, flags=re.I)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # every picture has the same; those that something refers to are salted with its name
    return f'<figure><div class="wide">{svg.replace("<svg", f"<svg role=img aria-label={name}", 1)}</div></figure>'


def section(title: str, body: str) -> str:
    return f"<h2>{title}</h2>\n{body}" if body else ""


def differing(report: Report) -> str:
    """Every key of the configuration in which the cells are not alike."""
    rows = [row for row in report.rows if row.cell.config]
    keys = [key for key in dict.fromkeys(key for row in rows for key in row.cell.config) if key.partition(".")[0] not in QUIET]
    keys = [key for key in keys if len({_value(row.cell.config.get(key)) for row in rows}) > 1]
    return grid(["", *keys], [[row.label, *(_value(row.cell.config.get(key)) for key in keys)] for row in rows]) if keys else ""


def environment(report: Report) -> str:
    """Where and with what the cells ran; one column if all ran alike."""
    facts: dict[str, list[str]] = {}
    for row in report.rows:
        env = row.cell.env
        known = {"commit": row.cell.commit, "device": row.cell.device, "host": env.get("host"), "platform": env.get("platform"),
                 "python": row.cell.version("python"), "torch": row.cell.version("torch"), "torchao": row.cell.version("torchao"),
                 "triton": row.cell.version("triton"), "hydra-core": env.get("versions", {}).get("hydra-core")}
        for name, value in known.items():
            facts.setdefault(name, []).append(value or NONE)
    facts = {name: values for name, values in facts.items() if set(values) != {NONE}}
    alike = {name: next(value for value in values if value != NONE) for name, values in facts.items() if len(set(values) - {NONE}) == 1}
    others = [name for name in facts if name not in alike]
    apart = [[row.label, *(facts[name][place] for name in others)] for place, row in enumerate(report.rows)] if others else []
    return grid(["", "all cells"], [list(fact) for fact in alike.items()]) + grid(["", *others], apart)


def commands(report: Report) -> str:
    """The command line of the sweep, and of each cell by itself."""
    manifest = read_json(report.selection.manifest / "manifest.json") if report.selection.manifest else None
    lines = []
    if manifest:
        lines += [f"python launch.py {shlex.join(manifest['command'])}", f"titan report {shlex.quote(report.name)} --html", ""]
    for row in report.rows:
        lines += [f"# {row.label}: {row.cell.directory.name}", f"python launch.py {shlex.join(row.cell.overrides)}".rstrip()]
    commits = {row.cell.commit for row in report.rows} - {None}
    if len(commits) == 1 and not (commit := commits.pop()).endswith("+"):
        lines.insert(0, f"git checkout {commit}")
    return f"<pre><code>{escape(chr(10).join(lines))}</code></pre>"


def grid(head: list[str], rows: list[list[str]]) -> str:
    """A small table of words; "" without rows."""
    if not rows:
        return ""
    top = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f'<div class="keys wide"><table><tr>{top}</tr>{body}</table></div>'


def created(report: Report) -> str:
    """The day of the sweep."""
    manifest = read_json(report.selection.manifest / "manifest.json") if report.selection.manifest else None
    return datetime.date.fromtimestamp(manifest["created"]).isoformat() if manifest and manifest.get("created") else ""


def _flagged(row: Row) -> bool:
    return row.band is not None and not row.band.inside


def _word(title: str) -> str:
    return ' class="word"' if title in WORDS else ""


def _value(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else as_typed(value)
