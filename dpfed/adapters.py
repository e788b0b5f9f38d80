"""What a run trained, in the form in which others take it: an adapter of PEFT, or a whole model of transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from dpfed.errors import InputError
from dpfed.models.transformer import library
from dpfed.models.tuning import inside
from dpfed.record import RunRecord


def save_adapter(record: RunRecord, module: nn.Module, folder: str | Path) -> None:
    """What a run trained, as a folder that ``PeftModel.from_pretrained`` loads. ``module``: the one that the run was given."""
    trained = _trained(record, module)
    found = [part for part in trained.modules() if isinstance(part, library("peft").PeftModel)]
    if not found:
        raise InputError("model: it has no adapter. Save the whole of it with save_merged().")
    cast(Any, found[0]).save_pretrained(str(folder), save_embedding_layers=False)


def save_merged(record: RunRecord, module: nn.Module, folder: str | Path) -> None:
    """The same, whole: adapters added to the weights, as a folder that ``from_pretrained`` of transformers loads."""
    trained, peft = _trained(record, module), library("peft")
    found = [part for part in trained.modules() if isinstance(part, peft.PeftModel)]
    model: Any = cast(Any, found[0]).merge_and_unload() if found else inside(trained)[1]
    model.save_pretrained(str(folder))


def _trained(record: RunRecord, module: nn.Module) -> nn.Module:
    """A copy of the module with the weights that the run ended with."""
    tensors, trained = record.load_model(), copy.deepcopy(module).cpu()
    own = {name: p for name, p in trained.named_parameters() if p.requires_grad}
    shapes = [{name: tuple(tensor.shape) for name, tensor in named.items()} for named in (own, tensors)]
    if shapes[0] != shapes[1]:
        differing = sorted(name for name in {**own, **tensors} if shapes[0].get(name) != shapes[1].get(name))
        raise InputError(
            f"model: what it trains is not what the run in {record.path} trained; they differ in {', '.join(differing[:3])}. "
            "Give the module that the run was given, with the same LoRA."
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
    return trained
