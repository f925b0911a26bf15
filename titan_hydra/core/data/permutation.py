"""A random permutation of range(n) that needs no memory: the position of a sample is computed, not looked up."""

from __future__ import annotations

import hashlib

ROUNDS = 6  # rounds of the Feistel network
MASK = (1 << 64) - 1


def permute(index: int, size: int, *seed: int) -> int:
    """Return the image of `index` under the permutation of range(size) that `seed` chooses.

    A Feistel network permutes range(n), n the next power of four. Applied repeatedly until the result is below `size`,
    it permutes range(size); that takes fewer than four applications on average.
    """
    if size < 2:
        return 0
    half = ((size - 1).bit_length() + 1) // 2
    keys = _keys(seed)
    while True:
        index = _feistel(index, half, keys)
        if index < size:
            return index


def _keys(seed: tuple[int, ...]) -> list[int]:
    digest = hashlib.blake2b(repr(seed).encode(), digest_size=8 * ROUNDS).digest()
    return [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(ROUNDS)]


def _feistel(index: int, half: int, keys: list[int]) -> int:
    low = (1 << half) - 1
    left, right = index >> half, index & low
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & low)
    return left << half | right


def _mix(value: int) -> int:
    """Apply MurmurHash3's finalizer, by which every bit of the input affects every bit of the result."""
    value = (value ^ value >> 33) * 0xFF51AFD7ED558CCD & MASK
    value = (value ^ value >> 33) * 0xC4CEB9FE1A85EC53 & MASK
    return value ^ value >> 33
