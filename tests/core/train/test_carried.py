"""What came with a model is in what is exported, generated and trained from it: stop tokens, generation settings,
templates, tokenizers, and the base of adapters.
"""

import json
import re
import shutil

import numpy as np
import pytest
import torch

from tests.core.checkpoint import instruct
from tests.core.checkpoint.steps import cut_back
from titan_hydra import cli
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.checkpoint.carried import facts_at, facts_of_config
from titan_hydra.core.checkpoint.convert import reader_of
from titan_hydra.core.data import tokenizer
from titan_hydra.core.job.config import schema
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.rules.checks import check, warnings
from titan_hydra.core.job.run.checkpoints import newest
from titan_hydra.experiments.compose.compose import compose_job, compose_unchecked

transformers = pytest.importorskip("transformers")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "q3").mkdir()
    instruct.make_folder(tmp_path / "q3")
    return tmp_path / "q3"


def titan(*words, status=0):
    assert cli.main([str(word) for word in words]) == status


def content(folder, name):
    return json.loads((folder / name).read_text())


def files(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_folder_comes_back_with_all_that_it_said(folder, tmp_path):
    ids = tokenizer.load(schema.Tokenizer("hf", str(folder / "tokenizer.json"))).special
    for number, source in enumerate((folder, tmp_path / "out0")):
        titan("checkpoint", "import", source, tmp_path / f"in{number}")
        titan("checkpoint", "export", tmp_path / f"in{number}", tmp_path / f"out{number}")
    out = tmp_path / "out1"
    assert files(out) == files(tmp_path / "out0")
    ends = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    settings = content(folder, "generation_config.json")
    assert content(out, "generation_config.json") == {
        key: settings[key] for key in settings if key != "transformers_version"
    }
    assert content(out, "generation_config.json")["eos_token_id"] == ends
    found = content(out, "config.json")
    assert (found["bos_token_id"], found["eos_token_id"]) == (ends[1], ends[0])
    words = content(out, "tokenizer_config.json")
    assert {key: words[key] for key in instruct.WORDS if key != "chat_template"} == {
        key: value for key, value in instruct.WORDS.items() if key != "chat_template"
    }
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    assert theirs.chat_template == {"default": instruct.CHATML, "tool_use": instruct.TOOLS}
    assert tokenizer.of_facts(facts_at(out)).eos_id == ends[1], "the end of a document is another fact"


@pytest.mark.parametrize(
    ("words", "bos", "eos"),
    [
        ({"bos_token": None, "eos_token": "<|endoftext|>"}, None, "<|endoftext|>"),  # Phi-3's shape
        ({"bos_token": "<s>", "eos_token": "</s>"}, "<s>", "</s>"),
        ({"bos_token": {"content": "<s>"}, "eos_token": {"content": "</s>"}}, "<s>", "</s>"),
        ({"bos_token": "<s>", "add_bos_token": False, "eos_token": "</s>"}, None, "</s>"),
        ({"eos_token": "<|im_end|>", "bos_token": None}, None, "<|im_end|>"),
        ({"eos_token": "<|im_end|>", "bos_token": None, "pad_token": "<|endoftext|>"}, None, "<|endoftext|>"),
        ({"bos_token": "</s>", "eos_token": "</s>"}, None, "</s>"),
        ({}, "<s>", "</s>"),  # the usual names
    ],
)
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_the_words_of_a_folder_come_before_usual_names(words, bos, eos, file, tmp_path):
    ids = instruct.make_words(tmp_path, ("<s>", "</s>", "<|endoftext|>", "<|im_end|>"))
    (tmp_path / file).write_text(json.dumps(words))
    found = tokenizer.load(schema.Tokenizer("hf", str(tmp_path / "tokenizer.json")))
    assert (found.bos_id, found.eos_id) == (ids.get(bos), ids[eos])


def test_a_run_carries_each_stop_and_setting_of_its_folder(folder, tmp_path):
    before = content(folder, "generation_config.json")
    stops = [*before["eos_token_id"], 7]  # 7 is neither the end of a document nor that of an answer
    (folder / "generation_config.json").write_text(json.dumps(before | {"eos_token_id": stops}))
    config = {
        "tokenizer": {"name": "hf", "path": str(folder / "tokenizer.json")},
        "checkpoint": {"initial_load_path": str(folder)},
        "data": {"name": "text_files"},
    }
    facts = facts_of_config(config, str, tmp_path)
    assert set(facts.stops) == set(stops)
    assert {key: facts.generation[key] for key in ("temperature", "top_k", "top_p")} == {
        key: before[key] for key in ("temperature", "top_k", "top_p")
    }


def test_added_tokens_that_contradict_each_other_are_refused(tmp_path):
    instruct.make_words(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"999": {"content": "<x>"}}}))
    with pytest.raises(ConfigError, match=r"'<x>' as id 999, and tokenizer.json as None"):
        tokenizer.load(schema.Tokenizer("hf", str(tmp_path / "tokenizer.json")))


def answers(places, capsys):
    found = []
    for place in places:
        capsys.readouterr()
        titan("generate", "chat", place, "--prompt", "3+4?", "--temperature", "0", "--max-tokens", "40")
        found.append(capsys.readouterr().out.rstrip("\n"))
    for place in places[1:]:
        pipe = transformers.pipeline("text-generation", model=str(place), device="cpu")
        made = pipe([{"role": "user", "content": "3+4?"}], max_new_tokens=40, do_sample=False)
        found.append(made[0]["generated_text"][-1]["content"])
    return found


@pytest.mark.parametrize("kind", ["instruct", "embedded"])
def test_a_chat_model_answers_and_stops_wherever_it_runs(kind, folder, tiny, run_job, tmp_path, capsys):
    row = {"messages": [{"role": "user", "content": "3+4?"}, {"role": "assistant", "content": "It is 7."}]}
    (tmp_path / "chat.jsonl").write_text((json.dumps(row) + "\n") * 8)
    words = ["data=chat", f"data.path={tmp_path}/chat.jsonl", "validation=off", "steps=40", "optimizer.lr=5e-3"]
    if kind == "instruct":
        words += ["tokenizer=hf", f"tokenizer.path={folder}/tokenizer.json", f"checkpoint.initial_load_path={folder}"]
        words += [*instruct.MODEL, "model.rope_theta=1e6", "model.norm_eps=1e-6"]
    else:
        words += ["model.vocab_size=4096"]
    run = run_job(tiny(*words))
    shutil.rmtree(folder)  # a run carries what it needs, but for the tokenizer's file
    if kind == "instruct":
        folder.mkdir()
        instruct.make_words(folder)
    titan("checkpoint", "export", run, tmp_path / "out")
    titan("checkpoint", "import", tmp_path / "out", tmp_path / "in")
    titan("checkpoint", "export", tmp_path / "in", tmp_path / "out2")
    assert files(tmp_path / "out") == files(tmp_path / "out2")
    assert set(answers([run, tmp_path / "out", tmp_path / "out2"], capsys)) == {"It is 7."}
    ids = tokenizer.of_facts(facts_at(run)).special
    settings, about = (
        content(tmp_path / "out", "generation_config.json"),
        content(tmp_path / "out", "tokenizer_config.json"),
    )
    stop, end = ("<|im_end|>", "<|endoftext|>") if kind == "instruct" else ("<|eot_id|>", "<|end_of_text|>")
    assert settings["eos_token_id"] == [ids[stop], ids[end]] and about["eos_token"] == stop
    assert settings.get("temperature") == (0.6 if kind == "instruct" else None)


def test_adapters_keep_their_base(tiny, run_job, tmp_path):
    """The base run has a newer step when the adapters' run goes on, and when its weights are merged."""
    base = run_job(tiny("steps=4", "model.n_heads=4", "checkpoint.interval=2", "checkpoint.keep_latest_k=0"))
    late = newest(base / "checkpoints")
    late.rename(tmp_path / "late")
    adapters = ("adapter=lora", "adapter.rank=4", "model.n_heads=4", "optimizer.lr=0.05", "checkpoint.keep_latest_k=0")
    job = tiny(*adapters, "steps=4", "checkpoint.interval=2", f"checkpoint.initial_load_path={base}")
    whole = run_job(job)
    cut = cut_back(whole, 2, tmp_path / "cut")
    name, shape = "layers.0.attention.wq.weight", None
    merged = reader_of(newest(whole / "checkpoints"))
    shape = merged.base.metadata.state_dict_metadata[f"model.{name}"].size
    before = merged.tensor(name, shape, torch.float32)
    (tmp_path / "late").rename(late)
    assert torch.equal(reader_of(newest(whole / "checkpoints")).tensor(name, shape, torch.float32), before)
    assert run_job.losses(run_job(job, cut)) == run_job.losses(whole)
    fresh = run_job(job, tmp_path / "fresh")  # a run that starts now starts from the newest step
    assert run_job.losses(fresh) != run_job.losses(whole)
    manifest = next((base / "checkpoints").glob("step-*2")) / "manifest.json"
    manifest.write_text(manifest.read_text() + "\n")
    with pytest.raises(ConfigError, match=r"holds other bytes than when .* started from it"):
        reader_of(newest(whole / "checkpoints"))


def write_ids(folder, name, ids, **header):
    ids.tofile(folder / f"{name}.bin")
    known = {"dtype": ids.dtype.name, "tokens": ids.size, "vocab_size": 320, "bos_id": None, "eos_id": 0}
    (folder / f"{name}.bin.json").write_text(json.dumps(known | {"tokenizer_sha256": "x"} | header))
    return folder / f"{name}.bin"


def faults(*words):
    return [str(fault) for fault in check(freeze(compose_unchecked("debug=tiny", "data=tokens", *words)))]


@pytest.mark.parametrize(
    ("dtype", "header", "message"),
    [
        ("float32", {}, "dtype float32 in .*token ids are integers"),
        ("bool", {}, "dtype bool in .*token ids are integers"),
        ("uint16", {"tokens": 2000.0}, "tokens is 2000.0, not a whole number"),
        ("uint16", {"vocab_size": 320.0}, "vocab_size is 320.0, not a whole number"),
    ],
)
def test_headers_that_are_not_of_ids_are_refused_before_the_start(dtype, header, message, tmp_path):
    file = write_ids(tmp_path, "a", np.ones(2000, dtype), **header)
    (line,) = faults(f"data.path={file}", "validation=off")
    assert re.search(message, line) and str(file) in line


def test_files_of_ids_decide_which_tokenizer_is_used(folder, tiny, run_job, tmp_path, capsys):
    words = tokenizer.load(schema.Tokenizer("hf", str(folder / "tokenizer.json")))
    ids = np.array([*words.encode("3+4? It is 7. " * 200), words.eos_id] * 2, dtype=np.uint16)
    known = {"tokenizer_sha256": words.sha256, "eos_id": words.eos_id}
    file = write_ids(tmp_path, "ids", ids, **known)
    (tmp_path / "task.jsonl").write_text(json.dumps({"prompt": "3+4?", "target": " It"}) + "\n")
    on = (
        f"data.path={file}",
        f"data.validation_path={file}",
        "validation=on",
        f"validation.tasks=[{tmp_path}/task.jsonl]",
    )
    assert any("encoded by another tokenizer" in line for line in faults(*on))
    own = ("tokenizer=hf", f"tokenizer.path={folder}/tokenizer.json")
    assert faults(*on, *own) == []
    other = write_ids(tmp_path, "other", ids, tokenizer_sha256="y")
    assert any(
        "data.validation_path" in line for line in faults(on[0], f"data.validation_path={other}", "validation=on")
    )

    run = run_job(tiny("data=tokens", f"data.path={file}", "validation=off", "steps=2", "model.vocab_size=4096"))
    titan("generate", run, "--prompt", "3", status=2)
    assert words.sha256 in capsys.readouterr().err
    titan("generate", run, "--prompt", "3", "--max-tokens", "2", "--tokenizer", folder / "tokenizer.json")
    titan("checkpoint", "export", run, tmp_path / "out")
    assert "the export has no tokenizer" in capsys.readouterr().err and not (tmp_path / "out/tokenizer.json").exists()
    assert content(tmp_path / "out", "generation_config.json")["eos_token_id"] == words.eos_id
    titan("checkpoint", "export", run, tmp_path / "out", "--replace", "--tokenizer", folder / "tokenizer.json")
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    titan("checkpoint", "export", run, tmp_path / "mine", "--replace", status=2)
    assert (tmp_path / "mine/notes.txt").exists() and not [*tmp_path.glob(".*")]

    load = f"checkpoint.initial_load_path={run}"
    said = [str(line) for line in warnings(freeze(compose_job("debug=tiny", "data=embedded", load)))]
    assert any("another tokenizer" in line for line in said)
    same = compose_job("debug=tiny", "data=tokens", f"data.path={file}", "model.vocab_size=4096", load)
    assert not any("another tokenizer" in str(line) for line in warnings(freeze(same)))


def test_ids_below_zero_and_one_token_for_both_ends(tmp_path):
    from titan_hydra.core.data.items import TokenFiles

    ids = np.arange(2000, dtype=np.int32) % 300
    file = write_ids(tmp_path, "same", ids, bos_id=7, eos_id=7)
    assert TokenFiles("data", str(file), 320, 64, None).separators == (None, 7)
    ids[5] = -100
    file = write_ids(tmp_path, "below", ids)
    with pytest.raises(ConfigError, match=r"below.bin: id -100 at token 5"):
        TokenFiles("data", str(file), 320, 64, None).sample(0, 0)
