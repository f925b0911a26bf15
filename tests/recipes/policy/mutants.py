"""Mutants of preferences and policies. Imports no torch."""

from tests.equivalence.mutants.mutant import Mutant

LOSSES, ROWS = "recipes/policy/objectives.py", "recipes/policy/rows.py"
PAIRS, ROLLOUTS = "dpo, against float64", "policy, against float64"
STEERED = "policy with a reference, against float64"
TESTS = "tests/recipes/policy/test_policy.py"
PAPER, CLIPPED = f"{TESTS}::test_preference_is_the_papers_formula", f"{TESTS}::test_policy_is_the_papers_formula"

# fmt: off
OF_PAIRS = [
    Mutant("preferred and rejected are exchanged", "dpo", LOSSES, "self.keys.beta * (chosen - rejected)",
           "self.keys.beta * (rejected - chosen)",
           "The rejected answer is preferred.", (PAIRS,), (PAPER,)),
    Mutant("the reference is left out", "dpo", LOSSES, 'self.log_probabilities(output, batch) - batch["reference"]).double()',
           "self.log_probabilities(output, batch)).double()", "The margin is not relative to the reference model.", (PAIRS,), (PAPER,)),
    Mutant("beta is applied to the logarithm", "dpo", LOSSES, "F.logsigmoid(margin)",
           "self.keys.beta * F.logsigmoid(margin / self.keys.beta)", "beta scales the loss, not the margin.", (PAIRS,), (PAPER,)),
    Mutant("the margin is rounded to bfloat16", "dpo", LOSSES, '- batch["reference"]).double()', '- batch["reference"]).bfloat16()',
           "A small difference of sums in the hundreds is rounded.", (PAIRS,), (PAPER,)),
    Mutant("empty pairs count", "dpo", LOSSES, '* batch["pairs"]).sum().float()', ").sum().float()",
           "Places without a pair add log 2 to the loss.", (PAIRS,), (PAPER,)),
    Mutant("pairs are counted as samples", "dpo", LOSSES, 'return batch["pairs"].sum()', 'return batch["pairs"].any(1).sum()',
           "The loss is divided by samples that have a pair.", (PAIRS,), (PAPER,), "huggingface/trl#2175"),
    Mutant("a pair's documents are counted from one", "dpo", LOSSES, '(row + batch["documents"].clamp(max=per_sample - 1))',
           '(row + (batch["documents"] + 1).clamp(max=per_sample - 1))', "Rejected answers are compared with the next pair's preferred ones.",
           (PAIRS,), (PAPER,)),
    Mutant("scores of the reference are exchanged", "dpo", ROWS, 'REFERENCE = ("ref_chosen_logps", "ref_rejected_logps")',
           'REFERENCE = ("ref_rejected_logps", "ref_chosen_logps")', "Each answer has the other's reference.", (PAIRS,), (PAPER,)),
]
OF_ROLLOUTS = [
    Mutant("a ratio is inverted", "policy", LOSSES, "ratio = moved.exp()", "ratio = (-moved).exp()", "The old policy is divided by the new one.",
           (ROLLOUTS,),
           (CLIPPED,)),
    Mutant("gains are not bounded from below", "policy", LOSSES, "torch.minimum(free, bounded)", "torch.maximum(free, bounded)",
           "The larger of the two gains counts.", (ROLLOUTS,), (CLIPPED,)),
    Mutant("the clip is one-sided", "policy", LOSSES, "ratio.clamp(1 - keys.clip, 1 + above)", "ratio.clamp(max=1 + above)",
           "A ratio below 1 - clip still has a gradient.", (ROLLOUTS,), (CLIPPED,)),
    Mutant("advantages are off by one", "policy", LOSSES, "sample[name][1:] for sample in samples",
           "sample[name][:-1] for sample in samples",
           "A label has the numbers of the token before it.", (ROLLOUTS,), (CLIPPED, PAPER)),
    Mutant("advantages are left whole on cp ranks", "policy, cp", LOSSES,
           'name: Dims(sequence=1) for name in ("old_logprobs"', 'name: Dims(sequence=1 if name != "advantages" else None) for name in ("old_logprobs"',
           "Each context-parallel rank has the advantages of the whole sequence.", ("policy, cp 2",),
           (f"{TESTS}::test_policies_are_the_same_on_every_layout",)),
    Mutant("the divergence is that of the model from the reference, turned round", "policy", LOSSES,
           'back = batch["ref_logprobs"] - logs', 'back = logs - batch["ref_logprobs"]',
           "The estimate has another gradient.", (STEERED,), (CLIPPED,)),
    Mutant("the upper clip is the lower one", "policy", LOSSES, "above = keys.clip if keys.clip_high is None else keys.clip_high",
           "above = keys.clip", "objective.clip_high is not read.", (STEERED,), (CLIPPED,)),
    Mutant("columns are counted on every tp rank", "policy, tp", "core/train/trainer.py",
           "values = torch.cat([share[:1], onto(self.device, asked), share[1:]])",
           "values = torch.cat([share[:1], onto(self.device, asked), shares.flatten().double()[1:]])",
           "Tensor-parallel ranks hold copies of the sums, of which one counts.", ("policy, tp 2",),
           (f"{TESTS}::test_policies_are_the_same_on_every_layout",)),
]
# fmt: on
SUBJECTS = {"objective dpo": OF_PAIRS, "objective policy": OF_ROLLOUTS}
