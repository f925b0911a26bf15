"""data=hf and data=c4 stream through `datasets`; these tests read local folders with the structure of the hub."""

import json

import pytest

from titan_hydra.core import data
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.data.text import Hub

README = """---
configs:
- config_name: en
  data_files:
  - split: train
    path: en/train-*.jsonl
  - split: validation
    path: en/validation.jsonl
---
"""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "en").mkdir()
    (tmp_path / "README.md").write_text(README)
    for name, texts in [(f"train-{shard}", [f"{shard}/{row}" for row in range(10)]) for shard in range(3)] + [
        ("validation", ["held out"])
    ]:
        (tmp_path / "en" / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return tmp_path


@pytest.mark.parametrize(("slots", "units"), [(2, 3), (3, 3), (4, 6), (16, 18)])
def test_units_hold_every_row_once(job, hub, slots, units):
    source = Hub("data", job(name="c4", path=str(hub)).data, "train", slots)
    assert source.units == units
    texts = [text for unit in range(units) for _, text in source.rows(unit)]
    assert sorted(texts) == sorted(f"{shard}/{row}" for shard in range(3) for row in range(10))


def test_rows_go_on_from_their_number(job, hub):
    source = Hub("data", job(name="c4", path=str(hub)).data, "train", 6)
    rows = list(source.rows(3))
    assert [number for number, _ in rows] == [1, 3, 5, 7, 9]
    assert list(source.rows(3, start=5)) == rows[2:]


def test_validation_split(job, hub):
    loader = data.build(job(name="hf", path=str(hub), subset="en", global_batch=1), 0, 1, "validation")
    assert "held out" in _decode(loader.next()["tokens"][0].tolist())


def _decode(ids):
    from titan_hydra.core.data import tokenizer
    from titan_hydra.core.job.config import schema

    return tokenizer.load(schema.Tokenizer(name="embedded")).decode(ids)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"path": None}, r"data\.path=null"),
        ({"path": "/nowhere/at/all"}, r"data\.path=/nowhere/at/all subset=en split=train: "),
        ({"subset": "fr"}, r"subset=fr split=train: .*fr"),
        ({"split": "test"}, r"split=test: .*test"),
        ({"text_key": "body"}, "no column of this name"),
    ],
)
def test_what_cannot_be_had_is_one_line(job, hub, changed, message):
    keys = {"name": "hf", "path": str(hub), "subset": "en"} | changed
    with pytest.raises(ConfigError, match=message) as caught:
        data.build(job(**keys), 0, 1).next()
    assert "\n" not in str(caught.value)
