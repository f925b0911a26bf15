"""Mutants of models of transformers. Imports no torch."""

from tests.equivalence.mutants.mutant import Mutant

MODEL, CONFIG = "recipes/transformers/model.py", "recipes/transformers/config.py"
TESTS = "tests/recipes/transformers/test_transformers.py"
GRADIENTS = f"{TESTS}::test_gradients_are_those_of_transformers_in_float64"
HUGGING_FACE = "recipes/transformers/hf.py"
FOLDERS = "tests/recipes/transformers/test_folders.py"
BOXES = f"{FOLDERS}::test_every_part_of_a_tensor_is_found"
OF_THE_HUB = f"{FOLDERS}::test_random_weights_are_exported_in_the_names_of_the_hub"
STAGES = "tests/recipes/transformers/test_pipeline.py::test_two_masks_and_two_rotary_tables_reach_every_stage"
FORMAT = f"{TESTS}::test_a_folder_is_read_and_written_in_its_own_format"
FLOAT8 = f"{TESTS}::test_float8_learns_what_one_process_learns"
SPLIT_EXPERTS = "tests/recipes/transformers/test_experts.py::test_experts_are_split_over_two_ranks"
NOTHING = "tests/recipes/transformers/test_experts.py::test_experts_without_tokens_have_gradients_of_zero"
KEYS = f"{TESTS}::test_keys_replace_what_config_json_says"
PLANNED, REDUCED = (
    f"{TESTS}::test_plan_counts_what_blocks_keep",
    f"{TESTS}::test_a_proof_compares_one_process_with_transformers_in_float64",
)

# fmt: off
OF_TRANSFORMERS = [
    Mutant("positions are dropped", "transformers", MODEL, '{"position_ids": positions, "use_cache": False}',
           '{"position_ids": None, "use_cache": False}', "Documents see each other.", (), (GRADIENTS,)),
    Mutant("buffers keep what memory held", "transformers", MODEL, "initialize_part(library, module, buffers_alone=True)",
           "[buffer.fill_(0) for buffer in buffers.values()]", "Rotary frequencies are 0.", (), (GRADIENTS,)),
    Mutant("gradients of heads' norms stay partial", "transformers", "recipes/transformers/sharding.py",
           "Partial() if of_heads else Replicate()", "Replicate()", "Each rank has the gradient of its own heads.", (), (GRADIENTS,)),
    Mutant("a converted linear is held whole", "transformers", "recipes/transformers/sharding.py",
           "if theirs.get(name) in LINEARS:", "if theirs.get(name) in LINEARS and type(part) is nn.Linear:",
           "Each rank computes all heads, and sums their norms' gradients.", (), (FLOAT8,)),
    Mutant("sinks have another rank's heads", "transformers", "recipes/transformers/sharding.py", "name: weight.to_local()",
           "name: weight.to_local().flip(0)", "A head has another head's sink.", (), (GRADIENTS,)),
    Mutant("sinks of the first rank's heads", "transformers", "recipes/transformers/attention.py", "[call.group.rank()]", "[0]",
           "With Ulysses, a head has another head's sink.", (), (GRADIENTS,)),
    Mutant("sequences begin anew on each rank", "transformers", "recipes/transformers/attention.py", "dist.all_gather(parts, positions.contiguous(), group)",
           "[part.copy_(positions) for part in parts]", "A mask sees one rank's positions again and again.", (), (GRADIENTS,)),
    Mutant("gate and up projections of experts are exchanged", "transformers", HUGGING_FACE, "slice(source * size, (source + 1) * size)",
           "slice((number - 1 - source) * size, (number - source) * size)", "A folder's experts compute with another projection.",
           (), (BOXES,)),
    Mutant("a shard of experts begins at expert 0", "transformers", "core/checkpoint/folder.py",
           "start + offset for start, offset in zip(piece.start, inside, strict=True)",
           "start for start, offset in zip(piece.start, inside, strict=True)", "Each shard reads the first rows.", (), (BOXES,)),
    Mutant("the names of the hub are lost", "transformers", HUGGING_FACE, "(self.own_names and not there)", "not there",
           "Exports have the names of transformers in memory.", (), (OF_THE_HUB,)),
    Mutant("a stage has the norm that the last one has", "transformers", MODEL, "setattr(base, self.names[\"norm\"].rpartition(\".\")[2], PassThrough())",
           "setattr(base, self.names[\"norm\"].rpartition(\".\")[2], nn.RMSNorm(self.config.dim, elementwise_affine=False))",
           "Each stage normalizes what it sends.", (), (STAGES,)),
    Mutant("a stage begins at the first block's place", "transformers", MODEL, "if str(number) not in self.layers:",
           "if str(number % len(self.layers)) not in self.layers:", "Blocks of other stages are computed.", (), (STAGES,)),
    Mutant("rows of experts return in another order", "transformers", "recipes/transformers/experts.py", "Moved.apply(out, inverse, order)",
           "Moved.apply(out, order, inverse)", "Tokens get outputs of other tokens.", (), (SPLIT_EXPERTS,)),
    Mutant("split experts teach no router", "transformers", "recipes/transformers/experts.py", "weights.unsqueeze(-1)",
           "weights.unsqueeze(-1).detach()", "The router has no gradient.", (), (SPLIT_EXPERTS,)),
    Mutant("experts without tokens have no gradient", "transformers", "recipes/transformers/experts.py", "part.flatten()[:1].sum() * 0 for",
           "0 for", "Ranks wait for a reduction in which one rank takes no part.", (), (NOTHING,)),
    Mutant("masks do not separate documents", "transformers", MODEL, 'getattr(PACKED, "positions", None)', "None",
           "Documents of gpt-oss see each other.", (), (GRADIENTS,)),
    Mutant("gradients of routers and norms are summed over tensor ranks", "transformers", "recipes/transformers/sharding.py",
           "Partial() if of_heads else Replicate()", "Partial()", "They are as many times too large.", (), (GRADIENTS,)),
    Mutant("the reference computes packed documents as one", "transformers", "recipes/transformers/exact.py", "tokens.split(lengths)",
           "tokens.split(len(tokens))", "What separates documents in no run is not found.", (), (GRADIENTS,)),
    Mutant("a proof's window hides nothing", "transformers", CONFIG, "min(content[name], most)", "content[name]",
           "A fault in windows is not found.", (), (REDUCED,)),
    Mutant("weights are planned as activations", "transformers", "recipes/transformers/kept.py", " if storage not in beside", "",
           "Planned memory is too large.", (), (PLANNED,)),
    Mutant("a lost kind of blocks", "transformers", "recipes/transformers/known.py", "first_kinds[: layers - len(lost)] + lost", "first_kinds",
           "A shortened model has only the first kinds of blocks.", (), (KEYS,)),
]
# fmt: on

SUBJECTS = {"models of transformers": OF_TRANSFORMERS}
