"""Mutants of QK-clip and of multi-token prediction. Imports no torch."""

from .mutant import Mutant

CLIP, MEASURED = "core/train/qk_clip.py", "core/parallel/logits.py"
LOGITS, TRAINER = "core/kernels/logits.py", "core/train/trainer.py"
FAMILY, DEEPSEEK = "core/job/config/family.py", "core/models/deepseek_v3/config.py"
ACCUMULATED, SPLIT, OWN = (
    f"qk_clip, {name}, against float64" for name in ("fsdp 2, accumulation 2", "tp 2", "tp 2, a key for each head")
)
RING = "qk_clip, cp 2, allgather, against float64"
LATENT = "qk_clip, deepseek_v3, tp 2, no latent of queries, against float64"
FURTHER, FURTHER_TP = "mtp 2, fsdp 2, ep 2, accumulation 2, against float64", "mtp 2, tp 2, against float64"
OBJECTIVE, MODEL = "core/train/objectives/language.py", "core/models/deepseek_v3/model.py"
AHEAD = "tests/core/train/test_mtp.py"
TESTS = "tests/core/train/test_qk_clip.py"

# fmt: off
MUTANTS = [
    Mutant("logits of other ranks do not count", "any", CLIP, "if self.mesh.stage is not None:", "if False:",
           "A rank scales by the logits of its own samples.", (ACCUMULATED,)),
    Mutant("only the last microbatch's logits count", "any", MEASURED, "torch.maximum(largest, largest_now)", "largest_now",
           "Accumulation forgets the maxima of earlier microbatches.", (ACCUMULATED,)),
    Mutant("logits of earlier steps count", "any", TRAINER, "            self.clip.forget()", "            pass",
           "A head is scaled again for a logit that it no longer has.", (ACCUMULATED,)),
    Mutant("heads are those of the first rank", "tp", CLIP, 'self.mesh.coordinate("tp") * len(largest)', "0",
           "All tensor-parallel ranks report their heads as the first ones.", (SPLIT,)),
    Mutant("keys stand in the order of the ranks", "cp", MEASURED, "self.order.index(position)", "position",
           "A balanced ring's keys have wrong positions.", (RING,)),
    Mutant("later tokens are seen", "any", LOGITS, ".triu(1)", ".triu(2)", "Each query sees the next token's key.", (ACCUMULATED,),
           (TESTS,)),
    Mutant("other documents are seen", "any", LOGITS, "logits.masked_fill_(_apart(documents, first, last), -torch.inf)", "pass",
           "Logits between documents count.", (), (TESTS,)),
    Mutant("shared keys are scaled", "any", FAMILY, "    if config.n_kv_heads < config.n_heads:\n        return {",
           "    if False:\n        return {", "Grouped queries take the root of a factor, and keys that of another head.", (ACCUMULATED,)),
    Mutant("own keys take the whole factor", "any", FAMILY, "((config.head_width, 0.5),)",
           "((config.head_width, 1.0),)", "Logits shrink by the square of the factor.", (OWN,)),
    Mutant("rotated queries take the root", "any", DEEPSEEK, "(config.qk_rope_head_dim, 1.0))",
           "(config.qk_rope_head_dim, 0.5))", "The part with positions keeps too large logits.", (LATENT,)),
    Mutant("values are scaled", "any", DEEPSEEK, "(config.v_head_dim, 0.0))", "(config.v_head_dim, 0.5))",
           "The values of a clipped head shrink.", (LATENT,)),
    Mutant("averages are those before the scaling", "any", TRAINER,
           "            clip.follow(optimizers)  # before the averages, which are those of the scaled weights\n"
           "        if job.optimizer.ema_decay:\n            ema.follow_weights(optimizers, job.optimizer.ema_decay)\n",
           "        if job.optimizer.ema_decay:\n            ema.follow_weights(optimizers, job.optimizer.ema_decay)\n"
           "        if clip is not None:\n            clip.follow(optimizers)\n",
           "The average follows weights that no step uses.", (), (TESTS,)),
    # multi-token prediction
    Mutant("the blocks ahead see the next token again", "any", OBJECTIVE, "tokens[:, number + 1 :]", "tokens[:, number : number + left]",
           "Each block ahead gets the embedding of the token before.", (FURTHER,)),
    Mutant("the blocks ahead predict what they see", "any", OBJECTIVE, "labels[:, number + 1 :], IGNORED)", "labels[:, number : number + left], IGNORED)",
           "The label is the token whose embedding is given.", (FURTHER,)),
    Mutant("labels ahead cross documents", "any", OBJECTIVE, "np.where(same, labels", "np.where(same | True, labels",
           "A document's last tokens predict those of the next.", (), (AHEAD,)),
    Mutant("the weight is not divided by the depth", "any", OBJECTIVE, "model.mtp_weight / model.mtp", "model.mtp_weight",
           "Further losses are summed and not averaged.", (FURTHER,)),
    Mutant("the blocks ahead follow the norm", "any", MODEL, "        outputs = [self.norm(h)]\n",
           "        h = self.norm(h)\n        outputs = [h]\n", "The representation is that of the head.", (FURTHER,)),
    Mutant("every block ahead follows the model's last", "any", MODEL, "            h, normed = block(", "            _, normed = block(",
           "The causal chain of predictions is cut.", (FURTHER,)),
    Mutant("embedding and output are exchanged", "any", MODEL, "(self.enorm(embedded), self.hnorm(x))", "(self.hnorm(x), self.enorm(embedded))",
           "Exports have the columns in another order than DeepSeek's.", (FURTHER,)),
    Mutant("the projection's gradient is that of one rank's tokens", "tp", "core/models/deepseek_v3/sharding.py",
           "SplitTokens(norm.reduce_dtype) if config.sequence_parallel else Whole()", "Whole()",
           "Tensor-parallel ranks train different projections.", (FURTHER_TP,)),
    Mutant("validations have further losses", "any", MODEL, "self.config.mtp if self.training else 0", "self.config.mtp",
           "The held-out loss is another one.", (), (AHEAD,)),
    Mutant("validations are measured", "any", MEASURED, "        if self.training:\n", "        if True:\n",
           "Held-out samples decide what is scaled.", (), (TESTS,)),
]
# fmt: on
