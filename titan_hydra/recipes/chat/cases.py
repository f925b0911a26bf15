"""The cases of `titan verify` for conversations."""

from titan_hydra.verify.matrix import in_bf16

# The loss is a mean over the few tokens of the assistant, so another order of sums changes it by 8e-5 in one process.
CASES = in_bf16("sft", "data=embedded_chat", "data.seq_len=64", "validation=off", "model.vocab_size=4096")
