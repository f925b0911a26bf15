"""Models of transformers learn conversations, preferences and with other optimizers as in transformers' own model in float64."""

from tests.recipes.transformers.families import JOB, folder_of, traced
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.instruments.verify.case import EXACT, Case
from titan_hydra.instruments.verify.continued import AVERAGED
from titan_hydra.instruments.verify.judge import compare
from titan_hydra.instruments.verify.reference import Trace
from titan_hydra.instruments.verify.verify import exact
from titan_hydra.recipes.policy.cases import ASSETS

FSDP = ("parallelism=fsdp", "data.local_batch=4")
TP = ("parallelism=tp", "data.local_batch=4", "parallelism.sequence_parallel=false")
CHAT = ("data=embedded_chat", "data.seq_len=64", "validation=off", "model.vocab_size=4096")
PAIRS = ("data=preference", f"data.path={ASSETS / 'preference'}.jsonl", "data.seq_len=128", "model.vocab_size=4096")
TEXT = ("data=synthetic", "data.seq_len=32")
# Muon orthogonalizes in bfloat16, and these steps have no warmup.
AT_FULL_RATE = {"loss": 1e-4, "norm": 2e-3, "weights": 0.1}
RECIPES = {  # name: (family, layout, what it learns, how it is compared)
    "sft, tp 2": ("gpt_oss", TP, CHAT, {}),
    "sft, fsdp 2": ("gemma3_text", FSDP, CHAT, {}),
    "dpo, fsdp 2": ("gemma3_text", FSDP, PAIRS, {}),
    "dpo, tp 2": ("gpt_oss", TP, PAIRS, {}),
    "muon, fsdp 2": ("gemma3_text", FSDP, (*TEXT, "optimizer=muon"), AT_FULL_RATE),
    "muon, tp 2": ("gemma3_text", TP, (*TEXT, "optimizer=muon"), AT_FULL_RATE),
    "average of weights, fsdp 2": ("gpt_oss", FSDP, (*TEXT, *AVERAGED), {"validated": True}),
}
QUICK = "dpo, fsdp 2"


def assert_learn_what_transformers_learns(names, root):
    common, jobs, cases = [word for word in JOB if not word.startswith("data")], {}, {}
    expected = {}
    for name in names:
        kind, layout, learned, options = RECIPES[name]
        words = (*common, f"model.path={folder_of(kind, root)}", "data.global_batch=8", *learned)
        jobs[name] = compose_job(*words, "gpus=2", *layout)
        cases[name] = Case(name, 2, (), **EXACT | options)
        expected[name] = exact(compose_job(*words, "parallelism=single", "data.local_batch=8"), cases[name])
    for name, case in cases.items():
        found = traced(root, 2, {name: jobs[name]}, case)[name]
        outcome = compare(case, Trace(**found), expected[name])
        assert outcome.passed, outcome


def test_pairs_are_compared(tmp_path):
    assert_learn_what_transformers_learns([QUICK], tmp_path)


def test_every_recipe(tmp_path):
    assert_learn_what_transformers_learns([name for name in RECIPES if name != QUICK], tmp_path)
