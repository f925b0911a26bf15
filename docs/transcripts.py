"""Hold what pages show of the output of their commands, and draw the terminal of the README.

    python docs/transcripts.py README.md docs/quickstart.md            # prints what a page shows and no command printed
    python docs/transcripts.py README.md docs/quickstart.md --write    # puts today's lines in their places

The lines of a page's blocks marked `sh` run in order in an empty folder. A block marked `text`, or a table, shows some
lines of the output of the block before it, in order; "..." stands for other lines, or for the rest of a line. Rates and
times may differ, nothing else, and the time of day of a log's row may be left out. Run it on a quiet machine with
--write. tests/test_transcripts.py runs it too; tests/slurm/test_tutorial.py does it for docs/laptop-to-slurm.md, which
needs a SLURM, and writes with --update.
"""

import argparse
import html
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs/images/plan"
PICTURED = "titan plan model=llama3_70b data.seq_len=8192 hardware=h100 --gpus 64"
COLOURS = {  # of GitHub's pages: background, border, text, command, what fits, what is tight
    "light": ("#f6f8fa", "#d0d7de", "#1f2328", "#0550ae", "#116329", "#9a6700"),
    "dark": ("#151b23", "#3d444d", "#e6edf3", "#79c0ff", "#7ee787", "#d29922"),
}
# columns of tables
RATES = {"tokens/s per device", "tokens/s/device", "tokens/s", "IQR", "difference", "seconds", "time", "job"}
RATE = re.compile(r"[\d,.]+(?= tokens/s| tflops)|\d+:\d\d:\d\d(?= left)|(?<= )[\d.]+(?= s\b)")
CLOCK = re.compile(r"\d\d:\d\d:\d\d  ")  # the time of day at the beginning of a row of a log
BLOCK = re.compile(r"```sh\n(?P<lines>.*?)```\n(?:\s*(?:```text\n(?P<text>.*?)```|(?P<table>(?:\|.*\n)+)))?", re.S)


class Shown(NamedTuple):
    """What a page shows of a block of commands: its lines, and where they stand in the page."""

    commands: list[str]
    lines: list[str]
    place: tuple[int, int]


def blocks(page: str) -> list[Shown]:
    """Return each block of commands of a page with what is shown of its output."""
    found = []
    for block in BLOCK.finditer(page):
        part = "text" if block["text"] else "table"
        commands = block["lines"].replace("\\\n", "").splitlines()
        found.append(Shown(commands, (block[part] or "").splitlines(), block.span(part)))
    return found


def run(line: str, folder: Path, environment: dict[str, str] | None = None) -> str:
    """Run a line in a folder as its reader would, and return what it prints; its exit status must be the one that its
    comment names, or 0. A launch.py of the folder is the one that is meant.
    """
    for made in folder.glob("runs/*-*"):
        line = line.replace(f"{made.name.rpartition('-')[0]}-HASH", made.name)
    program, *words = shlex.split(line, comments=True)
    start = ["-m", "titan_hydra.cli"]
    if program != "titan":
        script = words.pop(0)
        start = [str((folder if (folder / script).exists() else ROOT) / script)]
    done = subprocess.run(
        [sys.executable, *start, *words],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    status = re.search(r"# exit status (\d+)", line)
    if done.returncode != int(status[1] if status else 0):
        raise RuntimeError(f"{line}: exit status {done.returncode}\n{done.stdout}")
    return done.stdout.replace(f"{folder}/", "")


def masked(lines: list[str]) -> list[str]:
    """Return lines with single blanks and without rates and times: those of a table are whole columns."""
    columns, result = [], []
    for line in lines:
        line = CLOCK.sub("", line.strip())
        cells = re.split(r"\s{2,}|\s*\|\s*", line)
        if RATES & set(cells):
            columns = [cell in RATES for cell in cells]
        if len(columns) == len(cells):
            cells = [cell for cell, rate in zip(cells, columns, strict=True) if not rate]
        result.append(RATE.sub("~", " ".join(cells)))
    return result


def skeleton(line: str) -> str:
    """Return a line without numbers, but for those of its first two words, by which a step is known."""
    line = re.sub(r"\b[0-9a-f]{8}\b", "#", " ".join(CLOCK.sub("", line).split()))
    words = line.split(" ", 2)
    return " ".join(words[:2] + [re.sub(r"-?\d[\d,.:e-]*", "0", rest) for rest in words[2:]])


def compare(shown: list[str], printed: list[str]) -> tuple[list[str], list[str]]:
    """Return the shown lines that were not printed in this order, and all shown lines as they are printed today."""
    missing, today, at = [], [], 0
    exact, have = masked(printed), masked(shown)
    for line, mask in zip(shown, have, strict=True):
        if mask == "...":
            today.append(line)
            continue
        begin = mask.removesuffix(" ...")
        cut = begin != mask
        same = [i for i in range(at, len(exact)) if exact[i] == mask or (cut and exact[i].startswith(begin))]
        wanted = skeleton(line).removesuffix(" ...")
        alike = [i for i in range(at, len(printed)) if skeleton(printed[i]).startswith(wanted)]
        if not same:
            missing.append(line)
        if found := same or alike:
            at = found[0] + 1
            line = printed[found[0]]
            if cut:
                words = len(begin.split()) + bool(CLOCK.match(line))
                line = re.match(rf"(?:\s*\S+){{{words}}}", line)[0] + "  ..."
        today.append(line)
    return missing, today


def check(page: Path, folder: Path, run: Callable[[str, Path], str] = run) -> tuple[list[str], str]:
    """Run a page's commands in a folder; return the shown lines that were not printed, and the page as of today."""
    text, missing, written, end = page.read_text(), [], [], 0
    for block in blocks(text):
        printed = "".join(run(line, folder) for line in block.commands).splitlines()
        lines, today = compare(block.lines, printed)
        missing += lines
        if block.lines:
            written += [text[end : block.place[0]], "".join(f"{line}\n" for line in today)]
            end = block.place[1]
    return missing, "".join(written) + text[end:]


def questions(page: str) -> Iterator[str]:
    """Yield the lines of the README's table of questions."""
    for row in re.findall(r"^\| .*\? \| `(.*)` \|$", page, re.M):
        yield row.replace("\\|", "|")


def drawing(command: str, output: str, colours: tuple[str, ...]) -> str:
    """Return an SVG of a terminal with a command and its output, up to the first empty line."""
    back, border, front, typed, good, tight = colours
    lines = [f"$ {command}", "", *output.partition("\n\n")[0].splitlines()]
    width = max(len(line) for line in lines) * 7.8
    rows = []
    for number, line in enumerate(lines):
        if line:
            colour = typed if number == 0 else front
            marked = html.escape(line).replace(" ", "\u00a0")  # SVG joins plain blanks
            for word, fill in (("yes", good), ("tight", tight)):
                marked = re.sub(
                    rf"(?<=\u00a0{{2}}){word}(?=\u00a0{{2}})", rf'<tspan fill="{fill}">{word}</tspan>', marked
                )
            length = len(line) * 7.8
            rows.append(
                f'<text x="16" y="{28 + 18 * number}" fill="{colour}" textLength="{length:.1f}">{marked}</text>'
            )
    size = f"{width + 32:.0f} {18 * len(lines) + 26}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-size="13"'
        ' font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace">\n'
        f"<title>{html.escape(command)}</title>\n"
        f'<rect x="1" y="1" width="{width + 30:.0f}" height="{18 * len(lines) + 24}" rx="8" fill="{back}" '
        f'stroke="{border}"/>\n' + "\n".join(rows) + "\n</svg>\n"
    )


def pictures() -> dict[Path, str]:
    """Return the files of the README's picture and what they hold as of today."""
    with tempfile.TemporaryDirectory() as folder:
        output = run(PICTURED, Path(folder).resolve())
    return {
        PICTURE.with_name(f"{PICTURE.name}-{name}.svg"): drawing(PICTURED, output, COLOURS[name]) for name in COLOURS
    }


def main() -> None:
    """Check or write the pages of the command line, and the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument("--write", action="store_true", help="write today's lines and pictures")
    arguments = parser.parse_args()
    missing = []
    for path, text in pictures().items():
        if arguments.write:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            missing.append(f"{path.relative_to(ROOT)}: it shows other output")
    for page in arguments.pages:
        with tempfile.TemporaryDirectory() as folder:
            lines, today = check(page, Path(folder).resolve())
        missing += [f"{page}: {line}" for line in lines]
        if arguments.write:
            page.write_text(today)
    print("\n".join(missing))
    sys.exit(bool(missing) and not arguments.write)


if __name__ == "__main__":
    main()
