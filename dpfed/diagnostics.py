"""What the papers plot of a run beside its accuracy: how far clients drift apart, and what noise does to Adam's moments.

With ``Recipe.diagnostics`` every row has these under ``diagnostics``:

    drift                sum over coordinates of the variance, over the clients, of what they upload
    cosine               between the uploads of two clients: the mean product of a pair over the mean squared length
    noise_std            sqrt(Phi) = sigma C / B, of the gradients that the moments are made of
    v_variance           mean over coordinates of the variance of vhat over the clients
    sqrt_v, m            the share of coordinates with sqrt(vhat), |mhat| between ``EDGES``
    clamped              the share of coordinates that lie on the floor under the root, and the same for every block
    snr                  mean of vhat / Phi - 1 for every block: the signal's part of the second moment over the noise's
    effective_lr         eta over the geometric mean of the root that Adam divides by

A block is one of ``layout.blocks("paper")``. What an algorithm does not have is missing: moments are recognised by the names
of their fields (m, v, phi), in the state of a client at the end of its round, or else in the server's.

Privacy: all of it is computed from states and uploads, which are functions of gradients that are clipped, noised and charged
already; so it is post-processing, and costs nothing against a server that sees the uploads. Under distributed noise the server
sees none, and where clients are the unit it may tell of none: there only its own moments are described. Rows are for those who
may know who took part: where the clients' sizes differ, noise_std tells of it. The run itself keeps its bits: an upload has
more leaves, none is changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpfed.algorithm import Algorithm, Gradient, Release, Round, Tree, leaves
from dpfed.errors import InputError
from dpfed.flat import Layout
from dpfed.pieces import Moment, debiased
from dpfed.report import COLOURS, METADATA, MUTED, STYLE, Method, Run, methods

NUM_BINS = 160
EDGES = [10 ** (number / 20 - 7) for number in range(NUM_BINS + 1)]
"""Twenty bins to a power of ten, from 1e-7 to 10; what lies outside counts in the first or the last."""


class Statistics(NamedTuple):
    """Of the moments of one client, or of the server; averaged over the clients like any upload. Empty where there are none."""

    v: Tensor
    v_length2: Tensor
    sqrt_v: Tensor
    m: Tensor
    clamped: Tensor
    log_root: Tensor


class Seen(NamedTuple):
    """An upload as it is, beside what describes it."""

    upload: Any
    length2: Tensor
    moments: Statistics


@dataclass(frozen=True)
class Observed:
    """An algorithm whose clients describe what they upload; everything else is its own."""

    algorithm: Any

    def server_init(self, theta: Tensor, layout: Layout) -> Tree:
        return self.algorithm.server_init(theta, layout)

    def client_init(self, s: Tree, memory: Tree, t: Round) -> Tree:
        return self.algorithm.client_init(s, memory, t)

    def local_step(self, x: Tree, s: Tree, grad: Gradient, t: Round, k: int) -> Tree:
        return self.algorithm.local_step(x, s, grad, t, k)

    def upload(self, x: Tree, s: Tree, memory: Tree, t: Round) -> tuple[Seen, Tree]:
        upload, memory = self.algorithm.upload(x, s, memory, t)
        return Seen(upload, _length2(_direction(upload)), statistics(self.algorithm, x, t)), memory

    def server_step(self, s: Tree, u: Seen, t: Round) -> Tree:
        return self.algorithm.server_step(s, u.upload, t)


def statistics(algorithm: Algorithm, state: Tree, t: Round) -> Statistics:
    """Of a state with moments of full length: a client's, the matrix of a cohort's, or the server's."""
    m, v, phi = (getattr(state, name, None) for name in ("m", "v", "phi"))
    like = state.theta if hasattr(state, "theta") else next(vector for _, vector in leaves(state))
    none = like.new_zeros(0, dtype=torch.float64)
    if m is None or v is None or _mean(v).shape[-1] != t.layout.num_coordinates:
        return Statistics(none, none, none, none, none, none)
    vhat, root2, clamped = _mean(v), _mean(v), none
    if phi is not None and getattr(algorithm, "bias_correction", True):
        noise = phi.mean if isinstance(phi, Moment) else phi / v.weight
        floor = getattr(algorithm, "floor_abs", 0.0) + getattr(algorithm, "floor", 0.0) * (
            getattr(algorithm, "floor_decay", 1.0) ** t.index
        )
        relative = getattr(algorithm, "floor_rel", 0.0)
        root2 = debiased(vhat, noise, floor_abs=floor, floor_rel=relative)
        on_floor = (vhat - noise <= (relative * noise).clamp(min=floor)) & (noise > 0)
        clamped = t.layout.blocks("paper").mean(on_floor.double())
    eps = sum(getattr(algorithm, name, 0.0) for name in ("eps", "rho", "tau"))
    log_root = (root2.double().sqrt() + eps).log().mean(-1, keepdim=True)
    return Statistics(vhat.double(), _length2(vhat), histogram(vhat.sqrt()), histogram(_mean(m)), clamped, log_root)


def histogram(x: Tensor) -> Tensor:
    """``[..., d] -> [..., NUM_BINS]``: the share of coordinates whose magnitude lies between ``EDGES``.

    >>> shares = histogram(torch.tensor([0.0, 2e-5, -2e-5, 1e9]))
    >>> [(f"{EDGES[bin]:.1e}", float(shares[bin])) for bin in shares.nonzero().flatten().tolist()]
    [('1.0e-07', 0.25), ('2.0e-05', 0.5), ('8.9e+00', 0.25)]
    """
    bins = (20 * (x.double().abs().log10() + 7)).floor().clamp(0, NUM_BINS - 1).long()
    shares = torch.full_like(bins, 1 / max(1, x.shape[-1]), dtype=torch.float64)
    return shares.new_zeros((*x.shape[:-1], NUM_BINS)).scatter_add(-1, bins, shares)


def columns(algorithm: Any, s: Tree, upload: Tree, t: Round, noise_var: float) -> dict[str, Any]:
    """The diagnostics of a round: ``s`` after its step, the mean of what was uploaded, and Phi of a client's gradient."""
    found: dict[str, Any] = {}
    own, moments = upload, statistics(algorithm, s, t)
    if isinstance(upload, Seen):
        own, length2 = upload.upload, float(upload.length2)
        of_mean = float(_length2(_direction(own)))
        found["drift"] = max(0.0, length2 - of_mean)
        if t.shrinkage < 1 and length2 > 0:
            found["cosine"] = (of_mean / length2 - t.shrinkage) / (1 - t.shrinkage)
        if len(upload.moments.v):
            moments = upload.moments
            found["v_variance"] = max(0.0, float(moments.v_length2) - float(_length2(moments.v))) / len(moments.v)
    if isinstance(own, Release):
        noise_var *= t.shrinkage
    found["noise_std"] = math.sqrt(noise_var)
    if len(moments.v):
        found |= {"sqrt_v": moments.sqrt_v.tolist(), "m": moments.m.tolist()}
        found["effective_lr"] = algorithm.lr * t.scale * math.exp(-float(moments.log_root))
    blocks = t.layout.blocks("paper")
    if len(moments.clamped):
        found["clamped"] = float(blocks.spread(moments.clamped).mean())
        found["clamped_by_block"] = moments.clamped.tolist()
    if len(moments.v) and noise_var > 0 and (isinstance(upload, Seen) or isinstance(own, Release)):
        found["snr_by_block"] = (blocks.mean(moments.v) / noise_var - 1).tolist()
    return {name: _short(value) for name, value in found.items()}


def own_upload(upload: Tree) -> Tree:
    """The algorithm's upload, without what describes it."""
    return upload.upload if isinstance(upload, Seen) else upload


def _direction(upload: Tree) -> Tensor:
    """An upload begins with it: Delta_i, or the private gradient."""
    return next(vector for _, vector in leaves(upload))


def _mean(moment: Moment | Tensor) -> Tensor:
    return moment.mean if isinstance(moment, Moment) else moment


def _length2(x: Tensor) -> Tensor:
    return x.double().square().sum(-1, keepdim=True)


def _short(value: Any) -> Any:
    return [_short(one) for one in value] if isinstance(value, list) else float(f"{value:.6g}")


# The figure.


def diagnostics_figure(records: Iterable[Run], path: str | Path) -> Path:
    """Variance of v, drift and clamped share over the rounds, and the last histogram of sqrt(v) with the noise in it."""
    path = Path(path)
    found = [method for method in methods(records) if _rows(method.runs[0])]
    if not found:
        raise InputError("diagnostics: no row of these runs has any. Run again with --diagnostics (Recipe.diagnostics=True).")
    with import_module("matplotlib").rc_context(STYLE | {"axes.grid.axis": "both"}):
        page = import_module("matplotlib.figure").Figure(figsize=(11, 7.5), layout="constrained")
        (variance, drift), (shape, clamped) = page.subplots(2, 2)
        for axes in (variance, drift, clamped):
            axes.xaxis.set_major_locator(import_module("matplotlib.ticker").MaxNLocator(6, integer=True))
        for number, method in enumerate(found):
            colour = COLOURS[number % len(COLOURS)]
            for axes, key, factor in ((variance, "v_variance", 1), (drift, "drift", 1), (clamped, "clamped", 100)):
                axes.plot(*_curve(method, key, factor), color=colour)
            drift.plot([], [], color=colour, label=method.name)  # a name for each, also for those without moments
            last = _rows(method.runs[0])[-1]["diagnostics"]
            if "sqrt_v" in last:
                shape.stairs([100 * share for share in last["sqrt_v"]], EDGES, color=colour)
                if last["noise_std"]:
                    shape.axvline(last["noise_std"], color=MUTED, linestyle=":", linewidth=1.2)
        variance.set(title="Variance of v over the clients", xlabel="rounds", yscale="log")
        drift.set(title="Drift of the clients", xlabel="rounds", yscale="log")
        shape.set(title="Histogram of √v, and √Φ of the noise (dotted)", xlabel="√v", ylabel="% of coordinates", xscale="log")
        clamped.set(title="Coordinates on the floor", xlabel="rounds", ylabel="%", ylim=(-3, 103))
        heights = [bin for method in found for bin, share in enumerate(_last(method)) if share > 1e-4]
        if heights:
            shape.set_xlim(EDGES[max(0, min(heights) - 3)], EDGES[min(NUM_BINS, max(heights) + 4)])
        for axes in (variance, drift, clamped):
            if not any(len(line.get_xdata()) for line in axes.lines):
                axes.set(yscale="linear", xticks=(), yticks=(), xlabel="none of these methods has it", ylabel="")
            axes.tick_params(which="minor", left=False)
        page.legend(loc="outside lower center", ncols=min(4, len(found)), frameon=False)
        try:
            page.savefig(path, metadata=METADATA[path.suffix])
        except (OSError, KeyError) as error:
            raise InputError(f"{path}: cannot be written ({error}). Name a .png, .svg or .pdf elsewhere.") from error
    return path


def _rows(run: Run) -> list[Any]:
    return [row for row in run.rows if "diagnostics" in row]


def _last(method: Method) -> Sequence[float]:
    return _rows(method.runs[0])[-1]["diagnostics"].get("sqrt_v", [])


def _curve(method: Method, key: str, factor: float) -> tuple[list[int], list[float]]:
    """The mean over the seeds, at every round that has the column."""
    values: dict[int, list[float]] = {}
    for run in method.runs:
        for row in _rows(run):
            if key in row["diagnostics"]:
                values.setdefault(row["t"] + 1, []).append(factor * row["diagnostics"][key])
    return list(values), [sum(column) / len(column) for column in values.values()]
