"""GPU kernels, each with a reference in torch that also runs on a CPU."""
