"""Files that are damaged, wrong or hostile: each gets one clear paragraph with its name and a remedy; nothing of it is run."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import re
import signal
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dpfed import InputError
from dpfed.columns import as_records
from dpfed.tasks.images import read_cifar, read_disk, read_fashion_mnist, read_tiny_imagenet
from dpfed.tasks.pictures import read_image_folder
from dpfed.tasks.tables import read_numbers, read_table
from dpfed.tasks.text import Texts, load_tokenizer, read_glue, tokenise
from tests.unit import layouts
from tests.unit.layouts import cifar_batch, cifar_pixels, py2_array, py2_pickle

REMEDY = re.compile(r"\b(Get|Put|Correct|Save|Name|Replace|Delete|Give|Quote|Bring|Set|Write|Remove|Use|Take|Leave)\b[^.]*")
SECONDS = 10
CODE_EVENTS = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class")

Case = tuple[Callable[[Path], Any], tuple[str, ...]]
CASES: dict[str, Case] = {}
Damage = bytes | Callable[[bytes], bytes] | Callable[[Path], None]


def case(name: str, read: Callable[[Path], Any], *words: str) -> None:
    assert name not in CASES, name
    CASES[name] = (read, words)


def damaged(file: Path, damage: Any) -> None:
    """New content for a file, or what becomes of its old content, or a change of the file itself."""
    if isinstance(damage, bytes):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(damage)
        return
    changed = damage(file.read_bytes()) if damage.__annotations__.get("content") else damage(file)
    if changed is not None:
        file.write_bytes(changed)


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def all_but_one(content: bytes) -> bytes:
    return content[:-1]


def with_more(content: bytes) -> bytes:
    return content + b"more"


for change in (half, all_but_one, with_more):
    change.__annotations__["content"] = True


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def dangling(file: Path) -> None:
    file.unlink()
    file.symlink_to("nowhere")


def enormous(file: Path) -> None:
    with file.open("wb") as sparse:
        sparse.truncate(2**40)


def gone(file: Path) -> None:
    file.unlink()


EVERYWHERE: dict[str, Any] = {"half": half, "empty": b"", "a folder": folder, "a pipe": pipe, "a dangling link": dangling}


# CIFAR: what is not the original file.


def cifar(file: str, damage: Any, name: str = "cifar100") -> Callable[[Path], Any]:
    def read(root: Path) -> Any:
        where = (layouts.cifar100 if name == "cifar100" else layouts.cifar10)(root)
        damaged(where / file, damage)
        return read_cifar(name, root)  # type: ignore[arg-type]

    return read


def batch(**changes: bytes | None) -> bytes:
    """A batch of three pictures with other entries."""
    numbers = layouts._list([layouts._number(i) for i in range(3)])
    entries = {"fine_labels": numbers, "coarse_labels": numbers, "data": py2_array(cifar_pixels(3, 0)), **changes}
    return py2_pickle({name: entry for name, entry in entries.items() if entry is not None})


def labels(*values: int) -> bytes:
    return layouts._list([layouts._number(value) for value in values])


TEXT = b"U\x03abc"
RUN = b"cposix\nsystem\nU\x17touch code_was_executed.\x85R"
RUN = RUN.replace(b"U\x17", b"U" + bytes([len(b"touch code_was_executed.")]))
for what, damage in (EVERYWHERE | {"all but one byte": all_but_one, "1 TiB": enormous}).items():
    case(f"cifar-100 {what}", cifar("train", damage), "train")
case("cifar-10 without a batch", cifar("data_batch_3", gone, "cifar10"), "data_batch_3", "DPFED_DATA")
case("cifar-10 half a test batch", cifar("test_batch", half, "cifar10"), "test_batch")
case("cifar-10 label 10", cifar("data_batch_5", cifar_batch(12, 0, {"labels": 11}), "cifar10"), "data_batch_5", "10")


class Executed:
    def __reduce__(self) -> Any:
        return os.system, ("touch code_was_executed",)


PICKLES: dict[str, tuple[bytes, str]] = {
    "a text": (b"These are not the pictures.", "pickle"),
    "a gzip": (gzip.compress(batch()), "pickle"),
    "with more behind its end": (batch() + b"more", "end"),
    "without an end": (batch()[:-1], "pickle"),
    "code in protocol 0": (pickle.dumps(Executed(), 0), "not allowed"),
    "code in protocol 2": (pickle.dumps(Executed(), 2), "system"),
    "code in protocol 4": (pickle.dumps(Executed(), 4), "not allowed"),
    "code as an entry": (batch(data=RUN), "posix system"),
    "code before the data": (b"\x80\x02" + RUN + b"0" + batch()[2:], "posix system"),
    "eval": (batch(data=b"c__builtin__\neval\nU\x011\x85R"), "eval"),
    "numpy's own loader": (batch(data=b"cnumpy\nload\nU\x01x\x85R"), "numpy load"),
    "numpy's runner": (batch(data=b"cnumpy.testing._private.utils\nrunstring\nU\x01x}\x86R"), "runstring"),
    "an instance (INST)": (batch(data=b"(U\x01xios\nsystem\n"), "INST"),
    "an object (OBJ)": (batch(data=b"(cnumpy\ndtype\nU\x01xo"), "OBJ"),
    "a new object": (batch(data=b"cnumpy\nndarray\n)\x81"), "NEWOBJ"),
    "an extension": (batch(data=b"\x82\x01"), "EXT1"),
    "a persistent name": (batch(data=b"Pfile\n"), "PERSID"),
    "a name on the stack": (batch(data=b"U\x02osU\x06system\x93"), "STACK_GLOBAL"),
    "a call of a text": (batch(data=TEXT + b")R"), "expected"),
    "a state for a text": (batch(data=TEXT + b"}b"), "expected"),
    "protocol 5": (pickle.dumps({"data": 1, "fine_labels": [1]}, 5), "not allowed"),
    "a list": (b"\x80\x02].", "list"),
    "nothing": (b"\x80\x02.", "pickle"),
    "less on the stack than taken": (b"\x80\x02\x86.", "more than there is"),
    "an unknown memo": (b"\x80\x02h\x4d.", "pickle"),
    "a mark that is missing": (b"\x80\x02]e.", "pickle"),
    "a mark too many": (b"\x80\x02(}.", "end"),
    "an odd dict": (b"\x80\x02}(U\x01au.", "pickle"),
    "a key that is no text": (b"\x80\x02}K\x01K\x02s.", "bytes were expected"),
    "a length beyond the file": (b"\x80\x02T\xff\xff\xff\x7f.", "pickle"),
    "a negative length": (b"\x80\x02T\xff\xff\xff\xff.", "pickle"),
    "a number of a million digits": (b"\x80\x02L" + b"9" * 10**6 + b"L\n.", "pickle"),
    "millions of instructions": (b"\x80\x02" + b"N" * 3 * 10**6 + b".", "far too many"),
    "no data": (batch(data=None), "no data"),
    "no labels": (batch(fine_labels=None), "no fine_labels"),
    "labels of the other CIFAR": (py2_pickle({"labels": labels(1), "data": py2_array(cifar_pixels(1, 0))}), "no fine_labels"),
    "too few labels": (batch(fine_labels=labels(1, 2)), "3 labels"),
    "too many labels": (batch(fine_labels=labels(1, 2, 3, 4)), "3 labels"),
    "a label too large": (batch(fine_labels=labels(1, 2, 100)), "100"),
    "a negative label": (batch(fine_labels=labels(-1, 2, 3)), "-1"),
    "a label that is a text": (batch(fine_labels=layouts._list([TEXT] * 3)), "abc"),
    "a label that is True": (batch(fine_labels=layouts._list([b"\x88"] * 3)), "True"),
    "labels in a dict": (batch(fine_labels=b"}"), "not a list"),
    "data that is a text": (batch(data=TEXT), "no NumPy array"),
    "data that is a dtype": (batch(data=b"cnumpy\ndtype\nU\x02u1\x85R"), "no NumPy array"),
    "a narrow picture": (batch(data=py2_array(cifar_pixels(3, 0)[:, :3071].copy())), "3071"),
    "no pictures": (batch(data=py2_array(cifar_pixels(0, 0)), fine_labels=b"]"), "(0, 3072)"),
    "floats": (batch(data=py2_array(cifar_pixels(3, 0), dtype="f8")), "uint8"),
    "objects": (batch(data=py2_array(cifar_pixels(3, 0), dtype="O8")), "uint8"),
    "a shape beyond its bytes": (batch(data=py2_array(cifar_pixels(3, 0), shape=(2**31 - 1, 3072))), "2147483647"),
    "a negative shape": (batch(data=py2_array(cifar_pixels(3, 0), shape=(-3, -3072))), "-3"),
    "columns first": (batch(data=py2_array(cifar_pixels(3, 0)).replace(b"\x89T", b"\x88T")), "C order"),
}
for what, (content, said) in PICKLES.items():
    case(f"cifar-100 {what}", cifar("train", content), "train", said)


# Fashion-MNIST: idx files.


def fashion(file: str, damage: Any, *, zipped: bool = False) -> Callable[[Path], Any]:
    def read(root: Path) -> Any:
        damaged(layouts.fashion_mnist(root, zipped=zipped) / file, damage)
        return read_fashion_mnist(root)

    return read


def header(*numbers: int, kind: int = 8) -> bytes:
    return bytes((0, 0, kind, len(numbers))) + struct.pack(f">{len(numbers)}I", *numbers)


IMAGES, LABELS = "train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
for what, damage in (EVERYWHERE | {"more": with_more, "1 TiB": enormous}).items():
    case(f"idx {what}", fashion(IMAGES, damage), IMAGES)
case("idx labels for images", fashion(IMAGES, layouts.idx(np.zeros(7, np.uint8))), IMAGES, "00 00 08 03")
case("idx images for labels", fashion(LABELS, layouts.idx(np.zeros((7, 28, 28), np.uint8))), LABELS, "00 00 08 01")
case("idx of floats", fashion(IMAGES, header(7, 28, 28, kind=13) + bytes(7 * 784)), IMAGES, "0d")
case("idx without its header", fashion(IMAGES, bytes((0, 0, 8, 3, 0))), IMAGES)
case("idx declares 4 billion", fashion(IMAGES, header(2**32 - 1, 28, 28) + bytes(784)), IMAGES, "4294967295")
case("idx of nothing", fashion(IMAGES, header(0, 28, 28)), IMAGES, "0 entries")
case("idx of other sides", fashion(IMAGES, header(7, 32, 32) + bytes(7 * 1024)), IMAGES, "(32, 32)")
case("idx label 10", fashion(LABELS, layouts.idx(np.full(7, 10, np.uint8))), LABELS, "10")
case("idx of too few labels", fashion(LABELS, layouts.idx(np.zeros(6, np.uint8))), "6 labels for 7")
case("gz cut off", fashion(f"{IMAGES}.gz", half, zipped=True), IMAGES, "damaged")
case("gz with a wrong checksum", fashion(f"{IMAGES}.gz", gzip.compress(b"a")[:-5] + b"12345", zipped=True), "damaged")
case("gz that is none", fashion(f"{IMAGES}.gz", layouts.idx(np.zeros((7, 28, 28), np.uint8)), zipped=True), "damaged")
case("gz of nothing", fashion(f"{IMAGES}.gz", gzip.compress(b""), zipped=True), IMAGES, "empty")
case("gz bomb", fashion(f"{LABELS}.gz", gzip.compress(bytes(2**24)) * 20, zipped=True), LABELS, "more than")
case("gz with a damaged stream", fashion(f"{LABELS}.gz", gzip.compress(bytes(99))[:12] + b"\xff" * 20, zipped=True), "damaged")


# Pictures: Tiny-ImageNet and folders.


def tiny(file: str, damage: Any) -> Callable[[Path], Any]:
    def read(root: Path) -> Any:
        damaged(layouts.tiny_imagenet(root) / file, damage)
        return read_tiny_imagenet(root)

    return read


def encoded(form: str, size: tuple[int, int] = (64, 64)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size).save(file, form)
    return file.getvalue()


def png(width: int, height: int) -> bytes:
    """A PNG file that declares a size, and has no pixels."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [chunk, b"IDAT" + zlib.compress(b"")]
    framed = [struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


def emptied(where: Path) -> None:
    for file in where.iterdir():
        file.unlink()


PICTURE, CLASSES, NOTES = "train/n02/images/n02_1.JPEG", "wnids.txt", "val/val_annotations.txt"
GOOD_NOTES = b"val_0.JPEG\tn01\t0\nval_1.JPEG\tn02\t0\n"
for what, damage in EVERYWHERE.items():
    if what != "a dangling link":
        case(f"tiny classes {what}", tiny(CLASSES, b"n01\n\nn02" if what == "half" else damage), CLASSES)
        case(f"tiny picture {what}", tiny(PICTURE, damage), "n02_1.JPEG")
for what, line in {
    "up": "../n01",
    "absolute": "/etc",
    "Windows": "..\\n01",
    "dot": ".",
    "zero": "n\x0001",
    "twice": "n02",
}.items():
    case(f"tiny class name {what}", tiny(CLASSES, f"n01\nn02\n{line}\n".encode()), CLASSES)
case("tiny class without a folder", tiny(CLASSES, b"n01\nn02\nn03\n"), "n03")
case("tiny class without pictures", tiny("train/n02/images", emptied), "n02", "no pictures")
case("tiny notes lead up", tiny(NOTES, b"../../train/n01/images/n01_0.JPEG\tn01\t0\n"), "val_annotations.txt, line 1")
case("tiny notes absolute", tiny(NOTES, GOOD_NOTES + b"/etc/passwd\tn01\t0\n"), "val_annotations.txt, line 3")
case("tiny notes of an unknown class", tiny(NOTES, b"val_0.JPEG\tn09\t0\n"), "line 1", "wnids.txt")
case("tiny notes without tabs", tiny(NOTES, b"val_0.JPEG n01\n"), "line 1")
case("tiny notes in Latin-1", tiny(NOTES, GOOD_NOTES + "val_é.JPEG\tn01\n".encode("latin-1")), "line 3", "UTF-8")
case("tiny notes of a missing picture", tiny(NOTES, GOOD_NOTES + b"val_7.JPEG\tn01\n"), "val_7.JPEG")
case("tiny picture is text", tiny(PICTURE, b"not a picture"), "n02_1.JPEG")
case("tiny picture is PostScript", tiny(PICTURE, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n"), "n02_1.JPEG")
case("tiny picture is SVG", tiny(PICTURE, b'<svg xmlns="http://www.w3.org/2000/svg"/>'), "n02_1.JPEG")
case("tiny picture is a GIF", tiny(PICTURE, encoded("GIF")), "n02_1.JPEG")
case("tiny picture declares 10 gigapixels", tiny(PICTURE, png(10**5, 10**5)), "n02_1.JPEG")
case("tiny picture declares 60 megapixels", tiny(PICTURE, png(10**4, 6 * 10**3)), "n02_1.JPEG", "10000 x 6000")
case("tiny picture without pixels", tiny(PICTURE, png(64, 64)), "n02_1.JPEG")


def pictures(change: Callable[[Path], Any], **settings: Any) -> Callable[[Path], Any]:
    def read(root: Path) -> Any:
        change(layouts.class_folders(root / "mine"))
        return read_image_folder(root / "mine", **settings)

    return read


def as_written(root: Path) -> None: ...


def occupied(root: Path) -> Any:
    layouts.class_folders(root / "mine")
    (root / "store").write_text("a file")
    return read_image_folder(root / "mine", store=root / "store")


def spoiled_store(content: bytes) -> Callable[[Path], Any]:
    def read(root: Path) -> Any:
        layouts.class_folders(root / "mine")
        read_image_folder(root / "mine", store=root / "store")
        (stored,) = (root / "store").iterdir()
        stored.write_bytes(content)
        return read_image_folder(root / "mine", store=root / "store")

    return read


def npy(array: np.ndarray, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


case("folder that is not there", lambda root: read_image_folder(root / "nowhere"), "nowhere")
case("folder that is a file", lambda root: read_image_folder(layouts.cifar100(root) / "train"), "train")
case("folder without classes", lambda root: read_image_folder(layouts.class_folders(root) / "cat"), "cat", "one a class")
case("folder of an empty class", pictures(lambda mine: (mine / "emu").mkdir()), "'emu'")
case("folder of half a picture", pictures(lambda mine: damaged(mine / "cat" / "1.png", half)), "1.png")
case("folder of other files", pictures(lambda mine: [damaged(mine / "emu" / "notes.txt", b"x")]), "'emu'")
case("folder of two sizes", pictures(lambda mine: layouts.picture(mine / "dog" / "2.png", (0, 0, 0), (9, 9))), "2.png", "9 x 9")
case("folder fitted to nothing", pictures(as_written, size=0), "size")
case("folder fitted to too much", pictures(as_written, size=10**6), "size")
case("folder of two channels", pictures(as_written, channels=2), "channels")
case("store is a file", occupied, "store")
case("store is damaged", spoiled_store(b"nothing"), "store")
case("store is cut off", spoiled_store(npy(np.zeros((4, 3, 6, 8), np.uint8))[:-9]), "store")
case("store of other pictures", spoiled_store(npy(np.zeros((5, 3, 6, 8), np.uint8))), "Delete")
case("store of objects", spoiled_store(npy(np.array([Executed()], object), allow_pickle=True)), "store")


def splits(change: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def read(root: Path) -> Any:
        for part in ("train", "test"):
            layouts.class_folders(root / "cifar10" / part)
        change(root / "cifar10")
        return read_cifar("cifar10", root)

    return read


case("splits of other classes", splits(lambda mine: (mine / "test" / "cat").rename(mine / "test" / "cow")), "cat, cow")
case("splits without a test", splits(lambda mine: (mine / "test").rename(mine / "rest")), "test")


def saved(file: str, damage: Any) -> Callable[[Path], Any]:
    def read(root: Path) -> Any:
        datasets = pytest.importorskip("datasets")
        part = datasets.Dataset.from_dict({"x": [[1.0], [2.0]], "label": [0, 1]})
        datasets.DatasetDict(train=part, test=part).save_to_disk(root / "mine")
        damaged(root / "mine" / file, damage)
        return read_disk(root / "mine")

    return read


ARROW = "train/data-00000-of-00001.arrow"
case("saved: half an arrow", saved(ARROW, half), "mine")
case("saved: an empty arrow", saved(ARROW, b""), "mine")
case("saved: no arrow", saved(ARROW, gone), "mine")
case("saved: its state is no JSON", saved("train/state.json", b"{"), "mine")
case("saved: its parts are no JSON", saved("dataset_dict.json", b"[1]"), "mine")
case("saved: parts that lead up", saved("dataset_dict.json", b'{"splits": ["../../train"]}'), "mine")
case("saved: nothing there", lambda root: read_disk(root / "nowhere"), "nowhere")


# GLUE.


def glue(task: str, damage: Any, file: str = "train.tsv") -> Callable[[Path], Any]:
    def read(root: Path) -> Any:
        damaged(layouts.glue(root, task) / file, damage)
        return read_glue(task, root)

    return read


SST2 = b"sentence\tlabel\na film \t1\n"
for what, damage in EVERYWHERE.items():
    case(f"glue {what}", glue("sst2", b"sentence\tlabel\na fil" if what == "half" else damage), "train.tsv")
GLUE_CASES: dict[str, tuple[str, bytes, tuple[str, ...]]] = {
    "1 column": ("sst2", b"sentence\na film\n", ("no column label",)),
    "no header": ("sst2", b"a film \t1\nanother \t0\n", ("no column sentence", "label")),
    "header only": ("sst2", b"sentence\tlabel\n", ("no records",)),
    "label 2": ("sst2", SST2 + b"a film \t2\n", ("line 3", "0, 1")),
    "no label": ("sst2", SST2 + b"a film \t\n", ("line 3",)),
    "a cell too many": ("sst2", SST2 + b"a film \t1\t1\n", ("line 3", "3 cells")),
    "a blank line": ("sst2", SST2 + b"\nb\t1\n", ("line 3", "1 cells")),
    "commas": ("sst2", SST2.replace(b"\t", b","), ("no column sentence",)),
    "Latin-1": ("sst2", SST2 + "cliché \t0\n".encode("latin-1"), ("line 3", "UTF-8")),
    "UTF-16": ("sst2", SST2.decode().encode("utf-16"), ("zero byte",)),
    "a zero byte": ("sst2", SST2 + b"a\0b\t1\n", ("line 3", "zero byte")),
    "CoLA of three columns": ("cola", b"gj04\t1\tA sentence.\n", ("line 1", "3 cells")),
    "CoLA label": ("cola", b"gj04\tyes\t\tA sentence.\n", ("line 1",)),
    "RTE label": ("rte", b"index\tsentence1\tsentence2\tlabel\n0\ta\tb\tcontradiction\n", ("line 2", "not_entailment")),
    "MNLI label": ("mnli", layouts.GLUE_LINES["mnli"].replace("\tentailment", "\t-").encode(), ("line 3", "neutral")),
    "MRPC header": ("mrpc", layouts.GLUE_LINES["mrpc"].lower().encode(), ("no column #1 String",)),
    "QQP too broken": ("qqp", layouts.GLUE_LINES["qqp"].encode() + b"cut\n" * 2, ("2 of", "line 4")),
    "QNLI without its question": ("qnli", b"index\tsentence\tlabel\n0\ta\tentailment\n", ("no column question",)),
}
for what, (task, content, words) in GLUE_CASES.items():
    case(f"glue {what}", glue(task, content), "train.tsv", *words)
case("glue test part", glue("cola", b"index\tsentence\n0\tA sentence.\n", "dev.tsv"), "dev.tsv")
case("glue task", lambda root: read_glue("../sst2", root), "cola")


# Tables.


def table(content: bytes, name: str = "mine.csv", target: str = "y", **settings: Any) -> Callable[[Path], Any]:
    def read(root: Path) -> Any:
        damaged(root / name, content)
        return read_numbers(root / name, target, **settings)

    return read


TABLES: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "NaN": (b"a,y\n1,0\nnan,1\n", ("line 3", "'a'", "'nan'")),
    "Inf": (b"a,y\n-inf,0\n", ("line 2", "-inf")),
    "beyond float": (b"a,y\n1e39,0\n", ("line 2", "1e39")),
    "beyond double": (b"a,y\n1e999,0\n", ("line 2",)),
    "a word": (b"a,y\nten,0\n", ("line 2", "'ten'")),
    "an empty cell": (b"a,y\n,0\n", ("line 2", "''")),
    "an empty label": (b"a,y\n1,\n", ("line 2", "no label")),
    "no target": (b"a,b\n1,0\n", ("'y'", "a, b")),
    "target only": (b"y\n1\n", ("no columns are left",)),
    "a short row": (b"a,b,y\n1,2,0\n1,0\n", ("line 3", "2 cells")),
    "a long row": (b"a,y\n1,0,5\n", ("line 2", "3 cells")),
    "a name twice": (b"a,a,y\n1,2,0\n", ("of their own",)),
    "a name missing": (b"a,,y\n1,2,0\n", ("of their own",)),
    "spaces around a name": (b"a, y\n1,0\n", ("spaces",)),
    "an open quote": (b'a,y\n"1,0\n', ("quotes",)),
    "a quote inside": (b'a,y\n"1"2,0\n', ("line 2",)),
    "a cell of megabytes": (b"a,y\n" + b"1" * 10**6 + b",0\n", ("limit",)),
    "nothing": (b"", ("empty",)),
    "blank lines": (b"\n\n\n", ("no records",)),
    "names only": (b"a,y\n", ("no records",)),
    "Latin-1": ("a,y\n1,é\n".encode("latin-1"), ("line 2", "UTF-8")),
    "zero bytes": (b"a,y\n\0,1\n", ("line 2", "zero byte")),
}
LINES: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "no JSON": (b'{"a": 1, "y": 0}\n{"a": 1,\n', ("line 2", "JSON")),
    "code": (b"__import__('os').system('touch code_was_executed')\n", ("line 1",)),
    "an array": (b"[1, 2]\n", ("line 1", "list")),
    "a name twice": (b'{"a": 1, "a": 2, "y": 0}\n', ("line 1", "twice")),
    "a name missing": (b'{"a": 1, "y": 0}\n{"y": 0}\n', ("line 2", "names a")),
    "NaN": (b'{"a": NaN, "y": 0}\n', ("line 1", "nan")),
    "null": (b'{"a": null, "y": 0}\n', ("line 1", "None")),
    "a list for a number": (b'{"a": [1], "y": 0}\n', ("line 1", "[1]")),
    "a label of half": (b'{"a": 1, "y": 0.5}\n', ("line 1", "0.5")),
    "no label": (b'{"a": 1, "y": null}\n', ("line 1", "None")),
    "depth": (b'{"a": ' + b"[" * 10**5 + b"\n", ("line 1",)),
    "a number of 10,000 digits": (b'{"a": ' + b"9" * 10**4 + b', "y": 0}\n', ("line 1",)),
    "a number of 1,000 digits": (b'{"a": ' + b"9" * 10**3 + b', "y": 0}\n', ("line 1",)),
    "nothing": (b"\n\n", ("no records",)),
}
for what, (content, words) in TABLES.items():
    case(f"csv {what}", table(content), "mine.csv", *words)
for what, (content, words) in LINES.items():
    case(f"jsonl {what}", table(content, "mine.jsonl"), "mine.jsonl", *words)
case("csv target as a feature", table(b"a,y\n1,0\n", features=["a", "y"]), "'y'")
case("csv unknown feature", table(b"a,y\n1,0\n", features=["b"]), "'b'")
case("csv by another name", table(b"a,y\n1,0\n", "mine.xlsx"), "mine.xlsx", ".csv")
case("csv that is not there", lambda root: read_table(root / "no.csv"), "no.csv")
case("csv that is a folder", lambda root: ((root / "no.csv").mkdir(), read_table(root / "no.csv")), "no.csv")
case("csv in half a gzip", table(gzip.compress(b"a,y\n1,0\n")[:-4], "mine.csv.gz"), "mine.csv.gz")


def classes(root: Path) -> Any:
    (root / "mine.csv").write_text("a,y\n1,cat\n2,emu\n")
    return read_table(root / "mine.csv").labels("y", ["cat", "dog"])


def text_columns(*names: str) -> Callable[[Path], Any]:
    def read(root: Path) -> Any:
        (root / "mine.jsonl").write_text('{"a": "x", "b": 3, "y": 0}\n')
        return read_table(root / "mine.jsonl").texts(names, "y")

    return read


case("csv of an unknown class", classes, "mine.csv, line 3", "'emu'")
case("text that is a number", text_columns("b"), "mine.jsonl, line 1", "3")
case("text of three columns", text_columns("a", "b", "y"), "mine.jsonl")


# Tokenizers.


def tokenizer(**files: bytes) -> Callable[[Path], Any]:
    def read(root: Path) -> Any:
        pytest.importorskip("transformers")
        (root / "bert").mkdir()
        for name, content in files.items():
            (root / "bert" / name.replace("__", ".")).write_bytes(content)
        return load_tokenizer(root / "bert")

    return read


def tokenised(length: int) -> Callable[[Path], Any]:
    def read(root: Path) -> Any:
        words = tokenizer(
            vocab__txt=b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n", tokenizer_config__json=b'{"model_max_length": 9}'
        )
        return tokenise(Texts(["a"], None, torch.tensor([0])), words(root), length)

    return read


REMOTE = b'{"auto_map": {"AutoTokenizer": ["mine.Mine", null]}, "tokenizer_class": "Mine"}'
MINE = b"import os\nos.system('touch code_was_executed')\nclass Mine: pass\n"
case("tokenizer not there", lambda root: load_tokenizer(root / "nowhere"), "nowhere")
case("tokenizer empty", tokenizer(), "bert", "vocab.txt")
case("tokenizer is no JSON", tokenizer(tokenizer__json=b"{", tokenizer_config__json=b"{}"), "bert")
case("tokenizer has code", tokenizer(tokenizer_config__json=REMOTE, config__json=b"{}", mine__py=MINE), "bert")
case("tokenizer of a length too short", tokenised(2), "length", "2")
case("tokenizer of a length too long", tokenised(10), "length", "9")


# Data sets in memory.


def hugging_face(**columns: list[Any]) -> Callable[[Path], Any]:
    return lambda root: as_records("train", pytest.importorskip("datasets").Dataset.from_dict(columns))


def pairs(*records: Any) -> Callable[[Path], Any]:
    return lambda root: as_records("train", list(records))


case("data set of texts", hugging_face(text=["a", "b"], label=[0, 1]), "train", "'text'", "tokenise")
case("data set of unlike lengths", hugging_face(ids=[[1], [1, 2]], label=[0, 1]), "train", "'ids'")
case("data set without a label", hugging_face(ids=[[1], [2]]), "train", "'y'", "ids")
case("data set of nothing", hugging_face(ids=[], label=[]), "train", "empty")
case("data set of two labels", hugging_face(ids=[1], label=[0], labels=[0]), "train", "mean the same")
case("pairs that are triples", pairs(([0.0], 1, 2)), "train", "record 0")
case("pairs of unlike shapes", pairs(([0.0], 1), ([0.0, 1.0], 1), ([0.0], 0)), "train", "record 1", "(2,)")
case("pairs of unlike types", pairs(([0.0], 1), ([0.0], 0.5), ([0.0], 0)), "train", "'y' of record 1")
case("pairs of texts", pairs(("a", 1), ("b", 0), ("c", 0)), "train", "'x'")


executed: list[str] = []
watching = False


def watch(event: str, arguments: Any) -> None:
    """What the process does that only foreign code would make it do."""
    if watching and event in CODE_EVENTS:
        executed.append(f"{event} {arguments}")


sys.addaudithook(watch)


@contextmanager
def watched() -> Iterator[None]:
    """At most some seconds, and nothing that a file brings along is run."""
    global watching

    def too_long(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(SECONDS)
    executed.clear()
    watching = True
    try:
        yield
    finally:
        watching = False
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", CASES)
def test_refused_by_name_with_a_remedy(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    read, words = CASES[name]
    with pytest.raises(InputError) as refusal, watched():
        read(tmp_path)
    message = str(refusal.value)
    assert all(word in message for word in words), message
    assert REMEDY.search(message), message
    assert len(message) < 700 + 2 * len(str(tmp_path)), message
    assert not executed
    assert not (tmp_path / "code_was_executed").exists()


def test_there_are_at_least_a_hundred() -> None:
    assert len(CASES) >= 100


def test_the_watch_sees_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pickles above do run when they are trusted, and the watch notices."""
    monkeypatch.chdir(tmp_path)
    with watched():
        pickle.loads(PICKLES["code in protocol 2"][0])
    assert any("system" in event for event in executed)
    assert (tmp_path / "code_was_executed").exists()


def every_file(root: Path) -> list[tuple[Path, Callable[[], Any]]]:
    """A file of every kind, and what reads it."""
    tiny, idx = layouts.tiny_imagenet(root), layouts.fashion_mnist(root)
    (root / "mine.csv").write_text('a,b,y\n3,"4",yes\n5,6,no\n')
    (root / "mine.jsonl").write_text('{"a": 1.5, "y": 3}\n{"a": 2, "y": 4}\n')
    glue = [(layouts.glue(root, task) / "train.tsv", partial(read_glue, task, root)) for task in layouts.GLUE_LINES]
    return [
        (layouts.cifar100(root) / "train", lambda: read_cifar("cifar100", root)),
        (idx / f"{LABELS}.gz", lambda: read_fashion_mnist(root)),
        *((tiny / name, lambda: read_tiny_imagenet(root)) for name in (PICTURE, CLASSES, NOTES)),
        *glue,
        (root / "mine.csv", lambda: read_numbers(root / "mine.csv", "y")),
        (root / "mine.jsonl", lambda: read_numbers(root / "mine.jsonl", "y")),
    ]


def test_files_with_random_damage_are_read_or_refused(tmp_path: Path) -> None:
    random, refused = np.random.default_rng(0), 0
    for file, read in every_file(tmp_path):
        whole = file.read_bytes()
        for _ in range(30):
            content, at = bytearray(whole), int(random.integers(min(len(whole), 900)))
            content[at : at + int(random.integers(4))] = random.bytes(int(random.integers(1, 4)))
            file.write_bytes(content)
            try:
                with watched():
                    read()
            except InputError:
                refused += 1
            assert not executed
        file.write_bytes(whole)
    assert refused > 100
