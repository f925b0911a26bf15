"""Small configurations for all tests of models."""

import pytest

from titan_hydra.core.models.llama3.config import Llama3Config, RopeScaling


@pytest.fixture
def tiny():
    """Return a function that makes a small model's configuration: 4 query heads of width 16 share 2 key/value heads."""

    def make(factor=1.0, **changes):
        values = {
            "name": "tiny",
            "vocab_size": 99,
            "dim": 64,
            "n_layers": 3,
            "n_heads": 4,
            "n_kv_heads": 2,
            "multiple_of": 32,
            "rope_scaling": RopeScaling(factor=factor, original_max_seq_len=32),
        }
        return Llama3Config(**values | changes)

    return make
