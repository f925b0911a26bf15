"""Supervised fine-tuning: only the marked tokens of packed conversations are predicted."""

from collections.abc import Sequence

import numpy as np

from titan_hydra.core.data.batch import Batch
from titan_hydra.core.data.loader import Sample
from titan_hydra.core.train.objectives.language import IGNORED, Language, packed


class SupervisedFineTuning(Language):
    """Samples are {tokens, trained, documents}, each [seq_len + 1]. A label counts if its token is trained and the
    token before it is of the same conversation.
    """

    def blank_sample(self) -> Sample:
        length = self.job.data.seq_len + 1
        return {
            "tokens": np.zeros(length, np.int32),
            "trained": np.zeros(length, bool),
            "documents": np.zeros(length, np.int32),
        }

    def batch(self, samples: Sequence[Sample], separators: tuple[int | None, int | None]) -> Batch:
        """Return tokens and labels of the samples. The first token of a document is no label, as no token of it is
        before.
        """
        tokens, trained, documents = (
            np.stack([sample[name] for sample in samples]) for name in ("tokens", "trained", "documents")
        )
        begins = np.diff(documents, axis=1, prepend=-1) != 0
        labels = np.where(trained & ~begins, tokens, IGNORED)[:, 1:]
        arrays = {"tokens": tokens[:, :-1].astype(np.int64), "labels": labels.astype(np.int64)}
        if self.job.data.document_mask:
            arrays |= packed(documents[:, :-1].astype(np.int64))
        return self.assembled(arrays)
