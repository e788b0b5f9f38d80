"""The noise of deployments: normal to the last digit that is looked at, never the same twice, on a grid known in advance."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from dpfed import secure
from dpfed.errors import InputError
from dpfed.privacy import lengths
from dpfed.secure import noise_std, secure_integers, secure_normal, secure_sum

NUM = 10_000_000
POINTS = 2.0**secure.GRID_BITS


@pytest.fixture(scope="module")
def sample() -> Tensor:
    return secure_normal(NUM)


# The noise is fresh in every run, so a bound is set where a right sampler fails once in a hundred million runs, or less.


def has_scale(z: Tensor, std: float = 1.0) -> bool:
    return abs(float((z / std).square().mean()) - 1) < 6 * math.sqrt(2 / z.numel())


def fits_bins(z: Tensor) -> bool:
    """Chi-square over 1,000 bins of equal probability, within six of its own deviations."""
    counts = torch.special.ndtr(z).mul(1000).long().clamp(max=999).bincount(minlength=1000).double()
    expected = z.numel() / 1000
    return float(((counts - expected) ** 2 / expected).sum()) < 999 + 6 * math.sqrt(2 * 999)


def is_normal(z: Tensor) -> bool:
    """Kolmogorov-Smirnov at 2 exp(-2 * 3.2^2), about one in a thousand million."""
    places = torch.arange(z.numel()) / z.numel()
    return float((torch.special.ndtr(z.sort().values) - places).abs().max()) * math.sqrt(z.numel()) < 3.2


def test_mean_and_scale(sample: Tensor) -> None:
    """One per cent more or less noise than is paid for is seen, in ten million draws even a tenth of that."""
    assert abs(float(sample.mean())) < 6 / math.sqrt(NUM)
    assert has_scale(sample)
    for wrong in (0.99, 0.997, 1.003, 1.01):
        assert not has_scale(sample * wrong)
    assert has_scale(secure_normal(1_000_000, std=0.3), std=0.3)


def test_shape(sample: Tensor) -> None:
    part = sample[:2_000_000]
    assert fits_bins(sample)
    assert is_normal(part)
    assert abs(float((sample**4).mean()) - 3) < 6 * math.sqrt(96 / NUM)
    for wrong in (sample * 0.99, sample * 1.01, sample + 0.01):
        assert not fits_bins(wrong)
        assert not is_normal(wrong)


@pytest.mark.parametrize("bound", [1.0, 2.0, 3.0, 4.0, 4.5, 5.0])
def test_tails_on_both_sides(sample: Tensor, bound: float) -> None:
    """Also beyond whole numbers, where the sampler passes from one k to the next."""
    for count in (int((sample > bound).sum()), int((sample < -bound).sum())):
        expected = NUM * math.erfc(bound / math.sqrt(2)) / 2
        assert abs(count - expected) < 6 * math.sqrt(expected) + 6


def test_the_last_digits_are_uniform() -> None:
    """Of the 32 binary places each is a fair coin, the sign too, and zero is not counted twice."""
    drawn = secure_integers(1_000_000).numpy()
    for place in range(24):
        assert abs(((drawn >> place) & 1).mean() - 0.5) < 3 / math.sqrt(1_000_000), place
    assert abs((drawn < 0).mean() - 0.5) < 3 / math.sqrt(1_000_000)
    coarse = drawn >> 31  # half a deviation wide: the cells -1 and 0 beside zero are equally full
    assert abs((coarse == 0).sum() - (coarse == -1).sum()) < 6 * math.sqrt(2 * 191_000)


def test_calls_and_neighbours_are_uncorrelated(sample: Tensor) -> None:
    draws = torch.stack([secure_normal(100_000) for _ in range(12)])
    assert float(torch.corrcoef(draws).fill_diagonal_(0).abs().max()) < 6.5 / math.sqrt(100_000)
    for lag in (1, 2, secure.CHUNK):
        for f in (torch.Tensor.double, torch.Tensor.abs, torch.Tensor.square):
            pair = torch.stack([f(sample[lag:]), f(sample[:-lag])])
            assert abs(float(torch.corrcoef(pair)[0, 1])) < 6.5 / math.sqrt(NUM - lag)


# The exact part: whatever is decided by the first digits would have been decided so by all of them.


def test_the_short_way_agrees_with_the_long_one() -> None:
    random = np.frombuffer(os.urandom(8 * 30_000), np.uint8)
    x, coin, digit, negative = secure._digits(random)
    expected = []
    for index in range(len(x)):
        k = secure._settled(int(x[index]), int(coin[index]), int(digit[index]))
        sure = secure.FIRST_DIGITS[digit[index]] != 255
        if k is not None and sure:
            size = k << 32 | int(x[index])
            expected.append(~size if negative[index] else size)
        elif k is not None:
            expected.append(None)
    found = secure._accepted(random).tolist()
    # Where the first digits do not decide, the two ways draw their further digits apart: a few may differ.
    assert abs(len(found) - len(expected)) <= 30
    assert len(set(expected) - set(found)) <= 30
    assert len(set(found) - set(expected)) <= 30


def boundary_candidates() -> Iterable[tuple[int, int, int]]:
    """For places x and all k that can be told from the first digit: the coin just within and just beyond the probability."""
    for digit in np.unique(secure.FIRST_DIGITS, return_index=True)[1].tolist():
        k = int(secure.FIRST_DIGITS[digit])
        for x in (0, 1, 2**16, 2**31, 3 * 2**30 + 12345, 2**32 - 2, 2**32 - 1):
            edge = math.floor(math.exp(-(x / 2**32) * (k + x / 2**33)) * 2**16)
            yield from ((x, coin, digit) for coin in range(edge - 2, edge + 3) if k != 255 and 0 <= coin < 2**16)


def test_what_is_decided_early_is_beyond_doubt() -> None:
    """In whole numbers: with the missing digits all zeros or all ones the answer is the same."""
    num_open = 0
    for x, coin, digit in boundary_candidates():
        k = int(secure.FIRST_DIGITS[digit])
        rest = np.array([x], np.uint32) * 2.0**-32
        room = float((np.exp(-rest * (k + rest / 2)) * 2.0**16 - np.array([coin], np.uint16))[0])
        low, high = (Decimal(x + end) / 2**32 for end in (1, 0))
        least, most = ((-y * (k + y / 2)).exp() * 2**16 for y in (low, high))
        if room >= 1 + secure.MARGIN:
            assert least >= coin + 1
        elif room <= -secure.MARGIN:
            assert most <= coin
        else:
            num_open += 1
    assert num_open > 20, "the test must see candidates that stay open"


def test_k_has_its_probabilities() -> None:
    """The table tells k exactly where the first 15 bits do, and the rest of the line is left to the long way."""
    weights = [math.exp(-k * k / 2) for k in range(16)]
    ends = [math.fsum(weights[: k + 1]) / math.fsum(weights) for k in range(16)]
    assert [float(Fraction(end, 2**128)) for end in secure.ENDS] == pytest.approx(ends, rel=1e-15)
    for digit, k in enumerate(secure.FIRST_DIGITS.tolist()):
        first, last = digit << 113, ((digit + 1) << 113) - 1
        inside = [end for end in secure.ENDS if first < end <= last]
        if k == 255:
            assert inside or digit == 2**15 - 1
        else:
            assert not inside
            assert first >= (secure.ENDS[k - 1] if k else 0)
            assert last < secure.ENDS[k]


def test_the_long_way_alone_has_the_distribution() -> None:
    random = np.frombuffer(os.urandom(8 * 30_000), np.uint8)
    x, coin, digit, negative = (column.tolist() for column in secure._digits(random))
    drawn = [
        (k + (first + 0.5) / POINTS) * (-1) ** minus
        for first, second, third, minus in zip(x, coin, digit, negative, strict=True)
        if (k := secure._settled(first, second, third)) is not None
    ]
    z = torch.tensor(drawn, dtype=torch.float64)
    share = math.sqrt(math.pi / 2) / math.fsum(math.exp(-k * k / 2) for k in range(16))
    assert abs(len(drawn) / 30_000 - share) < 6 * math.sqrt(share * (1 - share) / 30_000)
    assert is_normal(z)
    assert has_scale(z)
    assert not has_scale(z * 1.1)


# Never the same again.


def test_no_seed_has_an_effect() -> None:
    draws = []
    for _ in range(3):
        torch.manual_seed(0)
        np.random.seed(0)
        before = torch.get_rng_state()
        draws.append(secure_integers(1000))
        assert torch.get_rng_state().equal(before)
    assert len(set(torch.cat(draws).tolist())) > 2990  # 3,000 of 2^34 places: not one is expected twice


def test_forked_processes_differ() -> None:
    outputs: list[bytes] = []
    for _ in range(4):
        inlet, outlet = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(outlet, secure_integers(100).numpy().tobytes())
            finally:
                os._exit(0)
        os.close(outlet)
        with os.fdopen(inlet, "rb") as file:
            outputs.append(file.read())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    outputs.append(secure_integers(100).numpy().tobytes())
    assert {len(output) for output in outputs} == {800}
    numbers = np.concatenate([np.frombuffer(output, np.int64) for output in outputs])
    assert len(set(numbers.tolist())) == 500


def test_the_value_carries_nothing_of_how_it_was_made() -> None:
    """Its memory holds the noise and not a byte more; the module keeps no number that changes from draw to draw."""
    before = {name: repr(value) for name, value in vars(secure).items()}
    for drawn in (secure_integers(1000), secure_normal((10, 100)), secure_sum(torch.zeros(1000), 1.0, 1.0)):
        assert drawn.untyped_storage().nbytes() == drawn.numel() * drawn.element_size()
        assert drawn.is_contiguous()
        assert drawn._base is None
        assert drawn.grad_fn is None
        assert not vars(drawn)
    assert {name: repr(value) for name, value in vars(secure).items()} == before


# The grid, and the sum on it.


@pytest.mark.parametrize("std", [1.0, 0.3, 1e-7, 12345.678])
def test_noise_lies_on_the_grid(std: float) -> None:
    z = secure_normal(100_000, std)
    grid = std / POINTS
    places = (z / grid).round()
    assert (places * grid).equal(z)
    assert len(places.unique()) > 99_000


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_places_of_a_release_do_not_depend_on_the_data(dtype: torch.dtype) -> None:
    """Whatever is summed, the release is a multiple of one public number, and nothing finer of the sum survives."""
    grid = noise_std(0.7, 0.3, 50_000) / POINTS
    for level in (0.0, 0.1, 1 / 3, -1e-9, 1e-300, math.pi * 1e3):
        released = secure_sum(torch.full((50_000,), level, dtype=torch.float64), 0.7, 0.3)
        assert ((released / grid).round() * grid).equal(released)
        assert bool(((released / grid).abs() < 2**52).all())
        assert secure_sum(torch.full((3,), level, dtype=dtype), 0.7, 0.3).dtype == dtype


def test_ordinary_noise_would_not_pass() -> None:
    grid = 1.0 / POINTS
    released = 0.1 + torch.randn(1000, dtype=torch.float64)
    assert not ((released / grid).round() * grid).equal(released)


def test_the_sum_keeps_its_value_and_gets_the_noise_that_is_charged() -> None:
    total = torch.linspace(-40, 40, 400_000, dtype=torch.float64).reshape(4, 100_000)
    released = secure_sum(total, sigma=0.7, clip=0.3)
    assert released.shape == total.shape
    assert has_scale(released - total, 0.7 * 0.3)
    for wrong in (0.97, 1.03):
        assert not has_scale(released - total, 0.7 * 0.3 * wrong)
    assert abs(float((released - total).mean())) < 6 * 0.21 / math.sqrt(400_000)
    assert total.equal(torch.linspace(-40, 40, 400_000, dtype=torch.float64).reshape(4, 100_000)), "the input is left alone"


def test_rounding_is_paid_for() -> None:
    """The neighbour's sum, rounded, is never farther than what `noise_std` divides by: also at the worst places of rounding."""
    d, sigma, clip = 10_000, 3.0, 1e-6
    std = noise_std(sigma, clip, d)
    grid = std / POINTS
    assert std > sigma * clip
    generator = torch.Generator().manual_seed(0)
    for scale in (clip, 2.0**30 * grid, secure.LARGEST * grid / 2):
        one = (torch.rand(d, generator=generator, dtype=torch.float64) * 2 - 1) * scale
        record = torch.randn(d, generator=generator, dtype=torch.float64)
        other = one + record / record.norm() * clip * (1 - 1e-9)
        exact = [[Fraction(value) / Fraction(grid) for value in total.tolist()] for total in (one, other)]
        points = [(total / grid).round().long() for total in (one, other)]
        for place, values in zip(points, exact, strict=True):
            assert max(abs(int(p) - value) for p, value in zip(place, values, strict=True)) <= 0.75
        distance = math.sqrt(sum(float(a - b) ** 2 for a, b in zip(*exact, strict=True))) + 1.5 * math.sqrt(d)
        assert float((points[0] - points[1]).double().norm()) <= distance
    assert sigma * (clip + 1.5 * grid * math.sqrt(d)) <= std


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clipping_in_floating_point_is_paid_for(dtype: torch.dtype) -> None:
    """Norms of the gradients that float32 gets most wrong, and sums of records that stand in each other's way."""
    paid = secure.SLACK[dtype]
    for d in (10_000, 2_000_000):
        level, mixed = torch.full((d,), 0.1, dtype=dtype), torch.full((d,), 2.0**-12 * 0.99, dtype=dtype)
        mixed[:64] = 1
        for x in (level, mixed, torch.arange(d).to(dtype), torch.rand(d, dtype=dtype)):
            true = (
                float(torch.linalg.vector_norm(x.double()))
                if dtype == torch.float32
                else math.sqrt(math.fsum((x * x).tolist()))
            )
            assert abs(float(lengths(x)) / true - 1) < paid / 8
    plain = torch.linalg.vector_norm(torch.full((2_000_000,), 0.1))
    assert abs(float(plain) / math.sqrt(20_000) - 1) > secure.SLACK[torch.float32] / 8, "which is why it is done block by block"
    records, scale = (
        torch.rand(2, 1024, 1000, dtype=torch.float64).to(dtype) + 1,
        torch.rand(2, 1024, dtype=torch.float64).to(dtype),
    )
    total = torch.einsum("sb,sbd->sd", scale, records)
    exact = np.einsum("sb,sbd->sd", scale.numpy().astype(np.longdouble), records.numpy().astype(np.longdouble))
    largest = float((scale * lengths(records)).max())
    assert float(np.linalg.norm((total.numpy() - exact).astype(float), axis=-1).max()) < paid / 4 * largest


def test_what_is_not_a_number_or_too_large_is_cut_off() -> None:
    released = secure_sum(torch.tensor([math.nan, math.inf, -math.inf, 1e300], dtype=torch.float64), 1.0, 1.0)
    assert abs(float(released[0])) < 20
    assert released[1:].abs().sub(2.0**19).abs().max() < 20
    assert bool(released.isfinite().all())


@pytest.mark.parametrize("std", [0.0, -1.0, math.nan, math.inf, 1e-300])
def test_noise_that_is_none_is_refused(std: float) -> None:
    with pytest.raises(InputError, match="standard deviation"):
        secure_normal(3, std)


@pytest.mark.parametrize(
    ("sigma", "clip"), [(0.0, 1.0), (1.0, math.inf), (1.0, 0.0), (math.nan, 1.0), (1e9, 1.0), (math.inf, 1.0)]
)
def test_a_sum_without_protection_is_refused(sigma: float, clip: float) -> None:
    with pytest.raises(InputError, match="private release"):
        secure_sum(torch.zeros(100), sigma, clip)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_a_sum_that_is_not_exact_enough_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match="Train in float32"):
        secure_sum(torch.zeros(100, dtype=dtype), 1.0, 1.0)


@pytest.mark.parametrize("clip", [1e-35, 1e35])
def test_a_deviation_beyond_the_dtype_is_refused(clip: float) -> None:
    """Where sums overflow, or small numbers are flushed to zero, the clip would not be what it says."""
    with pytest.raises(InputError, match=r"beyond what torch\.float32 can carry"):
        secure_sum(torch.zeros(100), 1.0, clip)
    assert secure_sum(torch.zeros(100, dtype=torch.float64), 1.0, clip).shape == (100,)


def test_no_noise_is_no_error() -> None:
    assert secure_normal(0).shape == (0,)
    assert secure_normal((2, 0)).shape == (2, 0)
