"""The cases of `titan verify` for conversations."""

from titan_hydra.instruments.verify.case import EXACT, case, in_bf16

# The loss is a mean over the few tokens of the assistant, so another order of sums changes the loss by 8e-5 even in one
# process.
BASE = ("data=embedded_chat", "data.seq_len=64", "validation=off", "model.vocab_size=4096")
CASES = [
    *in_bf16("sft", *BASE),
    case(
        "sft, fsdp 2, resumed, validated",
        2,
        "parallelism=fsdp",
        "data.local_batch=4",
        base=BASE,
        resumed=True,
        validated=True,
        gradients=2e-5,
    ),
    case("sft, against float64", 1, "parallelism=single", "data.local_batch=4", **EXACT | {"base": BASE}),
]
