"""Mutants of models of transformers. Imports no torch."""

from tests.equivalence.mutants.mutant import Mutant

MODEL, CONFIG = "recipes/transformers/model.py", "recipes/transformers/config.py"
TESTS = "tests/recipes/transformers/test_transformers.py"
GRADIENTS = f"{TESTS}::test_gradients_are_those_of_transformers_in_float64"
FORMAT = f"{TESTS}::test_a_folder_is_read_and_written_in_its_own_format"
KEYS = f"{TESTS}::test_keys_replace_what_config_json_says"

# fmt: off
OF_TRANSFORMERS = [
    Mutant("positions are dropped", "transformers", MODEL, '{"position_ids": positions, "use_cache": False}',
           '{"position_ids": None, "use_cache": False}', "Documents see each other.", (), (GRADIENTS,)),
    Mutant("buffers keep what memory held", "transformers", MODEL, "initialize_part(library, module, buffers_alone=True)",
           "[buffer.fill_(0) for buffer in buffers.values()]", "Rotary frequencies are 0.", (), (GRADIENTS,)),
    Mutant("gradients of heads' norms stay partial", "transformers", "recipes/transformers/sharding.py",
           "Partial() if of_heads else Replicate()", "Replicate()", "Each rank has the gradient of its own heads.", (), (GRADIENTS,)),
    Mutant("sinks have another rank's heads", "transformers", "recipes/transformers/sharding.py", "name: weight.to_local()",
           "name: weight.to_local().flip(0)", "A head has another head's sink.", (), (GRADIENTS,)),
    Mutant("a lost kind of blocks", "transformers", "recipes/transformers/known.py", "found[: layers - len(lost)] + lost", "found",
           "A shortened model has only the first kinds of blocks.", (), (KEYS,)),
]
# fmt: on

SUBJECTS = {"models of transformers": OF_TRANSFORMERS}
