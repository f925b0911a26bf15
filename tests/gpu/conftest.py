"""A fixture of the tests of the kit."""

import pytest
from hydra._internal.config_repository import ConfigRepository
from hydra.plugins.sweeper import Sweeper


@pytest.fixture
def quickly(monkeypatch):
    """Let Hydra read each file only once."""
    monkeypatch.setattr(ConfigRepository, "load_config", ConfigRepository.load_config)
    monkeypatch.setattr(Sweeper, "validate_batch_is_legal", Sweeper.validate_batch_is_legal)
