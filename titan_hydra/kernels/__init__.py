"""Kernels with their reference in torch, which a CPU runs."""
