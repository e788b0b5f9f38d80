"""The referees are examined first: golden values of the specification, torch's own optimisers, and limiting cases."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.paper import twins
from tests.paper.twins import World

D = 7


def keyed_noise(*key: int, size: int = D) -> np.ndarray:
    return np.random.default_rng(key).standard_normal(size)


def quadratic(*, rounds: int, num_steps: int, cohort: int = 3, num_clients: int = 5, noise: float = 0.1) -> World:
    """Clients that pull towards points of their own, with curvatures of their own and noise keyed by the step."""

    def gradient(t: int, i: int, k: int, query: int, theta: np.ndarray) -> np.ndarray:
        return (1.0 + i) * (theta - keyed_noise(9, i)) + noise * keyed_noise(t, i, k, query)

    def difference(t: int, i: int, k: int, now: np.ndarray, coefficient: float, before: np.ndarray) -> np.ndarray:
        pull = (1.0 + i) * ((now - keyed_noise(9, i)) - coefficient * (before - keyed_noise(9, i)))
        return pull + noise * keyed_noise(t, i, k, 7)

    draws = np.random.default_rng(5)
    cohorts = [sorted(draws.choice(num_clients, cohort, replace=False).tolist()) for _ in range(rounds)]
    scales = [0.5 * (1 + np.cos(np.pi * t / rounds)) for t in range(rounds)]
    return World(keyed_noise(1, 2), cohorts, num_clients, num_steps, scales, gradient, difference, lambda i: noise**2 / (1 + i))


def fixed(gradients: list[float], *, rounds: int, num_steps: int, size: int = 1) -> World:
    """One client whose gradient in the n-th step of the run is gradients[n], in every coordinate."""
    return World(
        np.ones(size),
        [[0]] * rounds,
        1,
        num_steps,
        [1.0] * rounds,
        lambda t, i, k, query, theta: np.full(size, gradients[t * num_steps + k]),
    )


def close(left: list[np.ndarray], right: list[np.ndarray], tolerance: float = 1e-13) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def far(left: list[np.ndarray], right: list[np.ndarray]) -> None:
    assert np.abs(left[-1] - right[-1]).max() > 1e-6


@pytest.fixture
def world() -> World:
    return quadratic(rounds=4, num_steps=3)


@pytest.fixture
def central() -> World:
    return quadratic(rounds=12, num_steps=1)


# ---------------------------------------------------------------------------------------------------- golden values


@pytest.mark.parametrize(("rounds", "num_steps"), [(1, 3), (3, 1)])
def test_weight_tracked_ema_is_golden(rounds: int, num_steps: int) -> None:
    trace: list[dict] = []
    world = fixed([0.5, -1.0, 2.0], rounds=rounds, num_steps=num_steps)
    twins.fed_adamw(world, lr=0.1, blocks=np.zeros(1, int), trace=trace)
    assert trace[-1]["v"][0] / trace[-1]["v_weight"] == pytest.approx(1.751251, abs=5e-7)
    assert trace[-1]["v_weight"] == pytest.approx(1 - 0.999**3, rel=1e-12)


def test_tracked_phi_is_phi_when_constant(world: World) -> None:
    trace: list[dict] = []
    twins.fed_adamw(replace(world, noise_var=lambda i: 0.25), lr=0.1, blocks=np.arange(D), trace=trace)
    assert [row["f"] / row["v_weight"] for row in trace] == pytest.approx([0.25] * 4, rel=1e-12)


def test_laplacian_smoothing_is_golden() -> None:
    smooth = twins.laplacian_smooth(np.eye(5)[0], 1.0)
    np.testing.assert_allclose(smooth, [0.454545, 0.181818, 0.090909, 0.090909, 0.181818], atol=5e-7)


@pytest.mark.parametrize("n", [3, 4, 5, 32])
def test_laplacian_smoothing_equals_the_fourier_form(n: int) -> None:
    v = keyed_noise(n, size=n)
    spectrum = 1 + 2 * 0.7 * (1 - np.cos(2 * np.pi * np.arange(n) / n))
    np.testing.assert_allclose(
        twins.laplacian_smooth(v, 0.7), np.fft.ifft(np.fft.fft(v) / spectrum).real, rtol=1e-12, atol=1e-14
    )
    assert twins.laplacian_smooth(v, 0.7).mean() == pytest.approx(v.mean())


@pytest.mark.parametrize("n", [1, 2])
def test_laplacian_smoothing_leaves_tiny_tensors(n: int) -> None:
    v = keyed_noise(n, size=n)
    np.testing.assert_array_equal(twins.laplacian_smooth(v, 1.0), v)


def test_quantiser_is_golden() -> None:
    x = np.array([-0.8, -0.35, -0.1, 0.0, 0.05, 0.2, 0.6, 0.7])
    codes, unit, low = twins.quantise_block(x, 4)
    assert codes.tolist() == [0, 5, 7, 8, 9, 10, 14, 15]
    np.testing.assert_allclose(codes * unit + low, [-0.8, -0.3, -0.1, 0, 0.1, 0.2, 0.6, 0.7], atol=1e-15)
    np.testing.assert_allclose(twins.quantise_and_back(x, 4, 8), codes * unit + low, atol=0)


def test_quantiser_keeps_a_constant_block_and_a_short_last_one() -> None:
    x = np.array([3.0, 3.0, 3.0, 0.0, 15.0])
    np.testing.assert_array_equal(twins.quantise_and_back(x, 4, 3), x)


def test_ring_ages_are_golden() -> None:
    assert twins.ring_ages(2, 3) == [1, 0]
    assert twins.ring_ages(4, 3) == [0, 2, 1]
    assert twins.ring_ages(5, 3) == [1, 0, 2]


def test_window_holds_the_masses_the_spec_computed() -> None:
    m_mass = (1 - 0.9) / (1 - 0.9**1000) * sum(0.9**age for age in twins.ring_ages(1000, 10))
    v_mass = (1 - 0.999) / (1 - 0.999**1000) * sum(0.999**age for age in twins.ring_ages(1000, 10))
    assert (m_mass, v_mass) == (pytest.approx(0.651, abs=5e-4), pytest.approx(0.0157, abs=5e-5))


# ---------------------------------------------------------------------------------------------------------- the laws


@pytest.mark.parametrize("cohort", [5, 2])
@pytest.mark.parametrize("control", ["mean", "option2"])
def test_scaffold_keeps_c_the_mean_of_all_clients(control: str, cohort: int) -> None:
    """Under full participation, as the spec says; under partial too, because every client starts with zero."""
    world = quadratic(rounds=4, num_steps=3, cohort=cohort)
    trace: list[dict] = []
    twins.scaffold(world, lr=0.05, weight_decay=0.01, control=control, trace=trace)
    for row in trace:
        assert np.abs(row["c"]).max() > 1e-3
        np.testing.assert_allclose(row["c_i"].mean(axis=0), row["c"], rtol=1e-12, atol=1e-14)


def test_scaffold_corrects_and_its_controls_agree_without_decay(world: World) -> None:
    mean = twins.scaffold(world, lr=0.05, weight_decay=0.0)
    close(mean, twins.scaffold(world, lr=0.05, weight_decay=0.0, control="option2"), 1e-11)
    far(mean, twins.fed_avg(world, lr=0.05, weight_decay=0.0))
    far(
        twins.scaffold(world, lr=0.05, weight_decay=0.1),
        twins.scaffold(world, lr=0.05, weight_decay=0.1, control="option2"),
    )


@pytest.mark.parametrize("gamma", [0.0, 0.25, 0.5, 0.75])
def test_alignment_recursion_has_gain_one_over_one_minus_gamma(gamma: float) -> None:
    """A constant gradient g makes Adam's direction u = sign(g) exactly, so D^1 = u and D^{t+1} = u + gamma D^t."""
    u = np.array([1.0, -1.0, 1.0])
    rounds = 200
    world = World(np.zeros(3), [[0, 1]] * rounds, 2, 4, [1.0] * rounds, lambda t, i, k, query, theta: 0.3 * u)
    trace: list[dict] = []
    twins.fed_adamw(world, lr=0.01, blocks=np.zeros(3, int), weight_decay=0.0, gamma=gamma, eps=0.0, trace=trace)
    np.testing.assert_allclose(trace[0]["direction"], u, rtol=1e-11)
    np.testing.assert_allclose(trace[1]["direction"], (1 + gamma) * u, rtol=1e-11)
    np.testing.assert_allclose(trace[-1]["direction"], u / (1 - gamma), rtol=1e-9)


def test_convex_alignment_has_gain_one() -> None:
    world = World(np.zeros(3), [[0]] * 50, 1, 4, [1.0] * 50, lambda t, i, k, query, theta: np.full(3, 0.3))
    trace: list[dict] = []
    twins.fed_adamw(world, lr=0.01, blocks=np.zeros(3, int), weight_decay=0.0, gamma=0.5, align="convex", eps=0.0, trace=trace)
    np.testing.assert_allclose(trace[0]["direction"], np.full(3, 0.5), rtol=1e-9)
    np.testing.assert_allclose(trace[-1]["direction"], np.ones(3), rtol=1e-9)


@pytest.mark.parametrize(
    "run",
    [
        lambda world: twins.fed_avg(world, lr=0.1, weight_decay=0.3),
        lambda world: twins.scaffold(world, lr=0.1, weight_decay=0.3),
        lambda world: twins.local_adamw(world, lr=0.1, weight_decay=0.3),
        lambda world: twins.fed_adamw(world, lr=0.1, weight_decay=0.3, gamma=0.0, blocks=np.zeros(2, int)),
    ],
)
def test_weight_decay_shrinks_every_round(run) -> None:
    world = fixed([0.0] * 15, rounds=3, num_steps=5, size=2)
    close(run(world), [np.full(2, (1 - 0.1 * 0.3) ** (5 * (t + 1))) for t in range(3)])


@pytest.mark.parametrize(
    "run",
    [
        lambda world: twins.sgd(world, lr=0.1, weight_decay=0.3),
        lambda world: twins.adamw(world, lr=0.1, weight_decay=0.3),
        lambda world: twins.adamw_bc(world, lr=0.1, weight_decay=0.3, floor=1e-8),
        lambda world: twins.micro_adam(world, lr=0.1, weight_decay=0.3, density=0.5),
    ],
)
def test_weight_decay_shrinks_every_central_step(run) -> None:
    world = fixed([0.0] * 6, rounds=6, num_steps=1, size=2)
    close(run(world), [np.full(2, (1 - 0.1 * 0.3) ** (t + 1)) for t in range(6)])


# ----------------------------------------------------------------------------------------------- torch as a referee


def torch_run(world: World, build, *, renew: bool) -> list[np.ndarray]:
    """One client alone, stepped by an optimiser of torch; `renew` makes a fresh one in every round."""
    parameter = torch.nn.Parameter(torch.tensor(world.theta0))
    optimizer = build([parameter])
    thetas = []
    for t, cohort in enumerate(world.cohorts):
        optimizer = build([parameter]) if renew else optimizer
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * world.scales[t]
        for k in range(world.num_steps):
            parameter.grad = torch.tensor(world.gradient(t, cohort[0], k, 0, parameter.detach().numpy().copy()))
            optimizer.step()
        thetas.append(parameter.detach().numpy().copy())
    return thetas


def test_central_algorithms_equal_torch() -> None:
    world = quadratic(rounds=12, num_steps=1, cohort=1)
    close(
        twins.sgd(world, lr=0.05, momentum=0.9, weight_decay=0.01),
        torch_run(world, lambda p: torch.optim.SGD(p, momentum=0.9, weight_decay=0.01), renew=False),
        1e-11,
    )
    close(
        twins.adam(world, lr=0.05, weight_decay=0.01),
        torch_run(world, lambda p: torch.optim.Adam(p, weight_decay=0.01), renew=False),
        1e-11,
    )
    close(
        twins.adamw(world, lr=0.05, weight_decay=0.01),
        torch_run(world, lambda p: torch.optim.AdamW(p, weight_decay=0.01), renew=False),
        1e-11,
    )


def test_local_algorithms_equal_torch() -> None:
    world = quadratic(rounds=3, num_steps=4, cohort=1)
    close(
        twins.fed_avg(world, lr=0.05, weight_decay=0.01),
        torch_run(world, lambda p: torch.optim.SGD(p, weight_decay=0.01), renew=True),
        1e-11,
    )
    close(
        twins.local_adam(world, lr=0.05, weight_decay=0.01),
        torch_run(world, lambda p: torch.optim.Adam(p, weight_decay=0.01), renew=True),
        1e-11,
    )
    close(
        twins.local_adamw(world, lr=0.05, weight_decay=0.01),
        torch_run(world, lambda p: torch.optim.AdamW(p, weight_decay=0.01), renew=True),
        1e-11,
    )


# --------------------------------------------------------------------------------------------------- limiting cases


def test_fed_adamw_with_every_switch_off_is_local_adamw(world: World) -> None:
    expected = twins.local_adamw(world, lr=0.05)
    off = {"lr": 0.05, "blocks": np.arange(D), "aggregate": "none", "gamma": 0.0, "bias_correction": False}
    close(twins.fed_adamw(world, **off), expected)
    close(twins.fed_adamw(world, **off, v_bias_correction="local"), expected)
    close(twins.fed_adamw(world, **off, v_mode="block"), expected)
    close(
        twins.fed_adamw(world, **off, decay="coupled", weight_decay=0.3),
        twins.local_adam(world, lr=0.05, weight_decay=0.3),
    )


def test_every_switch_of_fed_adamw_matters(world: World) -> None:
    full = {"lr": 0.05, "blocks": np.array([0, 0, 1, 1, 1, 2, 2]), "weight_decay": 0.3}
    expected = twins.fed_adamw(world, **full)
    for change in [
        {"aggregate": "none"},
        {"aggregate": "mv"},
        {"aggregate": "m"},
        {"bias_correction": False},
        {"floor_abs": 1.0},
        {"floor_rel": 500.0},
        {"gamma": 0.0},
        {"align": "convex"},
        {"v_bias_correction": "local"},
        {"v_mode": "block"},
        {"decay": "coupled"},
        {"blocks": np.arange(D)},
    ]:
        far(twins.fed_adamw(world, **{**full, **change}), expected)


def test_pure_noise_sits_on_the_floor() -> None:
    """Phi far above every v_hat: the step is m_hat / sqrt(floor_rel Phi)."""
    world = replace(fixed([0.01], rounds=1, num_steps=1), noise_var=lambda i: 4.0)
    theta = twins.fed_adamw(world, lr=0.1, blocks=np.zeros(1, int), weight_decay=0.0)[0]
    assert theta[0] == pytest.approx(1 - 0.1 * 0.01 / np.sqrt(0.05 * 4.0), rel=1e-7)


def test_neutral_knobs_give_fed_avg(world: World) -> None:
    expected = twins.fed_avg(world, lr=0.05, weight_decay=0.01)
    close(twins.fed_prox(world, lr=0.05, weight_decay=0.01, mu=0.0), expected)
    close(twins.fed_cm(world, lr=0.05, weight_decay=0.01, a=1.0), expected)
    for where in ("server", "client_step"):
        close(twins.fed_avg_ls(world, lr=0.05, weight_decay=0.01, where=where, sigma_ls=0.0), expected)
        close(twins.fed_avg_ls(world, lr=0.05, weight_decay=0.01, where=where, tensor_sizes=[2, 1, 2, 2]), expected)
    second = replace(world, gradient=lambda t, i, k, query, theta: world.gradient(t, i, k, 1, theta))
    close(
        twins.fed_sam(world, lr=0.05, weight_decay=0.01, rho=0.0),
        twins.fed_avg(second, lr=0.05, weight_decay=0.01),
    )


def test_active_knobs_leave_fed_avg(world: World) -> None:
    expected = twins.fed_avg(world, lr=0.05, weight_decay=0.01)
    far(twins.fed_prox(world, lr=0.05, weight_decay=0.01, mu=0.3), expected)
    far(twins.fed_cm(world, lr=0.05, weight_decay=0.01), expected)
    far(twins.fed_avg_ls(world, lr=0.05, weight_decay=0.01), expected)
    far(
        twins.fed_avg_ls(world, lr=0.05, weight_decay=0.01),
        twins.fed_avg_ls(world, lr=0.05, weight_decay=0.01, where="client_step"),
    )
    far(
        twins.fed_sam(world, lr=0.05, weight_decay=0.01, rho=0.0),
        twins.fed_sam(world, lr=0.05, weight_decay=0.01, rho=0.5),
    )


def test_fed_opt_servers_on_one_step_by_hand() -> None:
    world = fixed([3.0, -1.0], rounds=2, num_steps=1)
    for server, second in [
        ("adam", lambda v, d: 0.99 * v + 0.01 * d * d),
        ("yogi", lambda v, d: v - 0.01 * d * d * np.sign(v - d * d)),
        ("adagrad", lambda v, d: v + d * d),
    ]:
        m, v, x, expected = 0.0, 1e-6, 1.0, []
        for d in (-0.3, 0.1):
            m, v = 0.9 * m + 0.1 * d, second(v, d)
            x += 0.01 * m / (np.sqrt(v) + 1e-3)
            expected.append(np.array([x]))
        close(twins.fed_opt(world, lr=0.1, weight_decay=0.0, server_lr=0.01, server=server), expected)


def test_fafed_with_one_client_is_adam_across_the_rounds() -> None:
    """One client and no restarts: K steps in each of T rounds are TK steps of Adam with epsilon rho."""
    world = quadratic(rounds=3, num_steps=4, cohort=1, num_clients=1)
    world = replace(world, scales=[1.0] * 3)
    steps = replace(
        world,
        cohorts=[[0]] * 12,
        num_steps=1,
        scales=[1.0] * 12,
        gradient=lambda t, i, k, query, theta: world.gradient(t // 4, i, t % 4, query, theta),
    )
    close(
        twins.fafed(world, lr=0.05, beta1=0.9, beta2=0.99),
        twins.adam(steps, lr=0.05, beta2=0.99, eps=0.01)[3::4],
        1e-11,
    )


def test_storm_on_a_constant_gradient_divides_the_gradient_by_its_own_size() -> None:
    g = np.array([0.5, -2.0])
    world = World(
        np.zeros(2),
        [[0]],
        1,
        3,
        [1.0],
        lambda t, i, k, query, theta: g,
        lambda t, i, k, now, coefficient, before: (1 - coefficient) * g,
    )
    switches = {"lr": 0.1, "beta1": 0.5, "beta2": 0.99, "variant": "storm", "a": 0.2, "rho": 0.25}
    close(twins.fafed(world, **switches), [-0.1 * 3 * g / (0.2 * np.abs(g) + 0.25)])
    fixed_inside = twins.fafed(world, **switches, denominator="round")
    close(fixed_inside, [-0.1 * 3 * g / 0.25])


def test_storm_remembers_the_iterate_before(world: World) -> None:
    calls: list[tuple[int, np.ndarray, np.ndarray]] = []

    def difference(t: int, i: int, k: int, now: np.ndarray, coefficient: float, before: np.ndarray) -> np.ndarray:
        assert coefficient == 0.9
        calls.append((k, now.copy(), before.copy()))
        return now - coefficient * before

    twins.fafed(replace(world, gradient_difference=difference), lr=0.05, beta1=0.9, beta2=0.99, variant="storm")
    assert len(calls) == 4 * 3 * 3
    for last, (k, now, before) in zip([calls[0], *calls[:-1]], calls, strict=True):
        np.testing.assert_array_equal(before, now if k == 0 else last[1])
        assert k == 0 or np.abs(now - before).max() > 0


def test_fed_prox_by_hand() -> None:
    world = fixed([2.0, 2.0], rounds=1, num_steps=2)
    first = 1.0 - 0.1 * 2.0
    close(
        twins.fed_prox(world, lr=0.1, mu=0.5, weight_decay=0.0),
        [np.array([first - 0.1 * (2.0 + 0.5 * (first - 1.0))])],
    )


def test_fed_lada_by_hand() -> None:
    """Gradients 2, 1 in a first round of two steps, then 1, 1: v falls in the second step, so the maximum matters."""
    world = fixed([2.0, 0.1, 1.0, 1.0], rounds=2, num_steps=2)
    for amsgrad in (True, False):
        x, server_v, direction, expected = 1.0, 1e-16, 0.0, []
        for gradients in ([2.0, 0.1], [1.0, 1.0]):
            y, m, v, largest = x, 0.0, server_v, server_v
            for g in gradients:
                m, v = 0.9 * m + 0.1 * g, 0.5 * v + 0.5 * g * g
                largest = max(largest, v)
                y -= 0.1 * (0.1 * m / np.sqrt(largest if amsgrad else v) + 0.9 * direction)
            direction, server_v, x = -(y - x) / 0.2, largest if amsgrad else v, y
            expected.append(np.array([x]))
        close(twins.fed_lada(world, lr=0.1, beta2=0.5, amsgrad=amsgrad), expected)


def test_corrections_vanish_without_noise(central: World) -> None:
    quiet = replace(central, noise_var=twins.no_noise)
    close(
        twins.adamw_bc(quiet, lr=0.05, weight_decay=0.1, floor=0.0),
        twins.adamw(quiet, lr=0.05, weight_decay=0.1, eps=0),
    )
    close(twins.adam_bc(quiet, lr=0.05, floor=0.0), twins.adam(quiet, lr=0.05, eps=0))
    far(twins.adam_bc(central, lr=0.05, floor=1e-8), twins.adam_bc(quiet, lr=0.05, floor=1e-8))


def test_corrections_subtract_the_noise_of_the_mean() -> None:
    """Two clients with noise variances 1 and 3 leave a variance of 1 in their mean: nothing to do with their mean 2."""
    world = World(
        np.zeros(1), [[0, 1]], 2, 1, [1.0], lambda t, i, k, query, theta: np.array([2.0]), None, lambda i: 1.0 + 2.0 * i
    )
    assert twins.adam_bc(world, lr=0.1, floor=1e-8)[0][0] == pytest.approx(-0.1 * 2 / np.sqrt(4 - 1), rel=1e-12)


def test_gamma_decay_starts_with_the_second_step() -> None:
    world = replace(fixed([0.1, 0.1], rounds=2, num_steps=1), noise_var=lambda i: 1.0)
    first, second = twins.adam_bc(world, lr=0.1, floor=0.04, gamma_decay=0.25)
    assert first[0] == pytest.approx(1 - 0.1 * 0.1 / 0.2, rel=1e-12)
    assert second[0] - first[0] == pytest.approx(-0.1 * 0.1 / 0.1, rel=1e-12)


def test_micro_adam_with_everything_kept_is_adam(central: World) -> None:
    """With density 1 nothing is left for the error feedback, and a window of all steps is Adam's own sum."""
    expected = twins.adam(central, lr=0.05)
    for switches in [{"ef_bits": None}, {"ef_bits": 4}, {"bias_correction": "window"}, {"tensor_sizes": [3, 4]}]:
        trace: list[dict] = []
        close(twins.micro_adam(central, lr=0.05, density=1.0, window=12, trace=trace, **switches), expected, 1e-11)
        assert all(np.all(row["residual"] == 0) for row in trace)


def test_micro_adam_forgets_what_left_its_window() -> None:
    """Density 1 and a window of 2: only the last two gradients count, the newest with age 0."""
    gradients = [5.0, -1.0, 2.0, 0.5]
    thetas = twins.micro_adam(fixed(gradients, rounds=4, num_steps=1), lr=0.1, density=1.0, window=2)
    x, expected = 1.0, []
    for t in range(1, 5):
        recent = gradients[max(0, t - 2) : t][::-1]
        m = sum(0.1 * 0.9**age * g for age, g in enumerate(recent)) / (1 - 0.9**t)
        v = sum(0.001 * 0.999**age * g * g for age, g in enumerate(recent)) / (1 - 0.999**t)
        x -= 0.1 * m / (1e-8 + np.sqrt(v))
        expected.append(np.array([x]))
    close(thetas, expected, 1e-12)


def test_micro_adam_switches_matter(central: World) -> None:
    usual = {"lr": 0.05, "density": 0.3, "window": 4, "quant_block": 4}
    expected = twins.micro_adam(central, **usual)
    for change in [
        {"ef_bits": None},
        {"bias_correction": "window"},
        {"tensor_sizes": [3, 4]},
        {"quant_block": 3},
        {"window": 5},
        {"density": 0.5},
        {"weight_decay": 0.1},
    ]:
        far(twins.micro_adam(central, **{**usual, **change}), expected)


def test_micro_adam_moves_only_what_its_window_holds_and_loses_nothing() -> None:
    g = np.array([4.0, -3.0, 2.0, 1.0])
    world = World(np.zeros(4), [[0]] * 4, 1, 1, [1.0] * 4, lambda t, i, k, query, theta: g)
    trace: list[dict] = []
    thetas = twins.micro_adam(world, lr=0.1, density=0.25, window=10, ef_bits=None, trace=trace)
    # what has piled up: (4, -3, 2, 1), then (4, -6, 4, 2), (8, -3, 6, 3), (4, -6, 8, 4)
    assert [int(indices[0]) for indices, _ in trace[-1]["ring"][0]] == [0, 1, 0, 2]
    assert [np.flatnonzero(theta).tolist() for theta in thetas] == [[0], [0, 1], [0, 1], [0, 1, 2]]
    released = np.zeros(4)
    for indices, values in trace[-1]["ring"][0]:
        released[indices] += values
    np.testing.assert_allclose(released + trace[-1]["residual"], 4 * g)


# ------------------------------------------------------------------------------------------------------- guard rails


def test_a_learning_rate_of_zero_keeps_the_direction(world: World) -> None:
    still = replace(world, scales=[1.0, 0.0, 1.0, 1.0])
    for run in [
        lambda trace: twins.fed_adamw(still, lr=0.05, blocks=np.arange(D), trace=trace),
        lambda trace: twins.fed_lada(still, lr=0.05, trace=trace),
        lambda trace: twins.fed_cm(still, lr=0.05, weight_decay=0.0, trace=trace),
    ]:
        trace: list[dict] = []
        thetas = run(trace)
        np.testing.assert_array_equal(thetas[0], thetas[1])
        np.testing.assert_array_equal(trace[0]["direction"], trace[1]["direction"])
        assert np.all(np.isfinite(thetas[-1]))
    assert np.all(np.isfinite(twins.scaffold(still, lr=0.05, weight_decay=0.0, control="option2")[-1]))


def test_worlds_are_left_as_they_were(world: World, central: World) -> None:
    before = world.theta0.copy()
    twins.fed_adamw(world, lr=0.05, blocks=np.arange(D), aggregate="mv")
    twins.fafed(world, lr=0.05, beta1=0.9, beta2=0.99, variant="storm", second_moment_of="m")
    twins.micro_adam(central, lr=0.05)
    np.testing.assert_array_equal(world.theta0, before)
    np.testing.assert_array_equal(central.theta0, before)


def test_unknown_switches_are_refused(world: World) -> None:
    with pytest.raises(ValueError, match="additiv"):
        twins.fed_adamw(world, lr=0.05, blocks=np.arange(D), align="additiv")
    with pytest.raises(ValueError, match="num_steps is 3"):
        twins.adam(world, lr=0.05)
