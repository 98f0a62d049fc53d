"""Counter-based random numbers: known answers, uniformity, independence of neighbouring keys."""

from typing import Any

import numpy as np
import pytest

from hotpot.engine.randomness import check_key, philox, uniforms
from hotpot.types import SampleKey

# Known answers of Philox4x32-10 as distributed with Random123 (kat_vectors): counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def words(values: tuple[int, ...]) -> Any:
    return tuple(np.array([value], dtype=np.uint64) for value in values)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: Any, key: Any, expected: Any) -> None:
    assert tuple(int(word[0]) for word in philox(words(counter), words(key))) == expected


def test_layout_of_key_and_counter() -> None:
    counter, key, expected = KNOWN[2]
    number = SampleKey(seed=key[0] | key[1] << 32, issue=counter[0], sample=counter[1], step=counter[2])
    drawn = uniforms([number], np.array([counter[3]]))[0, 0]
    assert drawn == ((expected[0] << 21) | (expected[1] >> 11)) / 2**53


def test_a_number_depends_on_nothing_but_its_key_and_position() -> None:
    keys = [SampleKey(seed=s, issue=i, sample=k, step=t) for s, i, k, t in np.ndindex(3, 3, 3, 3)]
    whole = uniforms(keys, np.arange(20))
    for index in (0, 17, 80):
        assert (uniforms([keys[index]], np.arange(20))[0] == whole[index]).all()
        assert (uniforms(keys[::-1], np.array([7]))[80 - index, 0] == whole[index, 7]).all()


def test_no_two_neighbours_share_a_number() -> None:
    keys = [SampleKey(seed=s, issue=i, sample=k, step=t) for s, i, k, t in np.ndindex(6, 6, 6, 6)]
    drawn = uniforms(keys, np.arange(64))
    assert np.unique(drawn).size == drawn.size
    high = SampleKey(seed=1 << 32, issue=0, sample=0, step=0)
    assert uniforms([high], np.array([0])) != uniforms([keys[0]], np.array([0]))


def chi_square(values: Any, bins: int) -> float:
    """Standardised chi-square of ``values`` in [0, 1) against the uniform distribution: about N(0, 1)."""
    counts = np.bincount((values * bins).astype(int).ravel(), minlength=bins)
    expected = values.size / bins
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float((statistic - (bins - 1)) / np.sqrt(2 * (bins - 1)))


AXES = ["seed", "issue", "sample", "step"]


@pytest.mark.parametrize("axis", AXES)
def test_uniform_along_every_part_of_the_key(axis: str) -> None:
    keys = [SampleKey(**{**dict.fromkeys(AXES, 3), axis: value}) for value in range(20_000)]
    drawn = uniforms(keys, np.array([0]))[:, 0]
    assert 0 <= drawn.min() < drawn.max() < 1
    assert abs(chi_square(drawn, 100)) < 4
    # Pairs of neighbours fill the square evenly, and neighbours are not correlated.
    pairs = (np.floor(drawn[:-1] * 20) * 20 + np.floor(drawn[1:] * 20) + 0.5) / 400
    assert abs(chi_square(pairs, 400)) < 4
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 4 / np.sqrt(drawn.size)


def test_uniform_along_positions() -> None:
    drawn = uniforms([SampleKey(seed=9, issue=1, sample=2, step=3)], np.arange(50_000))[0]
    assert abs(chi_square(drawn, 256)) < 4
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 4 / np.sqrt(drawn.size)


@pytest.mark.parametrize(
    ("part", "value"),
    [("seed", -1), ("seed", 1 << 64), ("issue", 1 << 32), ("sample", -5), ("step", 1 << 40)],
)
def test_a_key_that_would_wrap_around_is_refused(part: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{part} is {value}"):
        check_key(SampleKey(**{**dict.fromkeys(AXES, 0), part: value}))


def test_the_largest_keys_are_taken() -> None:
    key = SampleKey(seed=(1 << 64) - 1, issue=(1 << 32) - 1, sample=(1 << 32) - 1, step=(1 << 32) - 1)
    check_key(key)
    assert 0 <= uniforms([key], np.array([(1 << 32) - 1]))[0, 0] < 1
