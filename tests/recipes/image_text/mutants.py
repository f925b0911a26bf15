"""Mutants of decoders that read images. Imports no torch."""

from tests.equivalence.mutants.mutant import Mutant

MODEL, OBJECTIVE, SHARDING = (f"recipes/image_text/{name}.py" for name in ("model", "objective", "sharding"))
TP, PP = "bf16, llama3_vision, tp 2", "bf16, llama3_vision, pp 2"
EXACT = "llama3_vision, against float64"
TESTS = "tests/recipes/image_text/test_image_text.py"
ALONE = f"{TESTS}::test_images_of_any_aspect_are_read_as_by_a_plain_tower_alone"

# fmt: off
SUBJECTS = {"objective image_text": [
    Mutant("images of a sample see each other", "image_text", MODEL, "mask = (images.unsqueeze(2) == images.unsqueeze(1)).unsqueeze(1)",
           "mask = (images.unsqueeze(2) >= -1).unsqueeze(1) & (images.unsqueeze(1) >= -1).unsqueeze(1)",
           "Attention in the tower crosses images.", (EXACT,), (ALONE,)),
    Mutant("patches are off by one", "image_text", MODEL, "places.clamp(min=0).unsqueeze(-1)", "(places - 1).clamp(min=0).unsqueeze(-1)",
           "Each image token has the features of the patch before it.", (EXACT,), (ALONE,)),
    Mutant("a table is resized without antialias", "image_text", MODEL, "/ step.clamp(min=1).unsqueeze(-1)", "/ 1",
           "Positions of small images skip rows of the learned table.", (EXACT,),
           (f"{TESTS}::test_a_table_is_resized_as_torch_does", ALONE)),
    Mutant("the tower's output stays whole", "image_text, tp", SHARDING, "WholeTree(config.sequence_parallel)", "WholeTree(False)",
           "With sequence parallelism, every rank has the whole sequence in its residual stream.", (TP,)),
    Mutant("places are left whole on cp ranks", "image_text, cp", OBJECTIVE, '"places": Dims(sequence=1),', '"places": Dims(),',
           "Each context-parallel rank has the places of the whole sequence.", ("llama3_vision, cp 2",),
           (f"{TESTS}::test_every_layout_learns_what_one_process_learns",)),
]}
# fmt: on
