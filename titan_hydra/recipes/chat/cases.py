"""What `titan verify` proves of conversations."""

from titan_hydra.verify.matrix import in_bf16

# The loss is a mean over the assistant's tokens alone: one process differs from itself by 8e-5, with sums in another order.
CASES = in_bf16("sft", "data=embedded_chat", "data.seq_len=64", "validation=off", "model.vocab_size=4096")
