"""Choose the cases that a user's model can run, with sequences longer than the model's attention window."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.fault import bad_value, counted
from titan_hydra.core.job.config.model import Model

from .case import Case
from .judge import REFUSED, Outcome
from .verify import job_of, reference_of

LONGEST = 512  # maximum length in tokens to which sequences are lengthened


@dataclass
class Coverage:
    """The cases that a user's model can run."""

    cases: list[Case] = field(default_factory=list)
    windows: dict[str, int] = field(default_factory=dict)  # widths of the model's attention windows in tokens, by key
    # number of cases that were left out, by the fault that refused them
    left_out: Counter[str] = field(default_factory=Counter)

    def without_refused(self, outcomes: list[Outcome]) -> list[Outcome]:
        """Return the outcomes of the cases that ran; cases that ranks refused are counted in `left_out`."""
        self.left_out.update(_reason(outcome.error) for outcome in outcomes if outcome.error.startswith(REFUSED))
        return [outcome for outcome in outcomes if not outcome.error.startswith(REFUSED)]

    def lines(self, ran: int, whole: int) -> list[str]:
        """Return a line with the numbers of cases that ran and that were left out, out of `whole` cases, then a line
        for each reason why cases were left out.
        """
        out = self.left_out.total()
        keys = sum(number for reason, number in self.left_out.items() if reason.endswith("no such key"))
        chosen = f"the {whole} cases" if ran + out == whole else f"the {ran + out} chosen of {whole} cases"
        why = f"; {out} left out: {keys} have keys that the model has not, {out - keys} are refused" if out else ""
        longer = "".join(f"; sequences are longer than twice {key}={width}" for key, width in self.windows.items())
        return [
            f"covers {ran} of {chosen}{why}{longer}",
            *(f"  {number:>4}  {reason}" for reason, number in self.left_out.most_common()),
        ]


def covered(cases: Iterable[Case], overrides: tuple[str, ...], config_dir: tuple[Path, ...], steps: int) -> Coverage:
    """Return the cases with the user's overrides added to them and to their references. Raises ConfigError if no case
    can run, or if the model's attention window is longer than any case's sequences.
    """
    coverage = Coverage()
    for case in cases:
        user_case = replace(case, base=(*case.base, *overrides), config_dir=config_dir)
        try:
            job = job_of(user_case, steps)
            if case.reference == "float64" and not str(family_of(job.model).model).startswith(
                "titan_hydra.core.models."
            ):
                raise ConfigError(
                    f"model.family={job.model.family}: has no float64 reference; only the package's own families have one"
                )
            reference_of(user_case, steps)
        except ConfigError as error:
            coverage.left_out[_reason(str(error))] += 1
            continue
        coverage.windows |= windows_of(job.model)
        coverage.cases.append(
            replace(user_case, base=(*user_case.base, *_lengthened(job.data.seq_len, windows_of(job.model))))
        )
    if not coverage.cases:
        raise ConfigError(
            f"none of {counted(coverage.left_out.total(), 'case')} can run: {coverage.left_out.most_common(1)[0][0]}"
        )
    return coverage


def windows_of(model: Model) -> dict[str, int]:
    """Return the widths of a model's attention windows in tokens: the values of its keys with `window` in their names."""
    values = {
        f"model.{attribute.name}": getattr(model, attribute.name)
        for attribute in fields(model)
        if "window" in attribute.name
    }
    return {key: value for key, value in values.items() if type(value) is int and value}


def _lengthened(seq_len: int, windows: dict[str, int]) -> list[str]:
    """Return an override of data.seq_len that makes sequences longer than the widest window; none if they are long
    enough. Raises ConfigError if twice the widest window exceeds LONGEST.
    """
    key, width = max(windows.items(), key=lambda item: item[1], default=("", 0))
    more = -(-2 * width // 16) * 16
    if more > LONGEST:
        reason = f"hides nothing from sequences of {LONGEST} tokens; a narrower one proves the same code"
        raise bad_value(key, width, reason, LONGEST // 2)
    return [f"data.seq_len={seq_len + more}"] if seq_len < 2 * width else []


def _reason(message: str) -> str:
    return message.removeprefix(REFUSED).splitlines()[0].partition("; nearest legal: ")[0].partition("; one of ")[0]
