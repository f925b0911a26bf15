"""Mutants of the loss and its inputs: divisors, weights, masks, documents, positions. Imports no torch."""

from .mutant import Mutant

TRAINER, LANGUAGE, HEAD = "train/trainer.py", "train/objectives/language.py", "parallel/loss_head.py"
DOCUMENTS, SLOPES = "kernels/documents.py", "kernels/cross_entropy.py"
EXACT, MASKED = "llama3, against float64", "llama3, tied, documents, uneven mask, against float64"
PACKED = "llama3, packed documents, against float64"
ALONE, CHUNKED, BF16_CHUNKED = (
    "single, accumulation 4",
    "linear_cross_entropy, single, accumulation 4",
    "bf16 linear_cross_entropy against fp32",
)
UNEVEN, BF16_UNEVEN = "hsdp 2, uneven mask, accumulation 2", "bf16, simple_fsdp 2, uneven mask"
CP, BF16, FSDP = "cp 2, allgather, sequence 32", "bf16 against fp32, one process", "fsdp 2"
DOCUMENT_TESTS, CP_TESTS = "tests/kernels/test_documents.py", "tests/parallel/test_context.py"

# fmt: off
MUTANTS = [
    Mutant("a local batch is divided by its own tokens", "accumulation", TRAINER, "(part, count, last=",
           "(part, self.objective.count(part.tensors) * len(parts) * self.mesh.data_ranks, last=",
           "Local batches with few labels count as much as local batches with many.", (UNEVEN, BF16_UNEVEN),
           like="huggingface/transformers#34191"),
    Mutant("the loss is not divided by the local batches' tokens", "accumulation", TRAINER, "(part, count, last=",
           "(part, count / len(parts), last=", "With accumulation, the loss is multiplied by the number of local batches.", (ALONE,),
           like="huggingface/transformers#37197"),
    Mutant("tokens are counted on each rank alone", "fsdp", TRAINER, "if self.mesh.batch is not None:", "if False:",
           "The loss is divided by the labels of one rank.", (FSDP,), like="pytorch/torchtitan#2206"),
    Mutant("masked labels are counted", "any", LANGUAGE, 'return (batch["labels"] != IGNORED).sum()',
           'return (batch["labels"] != IGNORED + 1).sum()',
           "The loss is divided by the number of all tokens, masked tokens included.", (MASKED,),
           like="pytorch/torchtitan#2206"),
    Mutant("a batch without labels is divided by zero", "any", TRAINER, "count = count.masked_fill(count == 0, 1)", "pass",
           "A step whose labels are all masked has a loss of NaN.", (MASKED,),
           ("tests/parallel/test_loss.py::test_a_step_without_labels_has_a_loss_of_zero",)),
    Mutant("the loss of the first local batch is lost", "accumulation", TRAINER, "total += self.step.forward_backward",
           "total = self.step.forward_backward", "The reported loss is that of the last local batch; gradients are right.", (ALONE,),
           like="pytorch/torchtitan#2366"),
    Mutant("the first label is dropped", "any", LANGUAGE, "F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1),",
           "F.cross_entropy(logits[:, 1:].flatten(0, 1).float(), labels[:, 1:].flatten(0, 1),",
           "The first token of each sequence adds nothing to the loss, but counts in its divisor.", (EXACT,)),
    Mutant("the last label of a part is dropped", "cp", LANGUAGE, "F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1),",
           "F.cross_entropy(logits[:, : 31].flatten(0, 1).float(), labels[:, : 31].flatten(0, 1),",
           "The last token of a sequence has no loss.", (EXACT,)),
    Mutant("the loss is computed in bfloat16", "bf16", LANGUAGE, "logits.flatten(0, 1).float()", "logits.flatten(0, 1)",
           "Logits are not cast to float32 before the softmax.", ("bf16 against fp32, one process",),
           ("tests/parallel/test_loss.py",)),
    Mutant("the loss of bfloat16 is 2 % too large", "bf16", LANGUAGE, 'ignore_index=IGNORED, reduction="sum")',
           'ignore_index=IGNORED, reduction="sum") * (1.02 if logits.dtype == torch.bfloat16 else 1)',
           "The loss has a bias, in layouts and in one process in bfloat16 alike.", (BF16,)),
    Mutant("the chunked gradient is 2 % too large in bfloat16", "linear_cross_entropy", SLOPES,
           "logits[rows] = part.scatter_add_(1, targets[rows] * here[rows], -weights[rows] * here[rows])",
           "logits[rows] = part.scatter_add_(1, targets[rows] * here[rows], -weights[rows] * here[rows])"
           " * (1.02 if logits.dtype == torch.bfloat16 else 1)",
           "The gradient of the chunked loss has a bias, in layouts and in one process alike.", (BF16_CHUNKED,)),
    Mutant("the chunked loss keeps the last chunk's gradient", "linear_cross_entropy", HEAD, "weight_gradient.add_(product)", "product",
           "The head's gradient is that of the last chunk of tokens.", (CHUNKED,), like="pytorch/torchtitan#3412"),
    Mutant("the chunked loss forgets the divisor of the head", "linear_cross_entropy", HEAD,
           "scaled(weight_gradient, gradient, ctx.dtype)", "weight_gradient.to(ctx.dtype)",
           "The head's gradient is not divided by the tokens.", (CHUNKED,)),
    Mutant("the chunked loss counts masked targets", "linear_cross_entropy", HEAD, "(sums.log() + largest - right) * counts",
           "(sums.log() + largest - right)", "A target that does not count adds the normalizer to the loss.", (CHUNKED,),
           ("tests/parallel/test_loss.py::test_value_and_gradients_are_those_of_the_plain_loss",)),
    Mutant("labels are the tokens", "any", LANGUAGE, "tokens[:, :-1], tokens[:, 1:].copy()", "tokens[:, :-1], tokens[:, :-1].copy()",
           "Each token is its own label.", (EXACT,), ("tests/data/test_items.py::test_tokens_are_what_the_stream_of_the_same_text_packs",
                                                 "tests/data/test_loader.py", "tests/train/test_against_transformers.py")),
    Mutant("a document's first token is a label", "documents", LANGUAGE, "    labels[begins[:, 1:]] = IGNORED\n", "",
           "The first token of a document is predicted from the document before it.", (PACKED,),
           (f"{DOCUMENT_TESTS}::test_every_layout_learns_what_one_process_learns_with_a_mask", "tests/data/test_mixture.py",
            "tests/recipes/chat/test_sft.py")),
    Mutant("documents end one token early", "documents", LANGUAGE, "ends[row, number[row, place] - 1] = place + 1",
           "ends[row, number[row, place] - 1] = place", "The last token of each document sees the next document.", (MASKED,),
           (f"{DOCUMENT_TESTS}::test_where_documents_end",)),
    Mutant("documents end one token late", "documents", LANGUAGE, "ends[row, number[row, place] - 1] = place + 1",
           "ends[row, number[row, place] - 1] = np.minimum(place + 2, documents.shape[1])",
           "The first token of each document sees the document before it.", (MASKED,), (f"{DOCUMENT_TESTS}::test_where_documents_end",)),
    Mutant("positions do not begin anew in documents", "documents", LANGUAGE,
           "positions = place - np.maximum.accumulate(np.where(begins, place, 0), axis=1)",
           "positions = place + np.where(begins, 0, 0)", "Tokens keep their position in the sample, not in their document.", (),
           (CP_TESTS + "::test_a_token_keeps_its_label_and_its_position", "tests/data/test_loader.py", "tests/recipes/chat/test_sft.py")),
    Mutant("documents see the future", "documents", DOCUMENTS, "*_as_batch(part, q, k, v), is_causal=True)",
           "*_as_batch(part, q, k, v), is_causal=False)", "Attention within a document has no causal mask.", (MASKED,),
           (f"{DOCUMENT_TESTS}::test_documents_see_what_a_mask_would_show_them",)),
    Mutant("offsets of documents ignore the sample", "documents", DOCUMENTS, "(ends + samples * ends[:, -1:])",
           "(ends + samples * (ends[:, -1:] - 1))", "Later samples of a batch have documents that begin too early.", (MASKED,),
           (f"{DOCUMENT_TESTS}::test_documents_see_what_a_mask_would_show_them",)),
    Mutant("the mask of documents is not causal", "documents", DOCUMENTS, "(document.unsqueeze(2) == document.unsqueeze(1)).tril()",
           "(document.unsqueeze(2) == document.unsqueeze(1))",
           "An attention kernel that takes a mask sees later tokens of the document.", (PACKED,),
           (f"{DOCUMENT_TESTS}::test_documents_see_what_a_mask_would_show_them",)),
    Mutant("a rank's tokens are numbered by the floor", "tp", "train/tasks.py", "* -(-output.shape[-1] // mesh.size())",
           "* (output.shape[-1] // mesh.size())",
           "Ranks that do not divide a vocabulary number their tokens from the wrong row, so tasks score other tokens.", (),
           ("tests/train/test_tasks.py::test_ranks_that_do_not_divide_a_vocabulary_score_as_one_process",)),
    Mutant("a perplexity can overflow", "any", "data/tasks.py", "math.exp(mean) if mean < MOST_NATS else math.nan", "math.exp(mean)",
           "A target of more than 709 nats ends the run at its first validation.", (),
           ("tests/train/test_tasks.py::test_a_number_that_is_none_is_null",)),
]
# fmt: on
