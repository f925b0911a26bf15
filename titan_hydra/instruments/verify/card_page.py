"""Format a certificate as a page in Markdown."""

import time
from collections.abc import Iterator
from typing import Any

COLUMNS = ("loss", "norm", "gradients", "weights")
EXACT = ("start", "routing", "drift", "rounded")


def card_page(card: dict[str, Any]) -> str:
    """Return a certificate as a page in Markdown."""
    parts = (
        _head(card),
        _prediction(card),
        _reduction(card),
        _proofs(card),
        _runs(card),
        _measured(card),
        _made_with(card),
    )
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _head(card: dict[str, Any]) -> Iterator[str]:
    degrees = ", ".join(f"{name} {degree}" for name, degree in card["degrees"].items())
    yield f"# Certificate of {card['name']}"
    yield ""
    yield f"Layout {card['layout']}: {card['gpus']} ranks, {degrees or 'one rank'}. {'Passed' if card['passed'] else '**Not passed**'}."
    yield f"Job {card['identity']}: `{' '.join(card['overrides'])}`"
    yield ""
    yield f"{card['rules']['checked']} rules: {'; '.join(card['rules']['faults']) or 'all kept'}."
    yield from (f"- Warning: {warning}" for warning in card["rules"]["warnings"])


def _prediction(card: dict[str, Any]) -> Iterator[str]:
    found = card["prediction"]
    yield "## Prediction"
    yield ""
    if found.get("memory_gib") is None:
        yield f"None: {found['reason']}."
        return
    low, high = found["memory_gib_band"]
    yield f"Memory on {found['hardware']}: {found['memory_gib']:,.1f} GiB ({low:,.1f} to {high:,.1f}); fits: {found['fits']}."
    if found["tokens_per_second"]:
        low, high = found["tokens_per_second_band"]
        yield f"Speed: {found['tokens_per_second']:,.0f} tokens/s per device ({low:,.0f} to {high:,.0f})."


def _reduction(card: dict[str, Any]) -> Iterator[str]:
    yield "## What was reduced"
    yield ""
    yield "The layout was proven at this size; every key that is not in a table has the job's value."
    for number, small in enumerate(card["reduced"], start=1):
        yield f"\n{number}. {small['ranks']} ranks:\n"
        yield "| key | job | reduced |"
        yield "|---|---|---|"
        yield from (f"| {key} | {before} | {after} |" for key, (before, after) in small["changes"].items())
    yield ""
    yield from (f"- Not shown here: {line}" for line in card["not_shown"])


def _proofs(card: dict[str, Any]) -> Iterator[str]:
    yield "## Against one process"
    yield ""
    yield "Largest relative differences, and the bound of each. `band`: relative to what rounding alone does here; at most 1."
    yield "Start, routing, copies and rounded count what must be equal bit by bit."
    yield ""
    yield "| proof | ranks | " + " | ".join(COLUMNS) + " | band | start | routing | copies | rounded | passed |"
    yield "|" + "---|" * (len(COLUMNS) + len(EXACT) + 4)
    for small in card["reduced"]:
        for proof in small["proofs"]:
            columns = " | ".join(
                f"{_number(proof[name]['difference'])} of {proof[name]['bound']:g}" for name in COLUMNS
            )
            exact = " | ".join(str(proof[name]) for name in EXACT)
            passed = "yes" if proof["passed"] else "**no**"
            yield f"| {proof['name']} | {proof['ranks']} | {columns} | {_number(proof['band'])} | {exact} | {passed} |"


def _runs(card: dict[str, Any]) -> Iterator[str]:
    data, resume, export = (card[name] for name in ("data", "resume", "export"))
    yield "## Data, resume, export"
    yield ""
    yield f"- Order of the data: {_word(data)}. The samples of all ranks together are those of one process, over {data['steps']} steps."
    if resume.get("killed_at_step"):
        at, origin = resume["killed_at_step"], resume["carried_on_from_step"]
        yield (
            f"- Resume: {_word(resume)}. Of {resume['steps']} steps, all ranks were killed at step {at} and carried on from step "
            f"{origin}; losses and gradient norms have the bits of an undisturbed run."
        )
    else:
        yield f"- Resume: {_word(resume)}."
    yield f"- Export to Hugging Face's format and import: {_word(export)}. {export.get('tensors', 0)} tensors have the same bits."


def _measured(card: dict[str, Any]) -> Iterator[str]:
    yield "## Measured"
    yield ""
    if not card["measured"]:
        yield "No run yet; `titan certify RUN` adds the figures of one."
        return
    yield "| run | device | ranks | steps | tokens/s per device | MFU | GiB | loss |"
    yield "|" + "---|" * 8
    for run in card["measured"]:
        forms = {"tokens_per_second": ",.0f", "mfu": ".1%", "memory_gib": ".1f", "final_loss": ".4f"}
        numbers = [_number(run[name], form) for name, form in forms.items()]
        yield f"| {run['run']} | {run['device']} | {run['world_size']} | {run['steps']} | {' | '.join(numbers)} |"


def _made_with(card: dict[str, Any]) -> Iterator[str]:
    yield "## Made with"
    yield ""
    versions = ", ".join(f"{name} {version}" for name, version in card["versions"].items())
    yield f"{versions}; code {card['code']}, commit {card['code_state']['git_sha']}"
    yield f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(card['written']))}, in {card['seconds']:,.0f} s."


def _word(part: dict[str, Any]) -> str:
    word = {True: "passed", False: "**not passed**", None: "not done"}[part["passed"]]
    return f"{word} ({part['reason']})" if part.get("reason") else word


def _number(value: float | None, form: str = ".3g") -> str:
    return "-" if value is None else format(value, form)
