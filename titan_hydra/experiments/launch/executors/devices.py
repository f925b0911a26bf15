"""Find out from a GPU's name what `titan cluster init` writes into an option: the GPU's memory and its hardware preset."""

import re

from titan_hydra.experiments.compose.describe import option_files

# device memory in GiB, by the GPU's name
DEVICE_MEMORY = {"h100": 80, "h200": 141, "b200": 180, "gh200": 96, "l40s": 48, "l4": 24, "mi300x": 192}


def device_memory(kind: str) -> int | None:
    """Return the GiB of a GPU's memory if its name implies it, as in `h100`, `nvidia_h200`, `a100_80gb`; else None."""
    if size := re.search(r"(\d+)gb", kind.lower()):
        return int(size[1])
    return next((DEVICE_MEMORY[word] for word in re.split(r"[^a-z0-9]+", kind.lower()) if word in DEVICE_MEMORY), None)


def hardware(kind: str) -> str:
    """Return YAML lines that choose the GPU's preset in conf/hardware; "" if its name implies no memory or preset."""
    # the name stands for several kinds of GPU, or for a part of a GPU
    if device_memory(kind) is None or re.search(r"[+.]", kind):
        return ""
    known = {file.stem for file in option_files("hardware")}
    preset = next((word for word in re.split(r"[^a-z0-9]+", kind.lower()) if word in known), None)
    return f"defaults:\n  - override /hardware@_global_.hardware: {preset}\n" if preset else ""
