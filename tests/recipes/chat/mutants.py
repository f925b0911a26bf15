"""Mutants of fine-tuning on conversations. Imports no torch."""

from tests.equivalence.mutants.mutant import Mutant

OBJECTIVE, ROWS, TRAINER = "recipes/chat/objective.py", "recipes/chat/rows.py", "core/train/trainer.py"
EXACT = "sft, against float64"
RESUMED = "sft, fsdp 2, resumed, validated"
TESTS = "tests/recipes/chat/test_sft.py"
VALIDATION = f"{TESTS}::test_validation_is_the_mean_over_held_out_tokens_on_any_layout"
TOKENS = f"{TESTS}::test_packed_is_unpacked_token_by_token"

# fmt: off
SUBJECTS = {"objective sft": [
    Mutant("questions are learned too", "sft", OBJECTIVE, "np.where(trained & ~begins, tokens, IGNORED)",
           "np.where(~begins, tokens, IGNORED)",
           "Labels of the user's tokens count.", (EXACT,), (TOKENS,)),
    Mutant("the mask of learned tokens is off by one", "sft", OBJECTIVE, "labels = np.where(trained & ~begins, tokens, IGNORED)[:, 1:]",
           "labels = np.where((trained & ~begins)[:, :-1], tokens[:, 1:], IGNORED)", "The token before each answer's first is learned.",
           (EXACT,), (TOKENS,)),
    Mutant("conversations in a sample see each other", "sft, documents", OBJECTIVE, "documents[:, :-1].astype(np.int64))",
           "documents[:, :-1].astype(np.int64) * 0)", "Packed conversations are one document.", (EXACT,), (TOKENS,)),
    Mutant("tokens that lie partly in an answer are lost", "sft", ROWS, "trained |= (located.begins < end) & (located.ends > begin)",
           "trained |= (located.begins >= begin) & (located.ends < end)", "The last token of each answer is not learned.", (EXACT,),
           (TOKENS, f"{TESTS}::test_the_assistants_words_are_learned_and_the_users_are_not")),
    Mutant("a window begins anew after a resume", "sft, resume", ROWS, 'self.places[slot] = state["window"], state["first"]', "pass",
           "A resumed run packs the first window again.", (RESUMED,), (f"{TESTS}::test_a_resumed_run_goes_on_bitwise",)),
    # Mutants of validation: in these cases, the held-out batches have different numbers of labels.
    Mutant("a validation is the mean of batches' means", "validation", TRAINER,
           "torch.cat([count.double().reshape(1), summed.double().flatten()])",
           "torch.cat([torch.ones(1, dtype=torch.float64), summed.double().flatten() / count])",
           "Held-out batches with few labels count as much as those with many.", (RESUMED,), (VALIDATION,), "pytorch/torchtitan#4167"),
    Mutant("a validation is not summed over ranks", "validation", TRAINER, "        dist.all_reduce(totals)\n", "",
           "The held-out loss is that of one rank's samples.", (RESUMED,), (VALIDATION,), "pytorch/torchtitan#4167"),
    Mutant("every validation sees other samples", "validation", TRAINER, "        loader.rewind()\n", "",
           "Held-out losses of different steps are of different samples.", (RESUMED,),
           (VALIDATION, "tests/core/train/test_pipelined.py", TESTS)),
]}
# fmt: on
