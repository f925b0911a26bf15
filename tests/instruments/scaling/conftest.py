"""Ladders that obey a known law, as arrays and as run directories."""

import copy
import json

import numpy as np
import pytest

from titan_hydra.core.job.config import to_dict
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.instruments.scaling.law import Ladder, Law

CHINCHILLA = Law(1.69, 406.4, 0.34, 410.7, 0.28)  # arXiv 2203.15556, equation 10


@pytest.fixture(scope="session")
def chinchilla():
    return CHINCHILLA


@pytest.fixture(scope="session")
def synthetic():
    """Return a function that makes a ladder of a law, with normal noise in log space."""

    def make(seed, noise=0.01, sizes=5, multiples=(5, 10, 20, 40), low=1e7, high=3e8, law=CHINCHILLA):
        parameters = np.repeat(np.geomspace(low, high, sizes), len(multiples))
        tokens = parameters * np.tile(multiples, sizes)
        drawn = np.exp(noise * np.random.default_rng(seed).standard_normal(len(tokens)))
        return Ladder(parameters, tokens, law.loss(parameters, tokens) * drawn, np.ones(len(tokens)))

    return make


@pytest.fixture(scope="session")
def base_config():
    return to_dict(compose_job("validation=on"))


@pytest.fixture
def write_sweep(tmp_path, base_config):
    """Return a function that writes a sweep: a run for each row (dim, layers, parameters, tokens, loss, seed, changes).
    A loss of None leaves a run that is not done.
    """

    def write(rows, name="ladder"):
        runs, cells = tmp_path / "runs", []
        for number, (dim, layers, parameters, tokens, loss, seed, changes) in enumerate(rows):
            config, digest = copy.deepcopy(base_config), f"{abs(hash(name)) % 2**16:04x}{number:04x}"
            config["model"] |= {"dim": dim, "n_layers": layers}
            config |= {"seed": seed, "steps": max(1, tokens // 1000)}
            for key, value in changes.items():
                section, _, inner = key.partition(".")
                config[section][inner] = value
            directory = runs / f"{name}-{digest}"
            directory.mkdir(parents=True)
            (directory / "config.json").write_text(json.dumps(config))
            if loss is not None:
                result = {"status": "done", "parameters": parameters, "tokens": tokens, "validation_loss": loss}
                (directory / "result.json").write_text(json.dumps(result | {"versions": {}, "git_sha": None}))
            cells.append({"name": f"cell {number}", "overrides": [], "hash": digest, "directory": directory.name})
        folder = runs / "_sweeps" / f"{name}-1"
        folder.mkdir(parents=True)
        about = {"name": name, "created": 0, "command": [], "baseline": None, "packed": False, "arrays": []}
        (folder / "manifest.json").write_text(json.dumps(about | {"cells": cells}))
        return runs

    return write


@pytest.fixture
def rows_of():
    """Return a function that makes the rows of `write_sweep` from a ladder, a width for each size."""

    def make(ladder, seeds=(0,), changes=None):
        sizes = sorted(set(ladder.parameters))
        return [
            (64 * (1 + sizes.index(n)), 2 + sizes.index(n), int(n), int(d), float(loss), seed, changes or {})
            for n, d, loss in zip(ladder.parameters, ladder.tokens, ladder.losses, strict=True)
            for seed in seeds
        ]

    return make
