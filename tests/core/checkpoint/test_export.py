"""Use exports in transformers (the same ids, text from pipeline()) and runs in titan generate."""

import json
import os
import shutil
import stat

import pytest
import tokenizers
import torch
import torch.distributed.checkpoint as dcp

from titan_hydra import cli
from titan_hydra.core.data import tokenizer
from titan_hydra.core.data.embedded import Embedded
from titan_hydra.core.data.facts import Facts
from titan_hydra.core.job.config import schema, to_dict
from titan_hydra.core.models import build
from titan_hydra.core.models.init import init_weights
from titan_hydra.core.models.llama3.config import Llama3Config, RopeScaling
from titan_hydra.core.train import generate

transformers = pytest.importorskip("transformers")
EMBEDDED = schema.Tokenizer(name="embedded")
MODEL = Llama3Config(
    name="tiny",
    vocab_size=4096,
    dim=64,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    multiple_of=40,
    max_seq_len=256,
    rope_scaling=RopeScaling(factor=8.0, original_max_seq_len=32),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a run's directory with one checkpoint, of a model whose generated text depends on attention, positions and
    norms.
    """
    model, folder = build(MODEL, 64), tmp_path_factory.mktemp("export") / "run"
    init_weights(model, MODEL, seed=0)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.layers.parameters():
        parameter.data.mul_(5 if parameter.dim() > 1 else 1 + torch.rand(parameter.shape, generator=generator))
    dcp.save(
        {"model": model.state_dict()},
        storage_writer=dcp.FileSystemWriter(folder / "checkpoints/step-00000010"),
        no_dist=True,
    )
    (folder / "config.json").write_text(json.dumps({"model": to_dict(MODEL), "tokenizer": to_dict(EMBEDDED)}))
    return folder


@pytest.fixture(scope="module")
def exported(run):
    before = os.umask(0o027)
    try:
        assert cli.main(["checkpoint", "export", str(run), str(run.parent / "hf"), "--dtype", "float32"]) == 0
    finally:
        os.umask(before)
    return run.parent / "hf"


def corpus():
    """Return half of the embedded corpus's texts, every 37th code point of Unicode between letters, digits and blanks,
    and long runs of blanks.
    """
    source = Embedded()
    texts = (text for unit in range(0, source.units, 2) for _, text in source.rows(unit))
    # names of special tokens, which transformers encodes as these tokens
    yield from (text for text in texts if "<|" not in text)
    points = [chr(point) for point in range(0, 0x110000, 37) if not 0xD800 <= point < 0xE000]
    yield from (
        "".join(f" a{c}b{c}{c} {c}1" for c in points[start : start + 500]) for start in range(0, len(points), 500)
    )
    yield from ("x" + " " * 1000 + "\r\n\n\t y'S 'LL 1234567", "", "日本語 العربية 🏳️‍🌈 e\u0301 \x00\x07 DON'T")


def test_ids_are_ours_and_begin_as_a_document_does(exported):
    ours, theirs = tokenizer.load(EMBEDDED), transformers.AutoTokenizer.from_pretrained(exported)
    texts = list(corpus())
    assert sum(map(len, texts)) > 500_000
    for text, encoded in zip(texts, theirs(texts)["input_ids"], strict=True):
        assert encoded == [ours.bos_id, *ours.encode(text)]
        assert theirs.decode(encoded, skip_special_tokens=True, clean_up_tokenization_spaces=False) == text
    assert (theirs.bos_token_id, theirs.eos_token_id, len(theirs)) == (ours.bos_id, ours.eos_id, ours.vocab_size)
    assert theirs("<|end_of_text|>")["input_ids"] == [ours.bos_id, ours.eos_id], (
        "transformers takes names in a text for the tokens"
    )


def test_pipeline_generates_until_the_end_of_text(exported, capfd):
    pipe = transformers.pipeline("text-generation", model=str(exported), device="cpu")
    config = pipe.model.generation_config
    assert (config.bos_token_id, config.eos_token_id, pipe.model.config.eos_token_id) == (3840, 3841, 3841)
    (made,) = pipe("The function", max_new_tokens=5, do_sample=False)
    assert made["generated_text"].startswith("The function") and len(made["generated_text"]) > len("The function")
    pipe.model.lm_head.weight.data[3841] = 0  # makes an end of text more likely than any other token
    pipe.model.model.norm.weight.data.fill_(1)
    with torch.no_grad():
        hidden = pipe.model.model(torch.tensor([[3840, 5]])).last_hidden_state[0, -1]
    pipe.model.lm_head.weight.data[3841] = 1000 * hidden
    assert pipe.model.generate(torch.tensor([[3840, 5]]), max_new_tokens=50, do_sample=False).tolist() == [
        [3840, 5, 3841]
    ]


PROMPT = "The function returns naïve"


def generated(run, capsys, *words, status=0):
    assert cli.main(["generate", str(run), *words]) == status
    return capsys.readouterr()[status != 0]


def test_greedy_text_is_that_of_transformers(run, exported, capsys):
    theirs, words = (
        transformers.AutoModelForCausalLM.from_pretrained(exported),
        transformers.AutoTokenizer.from_pretrained(exported),
    )
    made = theirs.generate(**words(PROMPT, return_tensors="pt"), max_new_tokens=60, do_sample=False)[0]
    assert len(made) > 60, "no end of text on the way"
    text = words.decode(made[1:], clean_up_tokenization_spaces=False)
    assert generated(run, capsys, "--prompt", PROMPT, "--max-tokens", "60", "--temperature", "0") == text + "\n"
    assert (
        generated(run, capsys, "--prompt", PROMPT, "--max-tokens", "60", "--top-k", "1", "--seed", "3") == text + "\n"
    )
    step = run / "checkpoints/step-00000010"
    assert generated(step, capsys, "--prompt", PROMPT, "--max-tokens", "60", "--temperature", "0") == text + "\n"


def test_draws_are_those_of_the_seed(run, capsys):
    texts = [generated(run, capsys, "--max-tokens", "20", "--seed", seed) for seed in "112"]
    assert texts[0] == texts[1] != texts[2]


def test_tokens_are_drawn_by_their_probability():
    generator, logits = torch.Generator().manual_seed(0), torch.tensor([1.0, 3.0, 2.0, -1.0])
    for temperature, top_k in ((2.0, 0), (1.0, 2)):
        counts = torch.bincount(
            torch.tensor(
                [generate.pick(logits, generate.Sampling(temperature, top_k), generator) for _ in range(4_000)]
            ),
            minlength=4,
        )
        expected = (logits / temperature).where(logits >= 2, -torch.inf if top_k else logits / temperature).softmax(-1)
        torch.testing.assert_close(counts / 4_000, expected, atol=0.025, rtol=0)


def test_text_ends_where_the_model_ends_it(run, monkeypatch, capsys):
    monkeypatch.setattr(generate, "continuation", lambda *_: iter([5, 6, 3841, 7]))
    assert generated(run, capsys, "--prompt", "a") == "a" + tokenizer.load(EMBEDDED).decode([5, 6]) + "\n"
    monkeypatch.setattr(generate, "continuation", lambda *_: iter([3841]))
    assert generated(run, capsys, "--prompt", "a") == "a\n"


@pytest.mark.parametrize(
    "words, message",
    [
        (["--max-tokens", "0"], "--max-tokens=0: must be at least 1"),
        (["--temperature", "nan"], "--temperature=nan"),
        (["--top-k", "-1"], "--top-k=-1"),
        (["--max-tokens", "300"], "1 tokens of the prompt and 300 more are over model.max_seq_len 256"),
    ],
)
def test_what_cannot_be_generated_is_one_line(run, words, message, capsys):
    err = generated(run, capsys, *words, status=2)
    assert message in err and err.count("\n") == 1


def test_files_may_be_read_by_whom_the_umask_lets(exported):
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in exported.iterdir()}
    assert set(modes.values()) == {0o640}, modes
    assert set(modes) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_the_tokenizer_survives_the_way_there_and_back(exported, tmp_path):
    assert cli.main(["checkpoint", "import", str(exported), str(tmp_path / "imported")]) == 0
    assert (
        cli.main(["checkpoint", "export", str(tmp_path / "imported"), str(tmp_path / "hf"), "--dtype", "float32"]) == 0
    )
    for file in exported.iterdir():
        assert (tmp_path / "hf" / file.name).read_bytes() == file.read_bytes(), file.name


def hf_run(run, tmp_path, path, **beside):
    """Return a copy of the run whose tokenizer is a tokenizer.json of one word."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<s>": 1, "</s>": 2, "[X]": 3}, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(beside))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").symlink_to(run / "checkpoints")
    config = {"model": to_dict(MODEL), "tokenizer": {"name": "hf", "path": path}}
    (tmp_path / "run/config.json").write_text(json.dumps(config))
    (tmp_path / "run/env.json").write_text(json.dumps({"folder": str(tmp_path)}))
    return tmp_path / "run"


def test_a_tokenizer_json_is_taken_along_with_what_stands_beside_it(run, tmp_path):
    # relative to the folder in which the run was started
    source = hf_run(run, tmp_path, "tokenizer.json", chat_template="{{ x }}", eos_token="</s>")
    assert cli.main(["checkpoint", "export", str(source), str(tmp_path / "hf")]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs("a a")["input_ids"] == [1, 0, 0] and (theirs.bos_token, theirs.eos_token) == ("<s>", "</s>")
    assert theirs.chat_template == "{{ x }}"
    assert json.loads((tmp_path / "hf/config.json").read_text())["eos_token_id"] == 2


def test_the_weights_at_the_end_of_a_run_find_its_tokenizer(run, tmp_path):
    # as checkpoint.export_dtype writes them
    shutil.copytree(run / "checkpoints/step-00000010", tmp_path / "run/export")
    (tmp_path / "run/export/config.json").write_text(json.dumps({"model": to_dict(MODEL)}))
    shutil.copy(run / "config.json", tmp_path / "run")
    assert cli.main(["checkpoint", "export", str(tmp_path / "run/export"), str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf/tokenizer.json").exists()


def test_a_run_is_found_by_its_hash(run, tmp_path, monkeypatch, capsys):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/name-12345678").symlink_to(run)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["checkpoint", "export", "1234", "hf"]) == 0 and (tmp_path / "hf/config.json").exists()
    assert generated("name-12345678", capsys, "--max-tokens", "3")
    assert "no such run" in generated("99", capsys, status=2)


def test_an_export_without_its_tokenizer_says_so(run, tmp_path, capsys):
    source = hf_run(run, tmp_path, "gone/tokenizer.json")
    assert cli.main(["checkpoint", "export", str(source), str(tmp_path / "hf")]) == 0
    _, err = capsys.readouterr()
    assert err.count("\n") == 1 and "gone/tokenizer.json: No such file or directory; the export has no tokenizer" in err
    assert not (tmp_path / "hf/tokenizer.json").exists() and not (tmp_path / "hf/generation_config.json").exists()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"repetition_penalty": 1.1, "temperature": 0.6, "top_k": 20}, "repetition_penalty"),  # greedy, too
        ({"do_sample": True, "min_p": 0.1, "stop_strings": ["###"]}, "min_p, stop_strings"),
        ({"suppress_tokens": [5], "min_p": 0.1}, "suppress_tokens"),
        (
            {"repetition_penalty": 1.0, "num_beams": 1, "no_repeat_ngram_size": 0, "stop_strings": None, "min_p": 0.1},
            "",
        ),
    ],
)
def test_settings_that_are_not_applied_are_named(settings, named, capsys):
    found = generate.sampling_of(Facts(generation=settings), None, None, None)
    said = capsys.readouterr().err
    assert said.removeprefix("warning: not applied of the model's generation settings: ").strip() == named
    assert found == (generate.Sampling(1.0, 0, 1.0))
