"""The referees: every algorithm of the specification once more, as slow and plain as possible.

The library's own files are compared with these. Nothing here is shared with the library: numpy, float64, and one loop
each over rounds, clients and local steps, written from `algorithms.md` (cited below as "spec 3.6") and never from the
package. Everything random or data-dependent is injected through a `World`, so a private run and a plain run are the
same run: the gradients already carry the clipping and the noise, and without noise `noise_var` is zero.

Conventions, all of them from spec 2.1 and 3:
* rounds t and local steps k count from 0 in the calls to the world, and a client takes exactly K steps (D13);
* the learning rate of a round is eta_t = lr * scales[t]; the server averages uploads with equal weights (D21);
* the SGD family adds lambda * theta to the gradient after the noise, the AdamW family shrinks theta by
  (1 - eta lambda) before the update (D5, D14);
* a round whose eta_t is 0 keeps whatever would have been divided by eta_t.

Every function returns theta after every round. With `trace=[]` it also appends, per round, the rest of the server's
state (and for Scaffold the memories of the clients).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Vector = np.ndarray
Trace = list[dict[str, Any]]


def no_noise(client: int) -> float:
    """The noise variance of a plain run."""
    return 0.0


@dataclass
class World:
    """Everything random or data-dependent."""

    theta0: Vector  # [d]
    cohorts: list[list[int]]  # per round, sorted client ids, never empty
    num_clients: int
    num_steps: int  # K
    scales: list[float]  # eta_t = lr * scales[t]
    # gradient(t, i, k, query, theta): the private gradient, clipped, summed, noised, divided by B
    gradient: Callable[[int, int, int, int, Vector], Vector]
    # gradient_difference(t, i, k, theta_now, coefficient, theta_before): one release of
    # g(theta_now) - coefficient * g(theta_before), per record, clipped as one (only FAFED's variant "storm")
    gradient_difference: Callable[[int, int, int, Vector, float, Vector], Vector] | None = None
    noise_var: Callable[[int], float] = no_noise  # Phi of client i = (sigma C / B_i)^2


# ----------------------------------------------------------------------------------------------------- small pieces


def start_of(world: World) -> Vector:
    return np.array(world.theta0, dtype=np.float64)


def mean_of(uploads: Sequence[Any]) -> Any:
    """The plain mean over the cohort, client after client in the order of the cohort."""
    total = uploads[0]
    for upload in uploads[1:]:
        total = total + upload
    return total / len(uploads)


def checked(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}, but must be one of {allowed}")


def ema(average: Any, value: Any, beta: float) -> Any:
    """One step of an exponential moving average. Fed with ones it gives the weight of the average itself (spec 2.3)."""
    return beta * average + (1.0 - beta) * value


def block_mean(x: Vector, blocks: Vector) -> Vector:
    """One mean per block; `blocks[j]` is the block of coordinate j, numbered 0, 1, 2, ... without gaps (spec 2.5)."""
    return np.array([x[blocks == b].mean() for b in range(int(blocks.max()) + 1)])


def laplacian_smooth(v: Vector, sigma_ls: float) -> Vector:
    """Spec 3.3: solve (I - sigma_ls L) x = v, L the circulant 1-D Laplacian. Written as the dense linear system.

    A tensor of fewer than three entries is returned as it is.
    """
    n = len(v)
    if n < 3:
        return v.copy()
    system = (1.0 + 2.0 * sigma_ls) * np.eye(n)
    for j in range(n):
        system[j, (j + 1) % n] -= sigma_ls
        system[j, (j - 1) % n] -= sigma_ls
    return np.linalg.solve(system, v)


def pieces_of(d: int, sizes: Sequence[int] | None) -> list[slice]:
    """The tensors of a flat vector; None means that the vector is one tensor."""
    sizes = [d] if sizes is None else list(sizes)
    if sum(sizes) != d:
        raise ValueError(f"tensor_sizes add up to {sum(sizes)}, but the vector has {d} entries")
    ends = np.cumsum(sizes)
    return [slice(int(end) - size, int(end)) for end, size in zip(ends, sizes, strict=True)]


def smooth_tensors(v: Vector, sigma_ls: float, sizes: Sequence[int] | None) -> Vector:
    return np.concatenate([laplacian_smooth(v[piece], sigma_ls) for piece in pieces_of(len(v), sizes)])


def quantise_block(x: Vector, bits: int) -> tuple[Vector, float, float]:
    """Spec 3.12: (codes, unit, minimum) of one block. A constant block has unit 0 and codes 0."""
    low, high = float(x.min()), float(x.max())
    unit = (high - low) / (2**bits - 1)
    if unit == 0.0:
        return np.zeros(len(x), dtype=np.int64), 0.0, low
    return np.floor((x - low) / unit + 0.5).astype(np.int64), unit, low


def quantise_and_back(x: Vector, bits: int, block: int) -> Vector:
    """Q^-1(Q(x)), block after block; the last block of a tensor may be shorter."""
    back = np.zeros_like(x)
    for begin in range(0, len(x), block):
        codes, unit, low = quantise_block(x[begin : begin + block], bits)
        back[begin : begin + block] = codes * unit + low
    return back


def ring_ages(t: int, m: int) -> list[int]:
    """Spec 3.12: the age of every filled slot of a ring of m slots after step t = 1, 2, ...; the newest has age 0."""
    return [(t - 1 - slot) % m for slot in range(min(t, m))]


def mean_direction(deltas: Sequence[Vector], num_steps: int, eta: float, previous: Vector) -> Vector:
    """D12: -(1/S) sum Delta_i / (K eta_t), with the eta of the round that made the deltas; eta 0 keeps the last D."""
    if eta == 0.0:
        return previous
    return -mean_of(deltas) / (num_steps * eta)


# ------------------------------------------------------------------------------------------------ the SGD family


def fed_avg(
    world: World, *, lr: float, weight_decay: float, server_lr: float = 1.0, trace: Trace | None = None
) -> list[Vector]:
    """Spec 3.1: y -= eta_t (g + lambda y), K times; x += eta_g mean Delta. No server state besides theta."""
    theta, thetas = start_of(world), []
    for t, cohort in enumerate(world.cohorts):
        eta = lr * world.scales[t]
        deltas = []
        for i in cohort:
            y = theta.copy()
            for k in range(world.num_steps):
                g = world.gradient(t, i, k, 0, y)
                y = y - eta * (g + weight_decay * y)
            deltas.append(y - theta)
        theta = theta + server_lr * mean_of(deltas)
        thetas.append(theta.copy())
        if trace is not None:
            trace.append({"mean_delta": mean_of(deltas)})
    return thetas


def fed_prox(world: World, *, lr: float, mu: float, weight_decay: float, server_lr: float = 1.0) -> list[Vector]:
    """FedAvg with a proximal pull towards the model the round began with.

    Li et al. 2020; the spec does not describe it. The pull mu (y - x^t), the gradient of mu/2 ||y - x^t||^2, is added
    after the noise, beside the weight decay: y -= eta_t (g + mu (y - x^t) + lambda y).
    """
    theta, thetas = start_of(world), []
    for t, cohort in enumerate(world.cohorts):
        eta = lr * world.scales[t]
        deltas = []
        for i in cohort:
            y = theta.copy()
            for k in range(world.num_steps):
                g = world.gradient(t, i, k, 0, y)
                y = y - eta * (g + mu * (y - theta) + weight_decay * y)
            deltas.append(y - theta)
        theta = theta + server_lr * mean_of(deltas)
        thetas.append(theta.copy())
    return thetas


def scaffold(
    world: World,
    *,
    lr: float,
    weight_decay: float,
    control: str = "mean",
    warm_start: int = 0,
    server_lr: float = 1.0,
    trace: Trace | None = None,
) -> list[Vector]:
    """Spec 3.2: y -= eta_t (g - c_i + c + lambda y).

    control="mean": c_i+ is the mean of the round's private gradients.
    control="option2": c_i+ = c_i - c - Delta_i / (K eta_t), taken literally, so that with weight decay it contains
    lambda times the mean iterate; the local rate is the eta_t of this very round, and eta_t = 0 keeps c_i.
    The server adds the sum of the changes divided by N, the number of all clients. Clients start with c_i = 0.
    In the first `warm_start` rounds nobody moves: the clients take their K gradients at x^t, and c_i+ is their mean
    whatever the control, because there is no Delta_i to read it from. (Noble's code does this once for all clients.)
    """
    checked("control", control, ("mean", "option2"))
    theta, thetas = start_of(world), []
    c = np.zeros_like(theta)
    memory = {i: np.zeros_like(theta) for i in range(world.num_clients)}
    for t, cohort in enumerate(world.cohorts):
        eta = lr * world.scales[t]
        deltas, changes = [], []
        for i in cohort:
            y, total = theta.copy(), np.zeros_like(theta)
            for k in range(world.num_steps):
                g = world.gradient(t, i, k, 0, y)
                if t >= warm_start:
                    y = y - eta * (g - memory[i] + c + weight_decay * y)
                total = total + g
            if control == "mean" or t < warm_start:
                c_new = total / world.num_steps
            elif eta == 0.0:
                c_new = memory[i]
            else:
                c_new = memory[i] - c - (y - theta) / (world.num_steps * eta)
            deltas.append(y - theta)
            changes.append(c_new - memory[i])
            memory[i] = c_new
        theta = theta + server_lr * mean_of(deltas)
        c = c + sum(changes) / world.num_clients
        thetas.append(theta.copy())
        if trace is not None:
            trace.append({"c": c.copy(), "c_i": np.stack([memory[i] for i in range(world.num_clients)])})
    return thetas


def fed_avg_ls(
    world: World,
    *,
    lr: float,
    weight_decay: float,
    sigma_ls: float = 1.0,
    where: str = "server",
    tensor_sizes: Sequence[int] | None = None,
    server_lr: float = 1.0,
) -> list[Vector]:
    """Spec 3.3: Laplacian smoothing, tensor by tensor.

    where="server": local FedAvg, then x += eta_g LS(mean Delta); the decay inside Delta is smoothed with it.
    where="client_step": y -= eta_t (LS(g) + lambda y), the decay is not smoothed, and the server only averages.
    """
    checked("where", where, ("server", "client_step"))
    theta, thetas = start_of(world), []
    for t, cohort in enumerate(world.cohorts):
        eta = lr * world.scales[t]
        deltas = []
        for i in cohort:
            y = theta.copy()
            for k in range(world.num_steps):
                g = world.gradient(t, i, k, 0, y)
                if where == "client_step":
                    g = smooth_tensors(g, sigma_ls, tensor_sizes)
                y = y - eta * (g + weight_decay * y)
            deltas.append(y - theta)
        change = mean_of(deltas)
        if where == "server":
            change = smooth_tensors(change, sigma_ls, tensor_sizes)
        theta = theta + server_lr * change
        thetas.append(theta.copy())
    return thetas


def fed_sam(
    world: World, *, lr: float, weight_decay: float, rho: float, same_batch: bool = True, server_lr: float = 1.0
) -> list[Vector]:
    """Spec 3.4: climb by rho along the private gradient, then step with a second private gradient taken there.

    The norm is that of the whole vector, and the first gradient carries no weight decay. `same_batch` changes which
    records the world draws for query 1 (and what is charged), not one line of the arithmetic.
    """
    del same_batch
    theta, thetas = start_of(world), []
    for t, cohort in enumerate(world.cohorts):
        eta = lr * world.scales[t]
        deltas = []
        for i in cohort:
            y = theta.copy()
            for k in range(world.num_steps):
                g1 = world.gradient(t, i, k, 0, y)
                climbed = y + rho * g1 / (math.sqrt(float(np.sum(g1 * g1))) + 1e-12)
                g2 = world.gradient(t, i, k, 1, climbed)
                y = y - eta * (g2 + weight_decay * y)
            deltas.append(y - theta)
        theta = theta + server_lr * mean_of(deltas)
        thetas.append(theta.copy())
    return thetas


def fed_cm(
    world: World,
    *,
    lr: float,
    weight_decay: float,
    a: float = 0.1,
    server_lr: float = 1.0,
    trace: Trace | None = None,
) -> list[Vector]:
    """Spec 3.10: y -= eta_t (a g + (1 - a) D), D = -mean Delta / (K eta) of the last round, D^0 = 0.

    The weight decay of the SGD family is part of the gradient (g += lambda y after the noise), so it is multiplied by
    a as well; D, made of whole deltas, carries the rest of it. The mean Delta of D is not multiplied by eta_g.
    """
    theta, thetas = start_of(world), []
    direction = np.zeros_like(theta)
    for t, cohort in enumerate(world.cohorts):
        eta = lr * world.scales[t]
        deltas = []
        for i in cohort:
            y = theta.copy()
            for k in range(world.num_steps):
                g = world.gradient(t, i, k, 0, y) + weight_decay * y
                y = y - eta * (a * g + (1.0 - a) * direction)
            deltas.append(y - theta)
        direction = mean_direction(deltas, world.num_steps, eta, direction)
        theta = theta + server_lr * mean_of(deltas)
        thetas.append(theta.copy())
        if trace is not None:
            trace.append({"direction": direction.copy()})
    return thetas


def fed_opt(
    world: World,
    *,
    lr: float,
    weight_decay: float,
    server_lr: float,
    server: str = "adam",
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    initial_v: float | None = None,
    trace: Trace | None = None,
) -> list[Vector]:
    """Spec 3.7 (Reddi et al.): FedAvg clients, an adaptive server on d = mean Delta.

    M = b1 M + (1 - b1) d for all three servers, no bias correction; V_0 = tau^2 unless `initial_v` says otherwise;
    adam V = b2 V + (1 - b2) d^2; yogi V -= (1 - b2) d^2 sign(V - d^2); adagrad V += d^2;
    x += eta_g M / (sqrt(V) + tau).
    """
    checked("server", server, ("adam", "yogi", "adagrad"))
    theta, thetas = start_of(world), []
    m = np.zeros_like(theta)
    v = np.full_like(theta, tau**2 if initial_v is None else initial_v)
    for t, cohort in enumerate(world.cohorts):
        eta = lr * world.scales[t]
        deltas = []
        for i in cohort:
            y = theta.copy()
            for k in range(world.num_steps):
                g = world.gradient(t, i, k, 0, y)
                y = y - eta * (g + weight_decay * y)
            deltas.append(y - theta)
        d = mean_of(deltas)
        m = ema(m, d, beta1)
        if server == "adam":
            v = ema(v, d * d, beta2)
        elif server == "yogi":
            v = v - (1.0 - beta2) * d * d * np.sign(v - d * d)
        else:
            v = v + d * d
        theta = theta + server_lr * m / (np.sqrt(v) + tau)
        thetas.append(theta.copy())
        if trace is not None:
            trace.append({"m": m.copy(), "v": v.copy()})
    return thetas


# ------------------------------------------------------------------------------------------ adaptive local steps


def local_adamw(
    world: World,
    *,
    lr: float,
    weight_decay: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    server_lr: float = 1.0,
) -> list[Vector]:
    """Spec 3.5: AdamW from zero moments in every round, decoupled decay with the sign of D5."""
    theta, thetas = start_of(world), []
    for t, cohort in enumerate(world.cohorts):
        eta = lr * world.scales[t]
        deltas = []
        for i in cohort:
            y, m, v = theta.copy(), np.zeros_like(theta), np.zeros_like(theta)
            for k in range(world.num_steps):
                g = world.gradient(t, i, k, 0, y)
                m, v = ema(m, g, beta1), ema(v, g * g, beta2)
                m_hat, v_hat = m / (1.0 - beta1 ** (k + 1)), v / (1.0 - beta2 ** (k + 1))
                y = (1.0 - eta * weight_decay) * y - eta * m_hat / (np.sqrt(v_hat) + eps)
            deltas.append(y - theta)
        theta = theta + server_lr * mean_of(deltas)
        thetas.append(theta.copy())
    return thetas


def local_adam(
    world: World,
    *,
    lr: float,
    weight_decay: float = 0.001,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    server_lr: float = 1.0,
) -> list[Vector]:
    """Spec 3.10: Adam from zero moments in every round, coupled decay: g += lambda y (after the noise, before m, v)."""
    theta, thetas = start_of(world), []
    for t, cohort in enumerate(world.cohorts):
        eta = lr * world.scales[t]
        deltas = []
        for i in cohort:
            y, m, v = theta.copy(), np.zeros_like(theta), np.zeros_like(theta)
            for k in range(world.num_steps):
                g = world.gradient(t, i, k, 0, y) + weight_decay * y
                m, v = ema(m, g, beta1), ema(v, g * g, beta2)
                m_hat, v_hat = m / (1.0 - beta1 ** (k + 1)), v / (1.0 - beta2 ** (k + 1))
                y = y - eta * m_hat / (np.sqrt(v_hat) + eps)
            deltas.append(y - theta)
        theta = theta + server_lr * mean_of(deltas)
        thetas.append(theta.copy())
    return thetas


def fed_adamw(
    world: World,
    *,
    lr: float,
    blocks: Vector,
    aggregate: str = "v",
    weight_decay: float = 0.01,
    gamma: float = 0.5,
    align: str = "additive",
    bias_correction: bool = True,
    floor_abs: float = 0.0,
    floor_rel: float = 0.05,
    v_bias_correction: str = "tracked",
    v_mode: str = "coordinate",
    decay: str = "decoupled",
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    server_lr: float = 1.0,
    trace: Trace | None = None,
) -> list[Vector]:
    """Spec 3.6, with 2.3 (weight tracking), 2.4 (floor), D11, D12 (alignment), D14 (order) and D16 (blocks).

    blocks: the block of every coordinate, [d] integers; arange(d) for blocks of one coordinate ("none").
    aggregate: which moments the server averages and the clients start from. What is not aggregated starts at zero, with
        weight zero, every round. "v" and "mv" average the block means of v with its weight w and with f, the average
        of Phi; "m" and "mv" average m coordinate by coordinate, with a weight of its own.
    bias_correction: subtract phi_hat and apply the floor max(floor_abs, floor_rel phi_hat). Without it there is no
        floor at all, so that all three switches off is exactly LocalAdamW.
    v_bias_correction: "tracked" divides v by its weight and takes phi_hat = f / w; "local" is the printed algorithm:
        v / (1 - b2^k) with k the local step, minus the client's own Phi of this step. m is always weight-tracked.
    v_mode: "block" feeds the block mean of g^2 into v, so that v is one number per block all the time.
    align: "additive": step -eta (m_hat / den + gamma D); "convex": -eta ((1 - gamma) m_hat / den + gamma D), the
        decoupled decay as before (not scaled by 1 - gamma). D is zero in round 0.
    decay: "decoupled" shrinks y by (1 - eta lambda); "coupled" adds lambda y to the gradient before the moments.
    """
    checked("aggregate", aggregate, ("none", "v", "mv", "m"))
    checked("align", align, ("additive", "convex"))
    checked("v_bias_correction", v_bias_correction, ("tracked", "local"))
    checked("v_mode", v_mode, ("coordinate", "block"))
    checked("decay", decay, ("decoupled", "coupled"))
    blocks = np.asarray(blocks)
    theta, thetas = start_of(world), []
    keep_m, keep_v = aggregate in ("m", "mv"), aggregate in ("v", "mv")
    server_m, server_m_weight = np.zeros_like(theta), 0.0
    server_v, server_v_weight, server_f = np.zeros(int(blocks.max()) + 1), 0.0, 0.0
    direction = np.zeros_like(theta)
    for t, cohort in enumerate(world.cohorts):
        eta = lr * world.scales[t]
        deltas, ms, m_weights, vs, v_weights, fs = [], [], [], [], [], []
        for i in cohort:
            phi = world.noise_var(i)
            y = theta.copy()
            m, m_weight = server_m.copy(), server_m_weight
            v, v_weight, f = server_v[blocks], server_v_weight, server_f
            for k in range(world.num_steps):
                g = world.gradient(t, i, k, 0, y)
                if decay == "coupled":
                    g = g + weight_decay * y
                square = block_mean(g * g, blocks)[blocks] if v_mode == "block" else g * g
                m, m_weight = ema(m, g, beta1), ema(m_weight, 1.0, beta1)
                v, v_weight = ema(v, square, beta2), ema(v_weight, 1.0, beta2)
                f = ema(f, phi, beta2)
                if v_bias_correction == "tracked":
                    v_hat, phi_hat = v / v_weight, f / v_weight
                else:
                    v_hat, phi_hat = v / (1.0 - beta2 ** (k + 1)), phi
                if bias_correction:
                    v_hat = np.maximum(v_hat - phi_hat, max(floor_abs, floor_rel * phi_hat))
                adam = (m / m_weight) / (np.sqrt(v_hat) + eps)
                if decay == "decoupled":
                    y = (1.0 - eta * weight_decay) * y
                if align == "additive":
                    y = y - eta * (adam + gamma * direction)
                else:
                    y = y - eta * ((1.0 - gamma) * adam + gamma * direction)
            deltas.append(y - theta)
            ms.append(m)
            m_weights.append(m_weight)
            vs.append(block_mean(v, blocks))
            v_weights.append(v_weight)
            fs.append(f)
        if keep_m:
            server_m, server_m_weight = mean_of(ms), mean_of(m_weights)
        if keep_v:
            server_v, server_v_weight, server_f = mean_of(vs), mean_of(v_weights), mean_of(fs)
        direction = mean_direction(deltas, world.num_steps, eta, direction)
        theta = theta + server_lr * mean_of(deltas)
        thetas.append(theta.copy())
        if trace is not None:
            trace.append(
                {
                    "direction": direction.copy(),
                    "m": server_m.copy(),
                    "m_weight": server_m_weight,
                    "v": server_v.copy(),
                    "v_weight": server_v_weight,
                    "f": server_f,
                }
            )
    return thetas


def fafed(
    world: World,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    rho: float = 0.01,
    a: float = 0.1,
    variant: str = "adam_agg",
    second_moment_of: str = "release",
    denominator: str = "moving",
    server_lr: float = 1.0,
    trace: Trace | None = None,
) -> list[Vector]:
    """Spec 3.8. No weight decay.

    variant="adam_agg": clients start from the averaged raw m and v and go on with the averaged weights;
        y -= eta_t m_hat / (sqrt(v_hat) + rho), both moments divided by their weights. `a` is not used.
    variant="storm": one release h = g(y_k) - (1 - a) g(y_{k-1}) per step, m = (1 - a) m + h. In the first step of a
        round y_{k-1} is y_k, so h is a release of a g. On a constant gradient m grows as an average with factor
        1 - a does, so its weight is 1 - (1 - a)^n and m_hat = m / weight as above (beta1 is not used). v (factor
        beta2, the b of the paper) is weight-tracked, too, and made of h, or of m with second_moment_of="m".
        denominator="round" is the original's: sqrt(v_hat) of the broadcast v, fixed within the round, and only rho in
        round 0, where nothing has been averaged yet; "moving", the default, follows adam_agg.
    """
    checked("variant", variant, ("adam_agg", "storm"))
    checked("second_moment_of", second_moment_of, ("release", "m"))
    checked("denominator", denominator, ("moving", "round"))
    theta, thetas = start_of(world), []
    server_m, server_v = np.zeros_like(theta), np.zeros_like(theta)
    server_m_weight, server_v_weight = 0.0, 0.0
    m_factor = beta1 if variant == "adam_agg" else 1.0 - a
    for t, cohort in enumerate(world.cohorts):
        eta = lr * world.scales[t]
        deltas, ms, m_weights, vs, v_weights = [], [], [], [], []
        for i in cohort:
            y, before = theta.copy(), theta.copy()
            m, m_weight, v, v_weight = server_m, server_m_weight, server_v, server_v_weight
            for k in range(world.num_steps):
                if variant == "adam_agg":
                    release = world.gradient(t, i, k, 0, y)
                    m = ema(m, release, beta1)
                else:
                    if world.gradient_difference is None:
                        raise ValueError("variant 'storm' needs a world with a gradient_difference")
                    release = world.gradient_difference(t, i, k, y, 1.0 - a, before)
                    m = (1.0 - a) * m + release
                m_weight = ema(m_weight, 1.0, m_factor)
                squared = m if variant == "storm" and second_moment_of == "m" else release
                v, v_weight = ema(v, squared * squared, beta2), ema(v_weight, 1.0, beta2)
                if variant == "adam_agg" or denominator == "moving":
                    den = np.sqrt(v / v_weight) + rho
                elif server_v_weight == 0.0:
                    den = np.full_like(theta, rho)
                else:
                    den = np.sqrt(server_v / server_v_weight) + rho
                before = y
                y = y - eta * (m / m_weight) / den
            deltas.append(y - theta)
            ms.append(m)
            m_weights.append(m_weight)
            vs.append(v)
            v_weights.append(v_weight)
        server_m, server_m_weight = mean_of(ms), mean_of(m_weights)
        server_v, server_v_weight = mean_of(vs), mean_of(v_weights)
        theta = theta + server_lr * mean_of(deltas)
        thetas.append(theta.copy())
        if trace is not None:
            trace.append({"m": server_m, "m_weight": server_m_weight, "v": server_v, "v_weight": server_v_weight})
    return thetas


def fed_lada(
    world: World,
    *,
    lr: float,
    a: float = 0.1,
    amsgrad: bool = True,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    server_lr: float = 1.0,
    trace: Trace | None = None,
) -> list[Vector]:
    """Spec 3.9: m from zero, v from the server (eps^2 at first), no bias correction, no weight decay.

    y -= eta_t (a m / sqrt(v_max) + (1 - a) g_a), v_max = max(v_max, v) from v_max = v = vbar; the server averages
    v_max. amsgrad=False puts the plain v wherever v_max stands. There is no epsilon beside the root: eps only sets the
    starting value. g_a is D of D12: zero at first, from the deltas before eta_g.
    """
    theta, thetas = start_of(world), []
    server_v = np.full_like(theta, eps**2)
    direction = np.zeros_like(theta)
    for t, cohort in enumerate(world.cohorts):
        eta = lr * world.scales[t]
        deltas, vs = [], []
        for i in cohort:
            y, m, v, v_used = theta.copy(), np.zeros_like(theta), server_v, server_v
            for k in range(world.num_steps):
                g = world.gradient(t, i, k, 0, y)
                m, v = ema(m, g, beta1), ema(v, g * g, beta2)
                v_used = np.maximum(v_used, v) if amsgrad else v
                y = y - eta * (a * m / np.sqrt(v_used) + (1.0 - a) * direction)
            deltas.append(y - theta)
            vs.append(v_used)
        direction = mean_direction(deltas, world.num_steps, eta, direction)
        server_v = mean_of(vs)
        theta = theta + server_lr * mean_of(deltas)
        thetas.append(theta.copy())
        if trace is not None:
            trace.append({"direction": direction.copy(), "v": server_v.copy()})
    return thetas


# ------------------------------------------------------------------- one step a round, moments kept by the server


def mean_gradient(world: World, t: int, theta: Vector) -> Vector:
    """What the server of a centralised algorithm gets: the mean of the cohort's private gradients of one step."""
    if world.num_steps != 1:
        raise ValueError(f"num_steps is {world.num_steps}, but a centralised algorithm takes 1 step a round")
    return mean_of([world.gradient(t, i, 0, 0, theta) for i in world.cohorts[t]])


def mean_noise_var(world: World, t: int) -> float:
    """The noise variance of that mean: independent noises of variance Phi_i leave sum Phi_i / S^2."""
    cohort = world.cohorts[t]
    return sum(world.noise_var(i) for i in cohort) / len(cohort) ** 2


def sgd(world: World, *, lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> list[Vector]:
    """Spec 3.11, DP-SGD: theta -= eta_t buf, buf = momentum buf + g (+ lambda theta), as torch.optim.SGD does."""
    theta, thetas = start_of(world), []
    buffer = np.zeros_like(theta)
    for t in range(len(world.cohorts)):
        g = mean_gradient(world, t, theta) + weight_decay * theta
        buffer = momentum * buffer + g
        theta = theta - lr * world.scales[t] * buffer
        thetas.append(theta.copy())
    return thetas


def adam(
    world: World, *, lr: float, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0
) -> list[Vector]:
    """Spec 3.11, DP-Adam: theta -= eta_t m_hat / (sqrt(v_hat) + eps); the decay is coupled and 0 by default."""
    theta, thetas = start_of(world), []
    m, v = np.zeros_like(theta), np.zeros_like(theta)
    for t in range(len(world.cohorts)):
        g = mean_gradient(world, t, theta) + weight_decay * theta
        m, v = ema(m, g, beta1), ema(v, g * g, beta2)
        m_hat, v_hat = m / (1.0 - beta1 ** (t + 1)), v / (1.0 - beta2 ** (t + 1))
        theta = theta - lr * world.scales[t] * m_hat / (np.sqrt(v_hat) + eps)
        thetas.append(theta.copy())
    return thetas


def adamw(
    world: World,
    *,
    lr: float,
    weight_decay: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    eps_inside: bool = False,
) -> list[Vector]:
    """Spec 3.11, DP-AdamW: theta -= eta_t (m_hat / (sqrt(v_hat) + eps) + lambda theta).

    eps_inside=True is Algorithm 1 as printed: m_hat / sqrt(v_hat + eps).
    """
    theta, thetas = start_of(world), []
    m, v = np.zeros_like(theta), np.zeros_like(theta)
    for t in range(len(world.cohorts)):
        g = mean_gradient(world, t, theta)
        m, v = ema(m, g, beta1), ema(v, g * g, beta2)
        m_hat, v_hat = m / (1.0 - beta1 ** (t + 1)), v / (1.0 - beta2 ** (t + 1))
        den = np.sqrt(v_hat + eps) if eps_inside else np.sqrt(v_hat) + eps
        theta = theta - lr * world.scales[t] * (m_hat / den + weight_decay * theta)
        thetas.append(theta.copy())
    return thetas


def adamw_bc(
    world: World,
    *,
    lr: float,
    weight_decay: float,
    floor: float,
    gamma_decay: float = 1.0,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 0.0,
    trace: Trace | None = None,
) -> list[Vector]:
    """Spec 3.11, DP-AdamW-BC: theta -= eta_t (m_hat / (sqrt(max(v_hat - Phi, gamma')) + eps) + lambda theta).

    Phi is the noise variance of the mean over the cohort (sum Phi_i / S^2; with one client its own Phi). It is
    averaged with the weights of v, phi_hat = f / w (D10): for a constant Phi this is Phi, and where it changes from
    round to round it is what v_hat really contains. gamma' is `floor` in the first step and is multiplied by
    gamma_decay after every step. eps = 0 is the paper's form.
    """
    theta, thetas = start_of(world), []
    m, v = np.zeros_like(theta), np.zeros_like(theta)
    v_weight, f = 0.0, 0.0
    for t in range(len(world.cohorts)):
        g = mean_gradient(world, t, theta)
        m, v = ema(m, g, beta1), ema(v, g * g, beta2)
        v_weight, f = ema(v_weight, 1.0, beta2), ema(f, mean_noise_var(world, t), beta2)
        m_hat, v_hat = m / (1.0 - beta1 ** (t + 1)), v / (1.0 - beta2 ** (t + 1))
        den = np.sqrt(np.maximum(v_hat - f / v_weight, floor * gamma_decay**t)) + eps
        theta = theta - lr * world.scales[t] * (m_hat / den + weight_decay * theta)
        thetas.append(theta.copy())
        if trace is not None:
            trace.append({"v_hat": v_hat, "phi_hat": f / v_weight})
    return thetas


def adam_bc(
    world: World,
    *,
    lr: float,
    floor: float,
    gamma_decay: float = 1.0,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 0.0,
    weight_decay: float = 0.0,
    trace: Trace | None = None,
) -> list[Vector]:
    """Spec 3.11, DP-AdamBC: theta -= eta_t m_hat / (sqrt(max(v_hat - Phi, gamma')) + eps).

    Phi and gamma' as in `adamw_bc`; the decay is coupled, as in `adam`, and 0 by default; eps = 0 is the paper's form.
    """
    theta, thetas = start_of(world), []
    m, v = np.zeros_like(theta), np.zeros_like(theta)
    v_weight, f = 0.0, 0.0
    for t in range(len(world.cohorts)):
        g = mean_gradient(world, t, theta) + weight_decay * theta
        m, v = ema(m, g, beta1), ema(v, g * g, beta2)
        v_weight, f = ema(v_weight, 1.0, beta2), ema(f, mean_noise_var(world, t), beta2)
        m_hat, v_hat = m / (1.0 - beta1 ** (t + 1)), v / (1.0 - beta2 ** (t + 1))
        den = np.sqrt(np.maximum(v_hat - f / v_weight, floor * gamma_decay**t)) + eps
        theta = theta - lr * world.scales[t] * m_hat / den
        thetas.append(theta.copy())
        if trace is not None:
            trace.append({"v_hat": v_hat, "phi_hat": f / v_weight})
    return thetas


def micro_adam(
    world: World,
    *,
    lr: float,
    density: float = 0.01,
    window: int = 10,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    ef_bits: int | None = 4,
    quant_block: int = 64,
    bias_correction: str = "paper",
    tensor_sizes: Sequence[int] | None = None,
    trace: Trace | None = None,
) -> list[Vector]:
    """Spec 3.12, tensor by tensor; k = ceil(density d) for a tensor of d entries.

    Among equal magnitudes the lower index is taken. Stored values, block minima and maxima stay in float64 (the
    released kernels round them to bf16), quantisation blocks begin at the first entry of a tensor and the last one may
    be shorter. bias_correction="paper" uses 1 - beta^t, "window" 1 - beta^min(t, window). The decay shrinks every
    coordinate, whether it is in the window or not.
    """
    checked("bias_correction", bias_correction, ("paper", "window"))
    theta, thetas = start_of(world), []
    pieces = pieces_of(len(theta), tensor_sizes)
    residual = np.zeros_like(theta)  # Q^-1(e)
    rings: list[list[tuple[Vector, Vector]]] = [[] for _ in pieces]  # per tensor and slot: (indices, values)
    for t in range(1, len(world.cohorts) + 1):
        eta = lr * world.scales[t - 1]
        g = mean_gradient(world, t - 1, theta)
        exponent = t if bias_correction == "paper" else min(t, window)
        after = theta.copy()
        for piece, ring in zip(pieces, rings, strict=True):
            accumulated = g[piece] + residual[piece]
            size = len(accumulated)
            chosen = np.argsort(-np.abs(accumulated), kind="stable")[: math.ceil(density * size)]
            entry = (chosen, accumulated[chosen])
            if len(ring) < window:
                ring.append(entry)
            else:
                ring[(t - 1) % window] = entry
            accumulated[chosen] = 0.0
            residual[piece] = accumulated if ef_bits is None else quantise_and_back(accumulated, ef_bits, quant_block)
            m, v = np.zeros(size), np.zeros(size)
            for age, (indices, values) in zip(ring_ages(t, window), ring, strict=True):
                m[indices] += beta1**age * values
                v[indices] += beta2**age * values**2
            m_hat = (1.0 - beta1) / (1.0 - beta1**exponent) * m
            v_hat = (1.0 - beta2) / (1.0 - beta2**exponent) * v
            after[piece] = (1.0 - eta * weight_decay) * theta[piece] - eta * m_hat / (eps + np.sqrt(v_hat))
        theta = after
        thetas.append(theta.copy())
        if trace is not None:
            trace.append({"residual": residual.copy(), "ring": [list(ring) for ring in rings]})
    return thetas
