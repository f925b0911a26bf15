"""Mutants of number formats: weights' copies in the compute dtype, split masters, Float8. Imports no torch."""

from .mutant import Mutant

MASTERS, SPLIT, UPDATE = "core/parallel/masters.py", "core/kernels/split_masters.py", "core/train/split_adamw.py"
UNITS, FLOAT8 = "core/kernels/float8_units.py", "core/kernels/float8.py"
BF16_TP, BF16_ALONE = "bf16, tp 2, sequence parallel on", "bf16, single, accumulation 4"
WHOLE, FUSED = "split masters against whole ones, tp 2", "float8 fused against torchao"
LOADED = "whole masters, fsdp 2, then split masters, tp 2, resumed"
NVFP4_TESTS = "tests/core/kernels/test_nvfp4.py"
MXFP8_TESTS = "tests/core/kernels/test_mxfp8.py"
SPLIT_TESTS, MASTER_TESTS = "tests/core/parallel/test_split_masters.py", "tests/core/parallel/test_masters.py"

# fmt: off
MUTANTS = [
    Mutant("copies are never updated", "bf16", MASTERS, "        if self.pairs:\n", "        if False:\n",
           "Modules go on computing with the initial weights.", (BF16_TP, "bf16 against fp32, one process"), (MASTER_TESTS,)),
    Mutant("a validation reads the copies of the step before", "bf16", "core/train/trainer.py",
           "        self.model.eval()\n        self.prepare_weights()\n", "        self.model.eval()\n",
           "The held-out loss is that of weights that are one step old.", ("bf16, validated, against fp32",)),
    Mutant("copies keep the gradients of earlier steps", "bf16", MASTERS, "master.grad, copy.grad = copy.grad, None",
           "master.grad = copy.grad", "Gradients of all steps pile up in the copies.", (BF16_TP, "bf16 against fp32, one process"),
           (MASTER_TESTS,)),
    Mutant("microbatches accumulate in bfloat16", "bf16, accumulation", MASTERS, "copy.grad_dtype = master.dtype", "pass",
           "Gradients of local batches are added in the compute dtype.", (BF16_ALONE,),
           (f"{MASTER_TESTS}::test_gradients_are_added_up_in_the_masters_dtype",)),
    Mutant("gradients of vectors are 4 % too large on layouts", "bf16", MASTERS, "master.grad, copy.grad = copy.grad, None",
           "master.grad, copy.grad = copy.grad * "
           "(1.04 if copy.ndim == 1 and torch.distributed.get_world_size() > 1 else 1), None",
           "Norms and biases have a gradient that is 4 % too large on several ranks.", (BF16_TP,)),
    Mutant("a split master is rounded down", "split masters", SPLIT, "((bits + 0x8000) >> 16)", "(bits >> 16)",
           "The upper half of a master is rounded down, not to the nearest bfloat16 number, so the lower half no longer fits.", (WHOLE,),
           (f"{SPLIT_TESTS}::test_halves_are_joined_to_the_same_bits",)),
    Mutant("a split master loses its lower half", "split masters", SPLIT,
           "for half, new in zip((weight, remainder), halves_of(master), strict=True):",
           "for half, new in zip((weight,), halves_of(master)):", "Updates that are smaller than bfloat16's rounding are lost.", (WHOLE,),
           (f"{SPLIT_TESTS}::test_fifty_steps_have_the_bits_of_whole_masters",)),
    Mutant("a split master is joined without a carry", "split masters", SPLIT, ".int() << 16) + remainder)",
           ".int() << 16) | (remainder.int() & 0xFFFF))", "Half of the joined masters are too large by one step of bfloat16.", (WHOLE,),
           (f"{SPLIT_TESTS}::test_halves_are_joined_to_the_same_bits",)),
    Mutant("moments of split masters are exchanged", "split masters", UPDATE, 'state["exp_avg"], state["exp_avg_sq"]))',
           'state["exp_avg_sq"], state["exp_avg"]))', "The optimizer takes the second moment for the first.", (LOADED,),
           (f"{SPLIT_TESTS}::test_a_state_goes_from_whole_to_split_masters_and_back",)),
    Mutant("moments of split masters are lost by a load", "split masters, resume", UPDATE, "self.state[parameter] = dict(values[number])",
           "pass", "A resumed run with split masters begins with moments of zero.", ("split masters, fsdp 2, resumed",),
           (f"{SPLIT_TESTS}::test_a_state_goes_from_whole_to_split_masters_and_back",)),
    Mutant("a scale is not divided out of weights' gradients", "float8", UNITS, "    return multiply(columns, inputs,",
           "    return multiply((columns[0], torch.ones_like(columns[1])), inputs,",
           "Gradients of weights are multiplied by the scale of the outputs' gradient.", (FUSED,)),
    Mutant("SwiGLU's halves have each other's scale", "float8", FLOAT8, "*cast_columns(y, bits.amax(0)), ",
           "*cast_columns(y, bits.amax(0).roll(y.shape[1] // 2)), ", "Each half's gradient is cast with the scale of the other half.",
           (FUSED,)),
    Mutant("a norm that is computed later has no weight", "float8", "core/parallel/formats/fused.py", "Normed(x, self.weight, self.eps)",
           "Normed(x, self.weight.detach() * 0 + 1, self.eps)",
           "Where linears apply the norm of their input, the norm's weight is left out.",
           ("float8 fused, fsdp 2",), ("tests/core/parallel/test_fused.py::test_a_block_is_as_near_to_float32_as_torchaos",)),
    Mutant("experts that send their rows multiply in the compute dtype", "mxfp8 experts, ep", "core/models/moe.py",
           "return multiply(rows, self.read(getattr(self, name)), ends, self.format)",
           'return multiply(rows, self.read(getattr(self, name)), ends, "" if self.sends else self.format)',
           "Under expert parallelism, experts are not in MXFP8.", ("mxfp8 experts, qwen3_moe, fsdp 2, ep 2",)),
    Mutant("experts in MXFP8 have plain gradients", "mxfp8 experts", "core/kernels/grouped.py", "PRODUCTS[format](gradient, weights, ends)",
           'PRODUCTS[""](gradient, weights, ends)', "Gradients of rows are not rounded.", (),
           (f"{MXFP8_TESTS}::test_the_emulation_has_the_bits_of_torchaos",)),
    Mutant("blocks of a weight run along its outputs", "mxfp8 experts", "core/kernels/mxfp8.py",
           "round_mxfp8(weights.transpose(-2, -1)).transpose(-2, -1)", "round_mxfp8(weights)",
           "Elements that one product does not sum share a scale.", (), (f"{MXFP8_TESTS}::test_the_emulation_has_the_bits_of_torchaos",)),
    Mutant("one factor of a weight's gradient is not rotated", "nvfp4", "core/kernels/nvfp4.py", "@ round_nvfp4(inputs).t()",
           "@ round_nvfp4(x.t()).t()", "The rotations of the two factors do not cancel.",
           ("nvfp4, fsdp 2", "nvfp4 against fp32"), (f"{NVFP4_TESTS}::test_a_product_is_near_the_exact_one",)),
    Mutant("stochastic rounding always rounds down", "nvfp4", "core/kernels/nvfp4.py", "(places + _noise(noisy).view_as(places)).floor()",
           "places.floor()", "Gradients are too small.", (), (f"{NVFP4_TESTS}::test_stochastic_rounding_is_unbiased_and_repeats",)),
]
# fmt: on
