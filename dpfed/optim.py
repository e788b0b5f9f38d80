"""The centralised algorithms as ordinary ``torch.optim`` optimizers, for people who bring their own loop.

>>> model = torch.nn.Linear(4, 3)
>>> sigma, clip, batch_size = 1.0, 1.0, 256
>>> optimizer = AdamBC(model.parameters(), lr=1e-3, noise_var=(sigma * clip / batch_size) ** 2)

They make nothing private: the gradients they are given already are, by Opacus (they work inside its DPOptimizer) or by a loop
of your own. ``noise_var`` is the variance of the noise in a coordinate of ``p.grad``; where it changes, set the group's
``noise_var`` before the step. The other settings are the fields of the algorithm of the same name, ``betas`` for ``beta1`` and
``beta2``. SGD is torch's own.

The Adams work in place and on all tensors at once (``torch._foreach``), as torch's do; MicroAdam is the algorithm itself, one
step for all tensors, whose states are views of what that step leaves.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# torch's operations on lists of tensors begin with an underscore, though they are documented.

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable
from functools import cache
from itertools import accumulate, chain
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from dpfed import algorithms
from dpfed.algorithm import Release, Round, leaves, like
from dpfed.errors import InputError
from dpfed.flat import Layout, Part
from dpfed.pieces import constant, ema, has_kernels, num_kept


class _Centralised(Optimizer):
    """What they share: settings that are an algorithm's fields, and the loop over groups."""

    algorithm: ClassVar[type[Any]]
    further: ClassVar[dict[str, float]] = {}

    def __init__(self, params: ParamsT, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), **settings: Any) -> None:
        known = {field.name: field.default for field in dataclasses.fields(self.algorithm)} | self.further
        del known["beta1"], known["beta2"]
        unknown = sorted(settings.keys() - known.keys())
        if unknown:
            raise InputError(f"{unknown[0]}: {type(self).__name__} has no such setting. It has: betas, {', '.join(known)}.")
        super().__init__(params, known | settings | {"lr": lr, "betas": betas})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        group = self.defaults | param_group
        for name in ("lr", "eps", "weight_decay", "noise_var", "floor"):
            if not group.get(name, 0) >= 0:
                raise InputError(f"{name}: must not be negative, got {group[name]}. Give 0 or more.")
        if not all(0 <= beta < 1 for beta in group["betas"]):
            raise InputError(f"betas: both must be at least 0 and below 1, got {group['betas']}. (0.9, 0.999) is usual.")
        self._algorithm(group).server_init(torch.empty(1, device="meta"), _ONE)  # which checks its own settings
        super().add_param_group(param_group)

    def _algorithm(self, group: dict[str, Any]) -> Any:
        beta1, beta2 = group["betas"]
        return self.algorithm(
            beta1=beta1, beta2=beta2, **{name: group[name] for name in _settings(self.algorithm) & group.keys()}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in cast(list[Tensor], group["params"]) if p.grad is not None and p.numel()]
            gradients = [cast(Tensor, p.grad) for p in params]
            for gradient in gradients:
                _refuse_unusual(gradient)
            if params:
                self._update(group, params, gradients)
        return loss

    @abstractmethod
    def _update(self, group: dict[str, Any], params: list[Tensor], gradients: list[Tensor]) -> None:
        """The parameters of one group, in place."""


_ONE = Layout((Part("", (1,), "weights"),))


@cache
def _settings(algorithm: type[Any]) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(algorithm))


def _refuse_unusual(gradient: Tensor) -> None:
    if gradient.layout is not torch.strided or not gradient.is_floating_point():
        raise InputError(
            f"gradient: must be dense and real, got {gradient.layout} of {gradient.dtype}. Where an embedding made it, give it "
            "sparse=False: with noise in every coordinate no private gradient is sparse."
        )


class _Adams(_Centralised):
    """The four of them, in place. A tensor's weights and noise variance are plain numbers, so nothing waits for a GPU."""

    decoupled: ClassVar[bool] = False

    def _update(self, group: dict[str, Any], params: list[Tensor], gradients: list[Tensor]) -> None:
        (beta1, beta2), lr, decay, eps = group["betas"], float(group["lr"]), group["weight_decay"], group["eps"]
        states = [self.state[p] for p in params]
        for p, state in zip(params, states, strict=True):
            if not state:
                state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p), m_weight=0.0, v_weight=0.0, phi=0.0)
            state["m_weight"], state["v_weight"] = ema(state["m_weight"], 1.0, beta1), ema(state["v_weight"], 1.0, beta2)
            state["phi"] = ema(state["phi"], group.get("noise_var", 0.0), beta2)
        m, v = [state["m"] for state in states], [state["v"] for state in states]
        if self.decoupled:
            torch._foreach_mul_(params, 1 - lr * decay)
        elif decay:
            gradients = list(torch._foreach_add(gradients, params, alpha=decay))
        torch._foreach_lerp_(m, gradients, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, gradients, gradients, 1 - beta2)
        root = torch._foreach_div(v, [state["v_weight"] for state in states])
        if "floor" in group:
            torch._foreach_sub_(root, [state["phi"] / state["v_weight"] for state in states])
            torch._foreach_clamp_min_(root, [group["floor"] * group["floor_decay"] ** state["step"] for state in states])
        if group.get("eps_inside"):
            torch._foreach_add_(root, eps)
        torch._foreach_sqrt_(root)
        if not group.get("eps_inside"):
            torch._foreach_add_(root, eps)
        torch._foreach_addcdiv_(params, m, root, [-lr / state["m_weight"] for state in states])
        for state in states:
            state["step"] += 1


class Adam(_Adams):
    """Adam. Settings: eps, weight_decay (coupled)."""

    algorithm = algorithms.Adam


class AdamBC(_Adams):
    """Adam without the noise in its second moment. Settings: noise_var, floor, floor_decay, eps, weight_decay (coupled)."""

    algorithm, further = algorithms.AdamBC, {"noise_var": 0.0}


class AdamW(_Adams):
    """AdamW. Settings: eps, eps_inside, weight_decay (decoupled)."""

    algorithm, decoupled = algorithms.AdamW, True


class AdamWBC(_Adams):
    """AdamW without the noise in its second moment. Settings: noise_var, floor, floor_decay, eps, weight_decay (decoupled)."""

    algorithm, further, decoupled = algorithms.AdamWBC, {"noise_var": 0.0}, True


class MicroAdam(_Centralised):
    """MicroAdam: about 1.2 bytes a coordinate. Settings: density, window, ef_bits, quant_block, bias_correction, eps,
    weight_decay (decoupled)."""

    algorithm = algorithms.MicroAdam

    def _update(self, group: dict[str, Any], params: list[Tensor], gradients: list[Tensor]) -> None:
        """Tensors that have taken as many steps are one vector: so there is one step of the algorithm for all of them.

        On a CPU such a vector ends after a million coordinates, as what does not fit into its caches takes twice as long.
        """
        alike: dict[Any, list[tuple[Tensor, Tensor]]] = {}
        ends = accumulate(p.numel() for p in params)
        for p, gradient, end in zip(params, gradients, ends, strict=True):
            chunk, in_order = end // 2**20 if p.is_cpu else 0, p.is_contiguous()
            key = (self.state[p].get("step", 0), p.dtype, p.device, in_order, chunk)
            alike.setdefault(key, []).append((p, gradient.contiguous() if in_order else gradient))
        for (step, *_), pairs in alike.items():
            own, given = [list(side) for side in zip(*pairs, strict=True)]
            algorithm = self._algorithm(group)
            in_place = has_kernels(algorithm.ef_bits, algorithm.quant_block, own + given)
            (self._update_in_place if in_place else self._update_alike)(algorithm, step, own, given)

    def _update_alike(self, algorithm: Any, step: int, params: list[Tensor], gradients: list[Tensor]) -> None:
        sizes, states = [p.numel() for p in params], [self.state[p] for p in params]
        layout = _layout(sizes)
        theta, gradient = (torch.cat([tensor.reshape(-1) for tensor in tensors]) for tensors in (params, gradients))
        kept = [num_kept(size, algorithm.density) for size in sizes]
        starts = constant(tuple(accumulate([0, *sizes[:-1]])), theta.device)  # of each tensor, which counts its places from 0
        shift = (
            starts.repeat_interleave(constant(tuple(kept), theta.device), output_size=sum(kept)).int().repeat(algorithm.window)
        )
        s = _together(algorithm, states, theta, layout)
        s = s._replace(ring=s.ring._replace(places=s.ring.places + shift)) if step else s
        s = algorithm.server_step(s, Release(gradient, theta.new_zeros(1)), Round(step, 1.0, 1, layout))
        pairs = zip(s.theta.split(sizes), params, strict=True)
        torch._foreach_copy_(params, [piece.view_as(p) for piece, p in pairs])
        _hand_out(algorithm, states, s._replace(ring=s.ring._replace(places=s.ring.places - shift)), sizes)
        for state in states:
            state["step"] = step + 1

    def _update_in_place(self, algorithm: Any, step: int, params: list[Tensor], gradients: list[Tensor]) -> None:
        """On a GPU. What the tensors remember stays together from step to step, and their states are views of it."""
        from dpfed.kernels import Spread, micro_adam_  # here, as it needs triton

        sizes, states = [p.numel() for p in params], [self.state[p] for p in params]
        remembered, own = cast(dict[Any, Any], self.__dict__.setdefault("_remembered", {})), tuple(map(id, params))
        s, views = remembered.get(own, (None, []))
        if s is None or any(state.get("ring.places") is not view for state, view in zip(states, views, strict=True)):
            s = _together(algorithm, states, torch.empty(sum(sizes), device=params[0].device), _layout(sizes))._replace(
                theta=None
            )
            _hand_out(algorithm, states, s, sizes)
            for other in [other for other in remembered if not set(own).isdisjoint(other)]:
                del remembered[other]
            remembered[own] = s, [state["ring.places"] for state in states]
        if algorithm.weight_decay:
            torch._foreach_mul_(params, 1 - algorithm.lr * algorithm.weight_decay)
        x, g = Spread.of(params), Spread.of(gradients)
        micro_adam_(algorithm, step, float(algorithm.lr), x, g, s.error, s.error, s.ring, sizes, whole=False)
        for p, state in zip(params, states, strict=True):
            torch.autograd.graph.increment_version(p)  # so that a backward pass through what is no more is refused
            state["step"] = step + 1

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch turns all that it loads into the parameters' type; codes, places and bfloat16 have to stay what they are."""
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, p in zip(saved, own, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                self.state[p][name] = value.to(p.device, copy=True) if isinstance(value, Tensor) else value


def _layout(sizes: list[int]) -> Layout:
    return Layout(tuple(Part("", (size,), "weights") for size in sizes))


def _together(algorithm: Any, states: list[dict[str, Any]], theta: Tensor, layout: Layout) -> Any:
    """What the tensors remember as the state of the algorithm, but for their places, each of which counts from its tensor."""
    if not states[0]:
        return algorithm.server_init(theta, layout)
    own = {name: torch.cat([state[name] for state in states], dim=1).flatten() for name in states[0] if name != "step"}
    return like(_structure(algorithm.ef_bits), own | {"theta": theta})


def _hand_out(algorithm: Any, states: list[dict[str, Any]], s: Any, sizes: list[int]) -> None:
    """The inverse: every tensor gets its own, as views."""
    num_blocks = [math.ceil(size / algorithm.quant_block) for size in sizes]
    kept = [num_kept(size, algorithm.density) for size in sizes]
    widths = {"error": sizes, "error.low": num_blocks, "error.high": num_blocks, "ring.places": kept, "ring.values": kept}
    widths["error.codes"] = [algorithm.quant_block // 2 * number for number in num_blocks]
    for name, vector in leaves(s._replace(theta=None)):
        matrix = vector.view(algorithm.window if name.startswith("ring.") else 1, -1)
        for state, piece in zip(states, matrix.split(widths[name], dim=1), strict=True):
            state[name] = piece


@cache
def _structure(ef_bits: Any) -> Any:
    return algorithms.MicroAdam(ef_bits=ef_bits).server_init(torch.empty(1, device="meta"), _ONE)
