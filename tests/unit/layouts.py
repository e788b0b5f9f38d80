"""Small data sets on the disk, byte for byte in the layouts in which the real ones are handed out."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
from PIL import Image


def _text(value: str) -> bytes:
    """SHORT_BINSTRING: a text of Python 2."""
    return b"U" + bytes([len(value)]) + value.encode("latin-1")


def _number(value: int) -> bytes:
    return b"K" + bytes([value]) if 0 <= value < 256 else b"J" + struct.pack("<i", value)


def _list(values: list[bytes]) -> bytes:
    return b"](" + b"".join(values) + b"e"


def py2_array(
    pixels: np.ndarray, dtype: str = "u1", content: bytes | None = None, shape: tuple[int, ...] | None = None
) -> bytes:
    raw = pixels.tobytes() if content is None else content
    sides = b"(" + b"".join(map(_number, shape or pixels.shape)) + b"t"
    return (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x10cnumpy\nndarray\nq\x11K\x00\x85" + _text("b") + b"\x87R"
        b"(K\x01" + sides + b"cnumpy\ndtype\nq\x12" + _text(dtype) + b"K\x00K\x01\x87R"
        b"(K\x03" + _text("|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89T" + struct.pack("<I", len(raw)) + raw + b"tb"
    )


def py2_pickle(entries: dict[str, bytes]) -> bytes:
    """What cPickle of Python 2 wrote for CIFAR: protocol 2, byte strings, memo marks."""
    body = b"".join(_text(name) + b"r" + struct.pack("<I", 500 + i) + value for i, (name, value) in enumerate(entries.items()))
    return b"\x80\x02}q\x01(" + body + b"u."


def cifar_pixels(num: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (num, 3072), dtype=np.uint8)


def cifar_batch(num: int, seed: int, kinds: dict[str, int]) -> bytes:
    names = _list([_text(f"picture_{i}.png") + b"r" + struct.pack("<I", 1000 + i) for i in range(num)])
    labels = {kind: _list([_number((seed + i) % classes) for i in range(num)]) for kind, classes in kinds.items()}
    return py2_pickle(
        {"batch_label": _text("some batch"), **labels, "data": py2_array(cifar_pixels(num, seed)), "filenames": names}
    )


def cifar10(root: Path, num: int = 6) -> Path:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for seed, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        (folder / name).write_bytes(cifar_batch(num, seed, {"labels": 10}))
    return folder


def cifar100(root: Path, num: int = 6) -> Path:
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    for seed, name in enumerate(("train", "test")):
        (folder / name).write_bytes(cifar_batch(num, seed, {"fine_labels": 100, "coarse_labels": 20}))
    return folder


def idx(values: np.ndarray) -> bytes:
    return bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def fashion_mnist(root: Path, num: int = 7, *, zipped: bool = True) -> Path:
    folder = root / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for part in ("train", "t10k"):
        for kind, values in (
            ("images-idx3", random.integers(0, 256, (num, 28, 28), dtype=np.uint8)),
            ("labels-idx1", (np.arange(num) % 10).astype(np.uint8)),
        ):
            file = folder / f"{part}-{kind}-ubyte"
            if zipped:
                file.with_name(file.name + ".gz").write_bytes(gzip.compress(idx(values)))
            else:
                file.write_bytes(idx(values))
    return folder


def picture(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (64, 64)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def tiny_imagenet(root: Path, classes: tuple[str, ...] = ("n01", "n02")) -> Path:
    folder = root / "tiny-imagenet-200"
    lines: list[str] = []
    for c, name in enumerate(classes):
        for i in range(3):
            picture(folder / "train" / name / "images" / f"{name}_{i}.JPEG", (50 * c, 10 * i, 0))
        (folder / "train" / name / f"{name}_boxes.txt").write_text("")
        picture(folder / "val" / "images" / f"val_{c}.JPEG", (50 * c, 0, 200))
        lines.insert(0, f"val_{c}.JPEG\t{name}\t0\t32\t44\t62")
    (folder / "wnids.txt").write_text("\n".join(classes) + "\n")
    (folder / "words.txt").write_text("n01\tfish\nn02\tbird\n")
    (folder / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    return folder


def class_folders(root: Path, classes: tuple[str, ...] = ("cat", "dog"), size: tuple[int, int] = (8, 6)) -> Path:
    for c, name in enumerate(classes):
        for i in range(2):
            picture(root / name / f"{i}.png", (10 * c, i, 0), size)
    return root


GLUE_LINES = {
    "cola": "gj04\t1\t\tThe sailors rode the breeze.\ncj99\t0\t*\tAs you eat the most, you want the least.\n",
    "mrpc": '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t1\t2\tHe said " no .\tHe said no .\n0\t3\t4\tA .\tB .\n',
    "qnli": "index\tquestion\tsentence\tlabel\n0\tWho?\tShe.\tentailment\n1\tWhen?\tHere.\tnot_entailment\n",
    "qqp": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t2\t3\tWhy?\tWhy so?\t1\n4\t5\t6\tHow?\tWho?\t0\n",
    "rte": "index\tsentence1\tsentence2\tlabel\n0\tHe sleeps.\tHe wakes.\tnot_entailment\n1\tHe ran.\tHe moved.\tentailment\n",
    "sst2": "sentence\tlabel\nit 's a charming journey \t1\nunflinchingly bleak \t0\n",
    "mnli": (
        "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse"
        "\tsentence1\tsentence2\tlabel1\tgold_label\n"
        "0\t1\t1n\tfiction\t(\t(\t(\t(\tHe ran.\tHe sat.\tneutral\tcontradiction\n"
        "1\t1\t1e\tfiction\t(\t(\t(\t(\tHe ran.\tHe moved.\tneutral\tentailment\n"
        "2\t1\t1c\tfiction\t(\t(\t(\t(\tHe ran.\tHe ran home.\tneutral\tneutral\n"
    ),
}
GLUE_FOLDERS = {"cola": "CoLA", "mnli": "MNLI", "mrpc": "MRPC", "qnli": "QNLI", "qqp": "QQP", "rte": "RTE", "sst2": "SST-2"}


def glue(root: Path, task: str) -> Path:
    folder = root / "glue" / GLUE_FOLDERS[task]
    folder.mkdir(parents=True)
    for part in ("train", "dev_matched" if task == "mnli" else "dev"):
        (folder / f"{part}.tsv").write_bytes(GLUE_LINES[task].encode())
    return folder
