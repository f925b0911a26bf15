"""What came with a model of somebody's own (train.imports) stays with it, as for the package's families: stop tokens,
settings, templates, buffers, heads of another name; in float32 and bfloat16, with and without adapters.
"""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.core.checkpoint import instruct
from titan_hydra import cli
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.checkpoint.carried import facts_at
from titan_hydra.core.checkpoint.folder import Folder
from titan_hydra.core.checkpoint.opened import open_model
from titan_hydra.core.job.config.family import FAMILIES
from titan_hydra.core.models import build
from titan_hydra.core.models.hf import hf_of, meta_state
from titan_hydra.core.models.init import init_weights
from titan_hydra.core.train.generate import load_model
from titan_hydra.experiments.compose.compose import compose_job

pytest.importorskip("transformers")
OWN = '''"""A decoder with a learned-elsewhere buffer, and a head that its folders call `score`."""
import torch

from titan_hydra.core.models import Family, Model, register
from titan_hydra.core.models.hf import DECODER, HuggingFace, decoder_from_config, decoder_to_config
from titan_hydra.core.models.layers import Decoder


class Own(Decoder):
    def __init__(self, config, seq_len):
        super().__init__(config, seq_len)
        self.register_buffer("tilt", torch.zeros(config.dim))

    def reset_buffers(self):
        super().reset_buffers()
        self.tilt.zero_()

    def forward(self, tokens, *args, **own):
        return super().forward(tokens, *args, **own) + self.tilt.sum()


def to_config(config, dtype):
    return decoder_to_config(config, dtype) | {"model_type": "own"}


def from_config(data, file):
    return Model(**decoder_from_config(data, file, {"model_type": "own"}), family="own")


NAMES = DECODER | {"output": "score", "tilt": "model.tilt"}
HF = HuggingFace("own", NAMES, to_config, from_config)
register(Family("own", Model, model="own:Own", hf="own:HF"))
'''
MODEL = ("train.imports=[own]", *instruct.MODEL, "model.family=own")


def content(folder, name):
    return json.loads((folder / name).read_text())


def change(folder, name, **keys):
    (folder / name).write_text(json.dumps(content(folder, name) | keys))


@pytest.fixture
def own(user_modules, tmp_path):
    """Return a function that writes a folder of the stranger's model, tied or not, shaped like an instruct model's."""
    user_modules({"own.py": OWN})

    def write(tied):
        folder = tmp_path / "own_hf"
        folder.mkdir()
        instruct.make_folder(folder)
        words = ("data=synthetic", *MODEL, f"model.tie_embeddings={tied}")
        config = compose_job("debug=tiny", *words).model
        model, hf = build(config, 8), hf_of(config)
        init_weights(model, config, seed=0)
        model.tilt.copy_(torch.linspace(0.1, 0.2, config.dim))
        tensors = {
            name: part for fqn, value in model.state_dict().items() for name, part in hf.parts(fqn, value).items()
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        ids = {key: value for key, value in content(folder, "config.json").items() if key.endswith("_token_id")}
        (folder / "config.json").write_text(json.dumps(hf.to_config(config, torch.float32) | ids))
        return folder

    return write


@pytest.mark.parametrize(
    ("precision", "tied", "adapter"), [("fp32", False, "none"), ("bf16", True, "none"), ("bf16", False, "lora")]
)
def test_its_facts_come_back(precision, tied, adapter, own, tiny, run_job, tmp_path):
    folder = own(tied)
    row = {"messages": [{"role": "user", "content": "3+4?"}, {"role": "assistant", "content": "It is 7."}]}
    (tmp_path / "chat.jsonl").write_text((json.dumps(row) + "\n") * 8)
    words = ["data=chat", f"data.path={tmp_path}/chat.jsonl", "validation=off", "steps=2", f"precision={precision}"]
    words += ["tokenizer=hf", f"tokenizer.path={folder}/tokenizer.json", f"checkpoint.initial_load_path={folder}"]
    words += [*MODEL, f"model.tie_embeddings={tied}", f"adapter={adapter}"]
    run, out = run_job(tiny(*words)), tmp_path / "out"
    assert cli.main(["checkpoint", "export", str(run), str(out)]) == 0
    before, after = facts_at(folder), facts_at(out)
    assert (
        after.templates == before.templates
        and after.stops == before.stops
        and after.words == before.words | {key: after.words[key] for key in after.words.keys() - before.words.keys()}
    )
    assert after.generation == before.generation and after.ids == before.ids
    first, last = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    assert first.keys() == last.keys() and ("score.weight" in last) is not tied
    assert torch.equal(first["model.tilt"], last["model.tilt"])
    assert content(out, "config.json")["tie_word_embeddings"] is tied
    tokens = torch.arange(8)[None]
    logits = []
    for place in (run, out):
        opened = open_model(place)
        with torch.no_grad():
            logits.append(load_model(opened.reader, opened.config, 8, "float32")(tokens))
    torch.testing.assert_close(*logits, rtol=0, atol=0 if adapter == "none" else 0.05)


def test_what_its_folder_says_and_it_cannot_compute_is_refused(own):
    folder = own(True)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"score.weight": tensors["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    source = Folder(folder)
    assert source.dtypes(meta_state(source.config))
    save_file(tensors | {"score.weight": tensors["model.embed_tokens.weight"] + 1}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"score.weight differs from the embedding"):
        source = Folder(folder)
        source.dtypes(meta_state(source.config))
    change(folder, "config.json", rope_scaling={"type": "yarn", "factor": 4.0})
    with pytest.raises(ConfigError, match="rope_type=yarn: only default can be converted"):
        Folder(folder)


def test_every_word_uses_its_folder(own, tmp_path, capsys, monkeypatch):
    folder = own(False)
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "It is 7."}) + "\n")
    pair = {"prompt": "3+4?", "chosen": "It is 7.", "rejected": "It is 8."}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    drawn = {"tokens": [1, 2, 3, 4], "old_logprobs": [-1.0, -1.0], "advantages": 1.0}
    (tmp_path / "drawn.jsonl").write_text(json.dumps(drawn) + "\n")
    words = {
        "generate": ["--prompt", "It", "--max-tokens", "3"],
        "generate chat": ["--prompt", "3+4?", "--max-tokens", "3"],
        "generate scores": [tmp_path / "texts.jsonl"],
        "data score-rollouts": [tmp_path / "drawn.jsonl", "--out", tmp_path / "rescored.jsonl"],
        "data score-pairs": [tmp_path / "pairs.jsonl", "--out", tmp_path / "scored.jsonl"],
        "checkpoint import": [tmp_path / "back"],
    }
    for word, others in words.items():
        for imports, status in (([], 2), (["--imports", "own"], 0)):
            FAMILIES.pop("own", None)  # as in a process of its own
            monkeypatch.delitem(sys.modules, "own", raising=False)
            assert cli.main([*word.split(), *imports, str(folder), *map(str, others)]) == status, word
            assert status == 0 or "model_type=own" in capsys.readouterr().err
    assert cli.main(["generate", "scores", "--imports", "owm", str(folder), str(tmp_path / "texts.jsonl")]) == 2
    assert "--imports" in capsys.readouterr().err
