"""Mutants of fine-tuning on conversations. Imports no torch."""

from titan_hydra.verify.mutants.mutant import Mutant

OBJECTIVE, ROWS = "recipes/chat/objective.py", "recipes/chat/rows.py"
RESUMED = "sft, fsdp 2, resumed, validated"
TESTS = "tests/recipes/chat/test_sft.py"
TOKENS = f"{TESTS}::test_packed_is_unpacked_token_by_token"

# fmt: off
MUTANTS = [
    Mutant("questions are learned too", "sft", OBJECTIVE, "np.where(trained & ~begins, tokens, IGNORED)",
           "np.where(~begins, tokens, IGNORED)",
           "Labels of the user's tokens count.", (), (TOKENS,)),
    Mutant("the mask of learned tokens is off by one", "sft", OBJECTIVE, "labels = np.where(trained & ~begins, tokens, IGNORED)[:, 1:]",
           "labels = np.where((trained & ~begins)[:, :-1], tokens[:, 1:], IGNORED)", "The token before each answer's first is learned.",
           (), (TOKENS,)),
    Mutant("conversations in a sample see each other", "sft, documents", OBJECTIVE, "documents[:, :-1].astype(np.int64))",
           "documents[:, :-1].astype(np.int64) * 0)", "Packed conversations are one document.", (), (TOKENS,)),
    Mutant("tokens that lie partly in an answer are lost", "sft", ROWS, "trained |= (found.begins < end) & (found.ends > begin)",
           "trained |= (found.begins >= begin) & (found.ends < end)", "The last token of each answer is not learned.", (),
           (TOKENS, f"{TESTS}::test_the_assistants_words_are_learned_and_the_users_are_not")),
    Mutant("a window begins anew after a resume", "sft, resume", ROWS, 'self.places[slot] = state["window"], state["first"]', "pass",
           "A resumed run packs the first window again.", (RESUMED,), (f"{TESTS}::test_a_resumed_run_goes_on_bitwise",)),
]
# fmt: on
