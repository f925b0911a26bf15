"""Mutants of FLUX. Imports no torch."""

from tests.equivalence.mutants.mutant import Mutant

DIFFUSION, IMAGES, MODEL = (f"recipes/flux/{name}.py" for name in ("diffusion", "images", "model"))
FSDP, CP, EXACT = "flux, fsdp 2", "flux, cp 2", "flux, against float64"
TESTS = "tests/recipes/flux/test_diffusion.py"
FORMULA = f"{TESTS}::test_every_parameter_has_a_gradient_and_the_loss_is_that_of_float64"
DRAWS = f"{TESTS}::test_draws_follow_from_seed_and_sample_alone"

# fmt: off
SUBJECTS = {"objective diffusion": [
    Mutant("text is left whole on cp ranks", "cp", DIFFUSION, '"text": Dims(sequence=1)', '"text": Dims()',
           "Each context-parallel rank has all tokens of the caption, which then count twice.", (CP,)),
    Mutant("coordinates are left whole on cp ranks", "cp", DIFFUSION, '"positions": Dims(sequence=1)', '"positions": Dims()',
           "Each rank has the coordinates of the whole image.", (CP,)),
    Mutant("noise depends on the rank", "fsdp", IMAGES, "dice = dice_of(self.seed, number)",
           'dice = dice_of(self.seed + __import__("torch").distributed.get_rank(), number)',
           "Each rank draws noise and times by another seed.", (FSDP,), (DRAWS,)),
    Mutant("noise depends on the slot alone", "any", IMAGES, "dice = dice_of(self.seed, number)", "dice = dice_of(self.seed, slot)",
           "Every step draws the same noise and times.", (EXACT,), (DRAWS,
           f"{TESTS}::test_captions_are_left_out_as_often_as_asked_and_for_each_encoder_apart")),
    Mutant("the velocity has the wrong sign", "any", DIFFUSION, '(batch["noise"] - batch["latents"])',
           '(batch["latents"] - batch["noise"])',
           "The model learns to go from images to noise.", (EXACT,), (FORMULA,)),
    Mutant("time is exchanged", "any", DIFFUSION, '(1 - time) * batch["latents"] + time * batch["noise"]',
           'time * batch["latents"] + (1 - time) * batch["noise"]', "At time 0 there is noise instead of the image.", (EXACT,), (FORMULA,)),
    Mutant("samples are counted, not values", "cp", DIFFUSION, 'batch["latents"].numel()', 'batch["latents"].shape[0]',
           "The loss is divided by samples instead of values.", (EXACT,), (FORMULA,)),
    Mutant("both embeddings are dropped together", "any", IMAGES, "dice.random(2) < self.dropout",
           "dice.random(1).repeat(2) < self.dropout",
           "The two embeddings of a caption are left out for the same samples.", (),
           (f"{TESTS}::test_captions_are_left_out_as_often_as_asked_and_for_each_encoder_apart",)),
    Mutant("a held-out time is drawn", "validation", IMAGES, "time, left_out = (number % TIMES + 0.5) / TIMES, (False, False)", "pass",
           "A validation measures at other times for each seed.", (),
           (f"{TESTS}::test_a_validation_is_at_fixed_times_with_whole_captions",)),
    Mutant("words and image are exchanged after attention", "any", MODEL, "h_words, h_image = h.split(lengths, dim=1)",
           "h_image, h_words = h.split(lengths[::-1], dim=1)", "The streams get each other's attention.", (EXACT,), (FORMULA,)),
]}
# fmt: on
