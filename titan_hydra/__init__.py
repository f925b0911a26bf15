"""titan_hydra: pre-training experiments with large language models, composed with Hydra and run with PyTorch."""

__version__ = "0.1.0"
