from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from titan_hydra.core.data.permutation import permute


@given(size=st.integers(1, 700), seed=st.integers(), epoch=st.integers(0))
def test_is_a_bijection(size, seed, epoch):
    assert sorted(permute(i, size, seed, epoch) for i in range(size)) == list(range(size))


@given(index=st.integers(0, 10**9 - 1), seed=st.integers(0))
def test_large_sizes_stay_in_range(index, seed):
    assert 0 <= permute(index, 10**9, seed) < 10**9


def test_seed_and_epoch_change_the_order():
    orders = {tuple(permute(i, 50, seed, epoch) for i in range(50)) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


def test_every_place_is_about_as_likely():
    counts = [0] * 10
    for seed in range(5000):
        counts[permute(3, 10, seed)] += 1
    assert all(400 < count < 600 for count in counts)  # 500 expected, with a standard deviation of 21


def test_neighbours_part():
    places = [permute(i, 10_000, 7) for i in range(10_000)]
    near = sum(abs(a - b) < 100 for a, b in pairwise(places))
    assert 100 < near < 300  # 199 expected
