"""The lines of docs/worked-examples.md run unchanged, from a FASTA file to the likelihood of variants and an export."""

import json
import random
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[3] / "docs/worked-examples.md").read_text()
LETTERS = "ACDEFGHIKLMNPQRSTVWY"


def sequences(number, dice):
    """Write a FASTA file whose sequences repeat AEFN with other letters between; its lines break within sequences."""
    texts = (
        "".join(dice.choice(("AEFN", dice.choice(LETTERS))) for _ in range(dice.randint(10, 40))) for _ in range(number)
    )
    return "".join(f">{index} of a family\n{text[:20]}\n{text[20:]}\n" for index, text in enumerate(texts))


@pytest.mark.slow
def test_the_page_runs_as_it_stands(launcher):
    letters, variants, load = (
        re.search(rf"```{kind}\n({begin}.*?)```", PAGE, re.S)[1]
        for kind, begin in (("python", "from tokenizers"), ("json", ""), ("python", "from transformers"))
    )
    dice = random.Random(0)
    texts = {
        "letters.py": letters,
        "variants.jsonl": variants,
        "load.py": load,
        "train.fasta": sequences(200, dice),
        "held_out.fasta": sequences(20, dice),
    }
    for name, text in texts.items():
        (launcher.folder / name).write_text(text)
    for _ in launcher.page("worked-examples.md", section="An alphabet of your own"):
        pass
    assert (launcher.folder / "plots/validation.png").stat().st_size > 1000
    usual, mutant = map(json.loads, (launcher.folder / "scores.jsonl").read_text().splitlines())
    assert usual["tokens"] == mutant["tokens"] == 12 and usual["nats"] < mutant["nats"] - 1, (usual, mutant)
    pytest.importorskip("transformers")
    done = launcher.python("load.py")
    assert done.returncode == 0 and done.stdout.startswith("[1, 4, 5, 12]"), done.stdout + done.stderr
