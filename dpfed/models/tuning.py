"""What of a model is trained: LoRA through PEFT, everything, the head, or the last layers.

Each takes a module with a model of transformers somewhere inside (say behind a `Normalise`) and gives it back, changed.
`FlatModel` trains what then has ``requires_grad``. How the result is handed on: `dpfed.adapters`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from dpfed.data import generator
from dpfed.errors import InputError
from dpfed.fast_lora import with_lora_products
from dpfed.models.convolutional import seeded
from dpfed.models.transformer import HEADS, library

ATTENTION = ("attention", "self_attn", "attn")


def lora(
    module: nn.Module,
    *,
    rank: int = 16,
    alpha: float = 32,
    dropout: float = 0.0,
    targets: Literal["attention", "all-linear"] | Sequence[str] = "attention",
    freeze_a: bool = False,
    seed: int = 0,
) -> nn.Module:
    """Freeze all but the head, and train beside the layers products B A of low rank (Hu et al. 2021, arXiv 2106.09685).

    Args:
        rank: columns of B, rows of A.
        alpha: the product counts alpha / rank.
        dropout: of what goes into A.
        targets: the linear layers of the attention (query, key, value, output), all linear layers, or the ends of their names.
        freeze_a: train only B; every client has the same A (FFA-LoRA, Sun et al. 2024, arXiv 2403.12313). `dpfed.Alternating`
            trains A and B by turns.
        seed: keys A. B begins at 0.
    """
    if rank < 1 or not alpha > 0 or not 0 <= dropout < 1:
        raise InputError(
            f"lora: rank must be at least 1, alpha above 0, dropout at least 0 and below 1; got {rank}, {alpha}, {dropout}."
        )
    peft, (name, model) = library("peft"), inside(module)
    chosen = _targets(model, targets) if isinstance(targets, str) else list(targets)
    heads = [head for head in HEADS if hasattr(model, head)]
    setting = {
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": chosen,
        "modules_to_save": heads or None,
    }
    try:
        with seeded(seed, "lora"), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of transformers, about how PEFT asks it something
            adapted = peft.get_peft_model(model, peft.LoraConfig(**setting))
    except ValueError as error:
        raise InputError(f"targets: PEFT finds no layers for {chosen} ({error}). Name ends of linear layers' names.") from error
    for place, tensor in adapted.named_parameters():
        if "lora_A" in place:
            nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=_own(seed, place))
            tensor.requires_grad_(not freeze_a)
    with_lora_products(adapted)
    if not name:
        return adapted
    module.set_submodule(name, adapted)
    return module


def train_all(module: nn.Module) -> nn.Module:
    """Full fine-tuning."""
    return module.requires_grad_(True)


def train_head(module: nn.Module) -> nn.Module:
    """Only the head: a linear model on fixed features, or for RoBERTa a small network."""
    module.requires_grad_(False)
    model = inside(module)[1]
    heads = [getattr(model, head) for head in HEADS if hasattr(model, head)]
    if not heads:
        raise InputError(f"model: {type(model).__name__} has no head ({', '.join(HEADS)}). Train its last layers, or LoRA.")
    for head in heads:
        head.requires_grad_(True)
    return module


def train_last(module: nn.Module, num_layers: int = 1) -> nn.Module:
    """The last layers and what comes behind them: norm, pooler, head. With one layer of BERT, as in the DP-AdamW paper."""
    module.requires_grad_(False)
    model = inside(module)[1]
    layers = _layers(model)
    if not 1 <= num_layers <= len(layers):
        raise InputError(f"num_layers: the model has {len(layers)} layers, got {num_layers}.")
    first = next(iter(dict(model.get_submodule(layers[-num_layers]).named_parameters(prefix=layers[-num_layers]))))
    names = [name for name, _ in model.named_parameters()]  # in the order of the forward pass
    for name in names[names.index(first) :]:
        model.get_parameter(name).requires_grad_(True)
    return module


def inside(module: nn.Module) -> tuple[str, nn.Module]:
    """The outermost model of transformers in the module, and its name there."""
    if any(isinstance(part, library("peft").PeftModel) for part in module.modules()):
        raise InputError("model: it has an adapter already. Load it anew, or merge the adapter first.")
    kind = library("transformers").PreTrainedModel
    found = [(name, part) for name, part in module.named_modules() if isinstance(part, kind)]
    if not found:
        raise InputError(
            f"model: there is no model of transformers in {type(module).__name__}. Choose by requires_grad_ what is trained."
        )
    return found[0]


def _layers(model: nn.Module) -> list[str]:
    """The names of the transformer's layers, from the first to the last: members of a list, with an attention each."""
    lists = [f"{name}.{n}" for name, part in model.named_modules() if isinstance(part, nn.ModuleList) for n in range(len(part))]
    return [name for name in lists if any(hasattr(model.get_submodule(name), own) for own in ATTENTION)]


def _targets(model: nn.Module, targets: str) -> list[str]:
    linear = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    if targets == "all-linear":
        return [name for name in linear if not {*HEADS, "lm_head"} & set(name.split("."))]
    if targets != "attention":
        raise InputError(f"targets: must be 'attention', 'all-linear' or a list of ends of names, got {targets!r}.")
    inside = tuple(f"{layer}.{own}." for layer in _layers(model) for own in ATTENTION)
    return [name for name in linear if name.startswith(inside)]


def _own(seed: int, place: str) -> torch.Generator:
    return generator(seed, f"lora_A {place}")
