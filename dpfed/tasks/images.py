"""Pictures from the layouts in which people have them, as uint8 columns; and the layer that turns them into numbers.

Pixels stay bytes on the disk, in memory and on the device; `Normalise`, the first layer of a vision model, makes floats of
one record at a time, inside the gradient, the same way in training and in the test.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from dpfed.columns import as_records
from dpfed.errors import InputError
from dpfed.flat import Records
from dpfed.tasks.folders import GZ, DataSet, data_root, files_of, inner_name, plain_or_gz, read_bytes, read_text, subfolders
from dpfed.tasks.pickled import array, read_pickled
from dpfed.tasks.pictures import SUFFIXES, Picture, read_image_folder, read_pictures

CIFAR_SOURCE = "https://www.cs.toronto.edu/~kriz/cifar.html"
CIFAR10 = DataSet(
    "CIFAR-10",
    ("cifar-10-batches-py",),
    (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"),
    f"{CIFAR_SOURCE} (cifar-10-python.tar.gz)",
)
CIFAR100 = DataSet("CIFAR-100", ("cifar-100-python",), ("train", "test"), f"{CIFAR_SOURCE} (cifar-100-python.tar.gz)")
FASHION_MNIST = DataSet(
    "Fashion-MNIST",
    ("FashionMNIST/raw", "fashion-mnist", "FashionMNIST", "dataset-fashion-mnist"),
    tuple(f"{part}-{kind}-ubyte{GZ}" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")),
    "https://github.com/zalandoresearch/fashion-mnist",
)
TINY_IMAGENET = DataSet(
    "Tiny-ImageNet",
    ("tiny-imagenet-200",),
    ("wnids.txt", "train", "val/images", "val/val_annotations.txt"),
    "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
)
MOST_BYTES, MOST_IDX_BYTES = 2**28, 2**26  # of a file of CIFAR, of Fashion-MNIST

MEAN_STD: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "fashion_mnist": ((0.2860,), (0.3530,)),
}
"""Public constants of the pixels, in units of 255: computed from the training parts long ago, and not by a run."""


class Normalise(nn.Module):
    """uint8 pictures ``[n, C, h, w]`` -> floats ``(x / 255 - mean) / std``, resized to ``size`` where one is given.

    >>> Normalise((0.5,), (0.5,))(torch.tensor([[[[0, 255]]]], dtype=torch.uint8))
    tensor([[[[-1.,  1.]]]])
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], size: int | None = None) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        x = (x / 255 - cast(Tensor, self.mean)) / cast(Tensor, self.std)
        return x if self.size is None else interpolate(x, size=(self.size, self.size), mode="bilinear", antialias=False)


def read_cifar(
    name: Literal["cifar10", "cifar100"], root: str | Path | None = None, *, labels: Literal["fine", "coarse"] = "fine"
) -> tuple[Records, Records]:
    """CIFAR as (train, test): ``x`` uint8 ``[n, 3, 32, 32]``, ``y`` int64.

    From the python pickles as they are handed out (read as data, see `dpfed.tasks.pickled`); or from a folder ``cifar10`` or
    ``cifar100`` under the root that holds ``train`` and ``test`` with a folder per class, or a saved Hugging Face data set.
    """
    if name not in ("cifar10", "cifar100") or labels not in ("fine", "coarse"):
        raise InputError(f"name: must be 'cifar10' or 'cifar100', and labels 'fine' or 'coarse'; got {name!r}, {labels!r}.")
    for folder in (data_root(root) / name, data_root(root) / name.replace("cifar", "cifar-")):
        if folder.is_dir() and labels == "fine":
            return read_splits(folder)
    data_set, kind, num_classes = (
        (CIFAR10, "labels", 10) if name == "cifar10" else (CIFAR100, f"{labels}_labels", 100 if labels == "fine" else 20)
    )
    folder = data_set.find(root)
    parts = [_cifar_file(folder / file, kind, num_classes) for file in data_set.files]
    train = {column: torch.cat([part[column] for part in parts[:-1]]) for column in ("x", "y")}
    return train, parts[-1]


def _cifar_file(path: Path, kind: str, num_classes: int) -> Records:
    found = read_pickled(read_bytes(path, MOST_BYTES), path)
    if missing := sorted({"data", kind} - set(found)):
        raise InputError(f"{path}: has no {' and no '.join(missing)}; it holds {sorted(found)}. Get the original file again.")
    try:
        pixels = array(found["data"])
    except (ValueError, TypeError, IndexError) as error:
        raise InputError(f"{path}: its 'data' cannot be read ({error}). Get the original file again.") from error
    if pixels.ndim != 2 or pixels.shape[1] != 3072 or not len(pixels):
        raise InputError(f"{path}: its 'data' has shape {pixels.shape}, not [pictures, 3072]. Get the original file again.")
    labels = found[kind]
    if not isinstance(labels, list) or len(cast(list[Any], labels)) != len(pixels):
        raise InputError(f"{path}: '{kind}' is not a list of {len(pixels)} labels, one a picture. Get the original file again.")
    return {"x": torch.from_numpy(pixels.copy()).view(-1, 3, 32, 32), "y": _labels(path, kind, labels, num_classes)}


def _labels(path: Path, kind: str, labels: list[Any], num_classes: int) -> Tensor:
    strange = [(row, label) for row, label in enumerate(labels) if type(label) is not int or not 0 <= label < num_classes]
    if strange:
        row, label = strange[0]
        raise InputError(
            f"{path}: '{kind}' {row} is {label!r}, not one of 0 to {num_classes - 1}. Get the original file again."
        )
    return torch.tensor(labels, dtype=torch.long)


def read_fashion_mnist(root: str | Path | None = None) -> tuple[Records, Records]:
    """Fashion-MNIST as (train, test), from its four idx files, plain or gzipped: ``x`` uint8 ``[n, 1, 28, 28]``."""
    folder = FASHION_MNIST.find(root)
    columns = [_idx(plain_or_gz(folder, file), (28, 28) if "images" in file else ()) for file in FASHION_MNIST.files]
    parts: list[Records] = []
    for images, labels, file in zip(columns[::2], columns[1::2], FASHION_MNIST.files[1::2], strict=True):
        if len(images) != len(labels):
            raise InputError(f"{folder}: {file} has {len(labels)} labels for {len(images)} pictures. Get both files again.")
        parts.append({"x": images.unsqueeze(1), "y": _labels(folder / file, "label", labels.tolist(), 10)})
    return parts[0], parts[1]


def _idx(path: Path, shape: tuple[int, ...]) -> Tensor:
    """An idx file of bytes: two zeros, 8 for uint8, the number of dimensions, each as a big-endian int32, then the content."""
    data, num_dimensions = read_bytes(path, MOST_IDX_BYTES), 1 + len(shape)
    header = 4 + 4 * num_dimensions
    if data[:4] != bytes((0, 0, 8, num_dimensions)) or len(data) < header:
        raise InputError(
            f"{path}: begins with {data[:4].hex(' ')}, not with {bytes((0, 0, 8, num_dimensions)).hex(' ')} as an idx file of "
            f"{'images' if shape else 'labels'} does. Get the file again."
        )
    count, *sides = struct.unpack(f">{num_dimensions}I", data[4:header])
    if tuple(sides) != shape or count < 1 or len(data) - header != count * math.prod(shape):
        raise InputError(
            f"{path}: declares {count} entries of shape {tuple(sides)}, expected at least one of {shape}, and has "
            f"{len(data) - header} bytes of them. Get the file again."
        )
    return torch.from_numpy(np.frombuffer(data, np.uint8, offset=header).reshape(count, *shape).copy())


def read_tiny_imagenet(root: str | Path | None = None, *, store: str | Path | None = None) -> tuple[Records, Records]:
    """Tiny-ImageNet-200 as (train, test): ``x`` uint8 ``[n, 3, 64, 64]``. The official validation part is the test part: the
    labels of the official test part were never published. ``store`` as in `read_image_folder`."""
    folder = TINY_IMAGENET.find(root)
    names = folder / "wnids.txt"
    classes = [inner_name(line.strip(), f"{names}, line {n}") for n, line in enumerate(read_text(names).splitlines(), 1)]
    if not classes or len(set(classes)) != len(classes):
        raise InputError(f"{names}: must name every class once, one a line. Get the file again.")
    number = {name: c for c, name in enumerate(classes)}
    train: list[Picture] = []
    for name in classes:
        found = files_of(folder / "train" / name / "images", SUFFIXES)
        if not found:
            raise InputError(f"{folder / 'train' / name / 'images'}: holds no pictures. Get the data set again.")
        train += [(path, number[name]) for path in found]
    test: list[Picture] = []
    notes = folder / "val" / "val_annotations.txt"
    for n, line in enumerate(read_text(notes).splitlines(), 1):
        name, *rest = line.split("\t")
        if not rest or rest[0] not in number:
            raise InputError(f"{notes}, line {n}: is not 'picture<tab>class<tab>...' with a class of wnids.txt. Get it again.")
        test.append((folder / "val" / "images" / inner_name(name, f"{notes}, line {n}"), number[rest[0]]))
    return read_pictures(train, folder, 64, 3, store), read_pictures(test, folder, 64, 3, store)


def read_splits(folder: Path, *, size: int | None = None) -> tuple[Records, Records]:
    """(train, test) from ``train`` and ``test`` with a folder per class, or from a Hugging Face data set saved to disk."""
    if (folder / "dataset_dict.json").exists():
        return read_disk(folder)
    parts = [folder / name for name in ("train", "test")]
    classes = [[path.name for path in subfolders(part)] for part in parts]
    if classes[0] != classes[1]:
        differing = sorted(set(classes[0]) ^ set(classes[1]))
        raise InputError(
            f"{folder}: train and test differ in the classes {', '.join(differing[:5])}. Give both the same folders."
        )
    train, test = (read_image_folder(part, size=size) for part in parts)
    return train, test


def read_disk(folder: str | Path) -> tuple[Records, Records]:
    """(train, test) from a ``DatasetDict`` that ``save_to_disk`` wrote. Its part ``test`` or, without one, ``validation``."""
    try:
        from datasets import Dataset, load_from_disk
    except ImportError as error:
        raise InputError(f"{folder}: reading it needs the package datasets. pip install 'dpfed[models]'") from error
    try:
        found = load_from_disk(str(folder))
    except Exception as error:  # whatever a damaged file makes Arrow raise
        raise InputError(f"{folder}: is no data set that save_to_disk wrote ({error}). Save it again.") from error
    if isinstance(found, Dataset) or "train" not in found or not {"test", "validation"} & set(found):
        parts = "one part only" if isinstance(found, Dataset) else f"the parts {', '.join(map(str, found))}"
        raise InputError(f"{folder}: holds {parts}; needed are train and test (or validation). Save a DatasetDict of both.")
    return as_records("train", found["train"]), as_records("test", found["test" if "test" in found else "validation"])
