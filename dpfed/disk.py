"""Files that are there whole or not at all, and tensors in them that are what was written.

A file of tensors is safetensors, with a checksum over the tensors and over what is said about them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from dpfed.errors import InputError

PART = ".part"


@contextmanager
def disk(path: Path, remedy: str) -> Generator[None]:
    """Turn what the disk refuses into words."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}). {remedy}") from error


def replace_file(path: Path, data: bytes, durable: bool = True) -> None:
    """Write a file whole or not at all; if durable, also when the power fails."""
    part = path.with_name(path.name + PART)
    try:
        with part.open("wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}). Put the file back as it was.") from error


def tensors_as_bytes(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> bytes:
    """Tensors on any device, and what is to be known about them."""
    plain = {key: value.detach().cpu().clone(memory_format=torch.contiguous_format) for key, value in tensors.items()}
    about = {**about, "checksum": _checksum(plain, about)}
    return save(plain, {"dpfed": json.dumps(about)})  # one text: safetensors shuffles several


def read_tensors(path: Path, remedy: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What is known about the tensors, and the tensors, on the CPU; only if they are what was written."""
    try:
        data = read(path)
        tensors, about = load(data), about_tensors(data)
        intact = about.pop("checksum", None) == _checksum(tensors, about)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}). {remedy}") from error
    if not intact:
        raise InputError(f"{path}: the checksum does not match: damaged, or not from dpfed. {remedy}")
    return about, tensors


def about_tensors(data: bytes) -> dict[str, Any]:
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return dict(json.loads(header.get("__metadata__", {}).get("dpfed", "{}")))


def _checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> str:
    digest = hashlib.blake2b(json.dumps(metadata, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
