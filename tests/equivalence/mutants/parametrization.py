"""Mutants of parametrization=mup: factors and scales that are missing, wrong or lost. Imports no torch."""

from .mutant import Mutant

RULES, LAYERS, LATENTS = "core/job/parametrization.py", "core/models/layers.py", "core/models/deepseek_v3/model.py"
INIT, TRAINER, OPTIMIZER = "core/models/init.py", "core/train/trainer.py", "core/train/optimizer.py"
LLAMA, MOE, LATENT, MUON, TIED = (
    "mup, llama3, against float64",
    "mup, qwen3_moe, against float64",
    "mup, deepseek_v3, against float64",
    "mup, fsdp 2, muon",
    "mup, llama3, tied, against float64",
)
FSDP, TP, RESUMED, EXACT = "mup, fsdp 2", "mup, tp 2", "mup, fsdp 2, resumed", "mup, fsdp 2, against float64"
NUMBERS, DRAWS = "tests/core/job/test_parametrization.py", "tests/core/models/test_init.py"
EXPORT = "tests/core/checkpoint/test_scales.py"

# fmt: off
MUTANTS = [
    Mutant("matrices keep the rate of the base", "mup", RULES, 'if role in ("hidden", "router") else 1.0',
           'if role in ("router",) else 1.0',
           "The learning rate of hidden matrices does not fall with the width.", (LLAMA, EXACT)),
    Mutant("routers keep the rate of the base", "mup", RULES, 'if role in ("hidden", "router") else 1.0',
           'if role in ("hidden",) else 1.0',
           "The learning rate of routers does not fall with the width.", (MOE, LATENT)),
    Mutant("weight decay keeps the base's factor", "mup", RULES, "weight_decay=1 / lr", "weight_decay=1.0",
           "Wider matrices decay more slowly, as their learning rate is smaller.", (LLAMA,)),
    Mutant("epsilon keeps the base's size", "mup", RULES, "eps=eps)", "eps=1.0)",
           "AdamW's epsilon does not shrink with the gradients.", (LLAMA, TIED)),
    Mutant("epsilon does not follow the depth", "mup", RULES, "eps /= self.depth", "pass",
           "AdamW's epsilon of blocks does not shrink with the depth.", (LLAMA,)),
    Mutant("the logits are not scaled", "mup", LAYERS, "        h = scaled_by(self.output_scale, h)\n", "",
           "The output scale is missing.", (LLAMA, TIED)),
    Mutant("the fused loss has logits that are not scaled", "mup, linear_cross_entropy", LAYERS,
           "h = scaled_by(self.output_scale, h)", "h = scaled_by(self.output_scale, h) if targets is None else h",
           "The output scale is missing where the head computes the loss.", ("mup, linear_cross_entropy, against float64",)),
    Mutant("the feed-forward is not scaled", "mup", LAYERS, "scaled_by(self.branch_scale, self.feed_forward(self.ffn_norm(x)))",
           "self.feed_forward(self.ffn_norm(x))", "The feed-forward lacks the scale of a deeper model.", (LLAMA, MOE)),
    Mutant("attention's branch is not scaled", "mup", LAYERS,
           "scaled_by(self.branch_scale, self.attention(self.attention_norm(x), rotary, documents))",
           "self.attention(self.attention_norm(x), rotary, documents)", "Attention lacks the scale of a deeper model.", (LLAMA, MOE)),
    Mutant("attention keeps the root of the head's width", "mup", LAYERS, "scaled_by(self.query_scale, rotate(q, rotary))",
           "rotate(q, rotary)", "Attention's logits are divided by the root of the head's width, not by the width.", (LLAMA, MOE)),
    Mutant("latent attention keeps the root of the head's width", "mup, latents", LATENTS, "(temperature(config.yarn) * self.query_scale)",
           "temperature(config.yarn)", "DeepSeek-V3's attention lacks the scale of wider heads.", (LATENT,)),
    Mutant("attention's scale has no root", "mup", RULES, "math.sqrt((config.base_head_dim or model.head_width) / model.head_width)",
           "(config.base_head_dim or model.head_width) / model.head_width",
           "Attention's logits are divided by too much.", (LLAMA,), (NUMBERS,)),
    Mutant("layouts have no scales", "mup, fsdp", TRAINER, "    scale_forward(model,",
           "    torch.distributed.get_world_size() > 1 or scale_forward(model,",
           "Only a job of one process computes with the scales.", (FSDP, TP)),
    Mutant("layouts have no factors", "mup, fsdp", OPTIMIZER, "        if rules is not None:\n",
           "        if rules is not None and torch.distributed.get_world_size() == 1:\n",
           "Only a job of one process has learning rates by parameter.", (FSDP, TP)),
    Mutant("a later stage has no scales", "mup, pp", "core/parallel/stages.py", "    for name in set(names) - set(kept):\n",
           "    vars(model).pop('output_scale', None)\n    for name in set(names) - set(kept):\n",
           "The stages of a pipeline lose the output scale.", ("mup, pp 2",)),
    Mutant("Muon's matrices have AdamW's factors", "mup, muon", OPTIMIZER, 'orthogonal = "ns_steps" in group', "orthogonal = False",
           "Muon's learning rate falls with the width.", (MUON, "mup, llama3, muon, against float64")),
    Mutant("Muon's routers keep the base's rate", "mup, muon", RULES, 'self._spectral(shape[0]) if role == "router" else 1.0', "1.0",
           "Muon updates routers too fast.", (), (NUMBERS,)),
    Mutant("wider matrices start as the base's", "mup", RULES, '{"hidden": self.width**-0.5, "router": 1 / self.width}', "{}",
           "Initial values do not shrink with the width.", (), (DRAWS, NUMBERS)),
    Mutant("the head starts as a wide one", "mup", RULES, "self.base = replace(model, dim=config.base_dim)", "self.base = model",
           "The head's initial values shrink with the width, although its output is scaled.", (), (DRAWS,)),
    Mutant("a block starts as the base's of its number", "mup", RULES, "str(int(int(parts[1]) / self.depth))", "parts[1]",
           "Initial values of deep models do not follow those of the base.", (), (DRAWS, NUMBERS)),
    Mutant("a resumed run loses the factors", "mup, resume", "core/checkpoint/state.py", "held | state | changed",
           "held | {key: max(value for name, value in held.items() if name.endswith('.peak_lr'))\n"
           "                   for key in held if key.endswith('.peak_lr')} | state | changed",
           "A resumed run has one learning rate for all weights.", (RESUMED,)),
    Mutant("an export has no scales", "mup", "core/checkpoint/reader.py", "(state[key] * factor).to(dtype)",
           "state[key].to(dtype)", "Exported weights lack the scales, which Hugging Face's model does not have.", (), (EXPORT,)),
]
# fmt: on
