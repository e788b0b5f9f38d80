"""Every reader on files written in the true layout, and on the real ones where they are there."""

from __future__ import annotations

import os
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.func import vmap

from dpfed import InputError, from_clients
from dpfed.columns import as_records
from dpfed.tasks.images import (
    CIFAR100,
    Normalise,
    read_cifar,
    read_disk,
    read_fashion_mnist,
    read_tiny_imagenet,
)
from dpfed.tasks.pictures import read_image_folder
from dpfed.tasks.tables import read_numbers, read_table
from dpfed.tasks.text import GLUE, Texts, load_tokenizer, read_glue, tokenise
from tests.unit import layouts

SHARED = Path(os.environ.get("DPFED_SHARED", Path(__file__).parents[3] / "shared")) / "data"


def test_cifar_10_is_read_as_it_was_written(tmp_path: Path) -> None:
    layouts.cifar10(tmp_path)
    train, test = read_cifar("cifar10", tmp_path)
    assert train["x"].shape == (30, 3, 32, 32)
    assert train["x"].dtype == torch.uint8
    expected = np.concatenate([layouts.cifar_pixels(6, seed) for seed in range(5)])
    assert train["x"].reshape(30, -1).equal(torch.from_numpy(expected))
    assert train["y"].tolist() == [(seed + i) % 10 for seed in range(5) for i in range(6)]
    assert test["x"].reshape(6, -1).equal(torch.from_numpy(layouts.cifar_pixels(6, 5)))
    train["x"][0] = 0  # one's own memory, not the file's


def test_cifar_100_has_fine_and_coarse_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts.cifar100(tmp_path)
    monkeypatch.setenv("DPFED_DATA", str(tmp_path))
    assert read_cifar("cifar100")[0]["y"].tolist() == list(range(6))
    assert read_cifar("cifar100", labels="coarse")[1]["y"].tolist() == [1, 2, 3, 4, 5, 6]


def test_the_pickles_of_the_tests_are_pickles(tmp_path: Path) -> None:
    """Python's own reader sees the same in them; and the one here reads what Python 3 writes in protocol 2."""
    folder = layouts.cifar100(tmp_path)
    with (folder / "train").open("rb") as file:
        found = pickle.load(file, encoding="latin1")
    assert np.array_equal(found["data"], layouts.cifar_pixels(6, 0))
    assert found["filenames"][5] == "picture_5.png"
    pickletools.optimize((folder / "train").read_bytes())
    for again in ({key.encode(): value for key, value in found.items()}, found):
        (folder / "train").write_bytes(pickle.dumps(again, protocol=2))
        assert read_cifar("cifar100", tmp_path)[0]["x"].reshape(6, -1).equal(torch.from_numpy(found["data"]))


def test_cifar_from_folders_of_png_files(tmp_path: Path) -> None:
    classes = tuple(map(str, range(12)))
    for part in ("train", "test"):
        layouts.class_folders(tmp_path / "cifar10" / part, classes, (32, 32))
    train, test = read_cifar("cifar10", tmp_path)
    assert train["x"].shape == (24, 3, 32, 32)
    assert train["x"][:, 0, 0, 0].tolist() == [10 * c for c in range(12) for _ in range(2)], "2 comes before 10"
    assert test["y"].tolist() == [c for c in range(12) for _ in range(2)]


def test_cifar_from_a_saved_hugging_face_data_set(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
    part = datasets.Dataset.from_dict({"img": [Image.fromarray(p) for p in pixels], "label": [0, 1, 2, 1, 0]})
    datasets.DatasetDict(train=part, validation=part).save_to_disk(tmp_path / "cifar10")
    train, _ = read_cifar("cifar10", tmp_path)
    assert train["x"].dtype == torch.uint8
    assert train["x"].equal(torch.from_numpy(pixels).permute(0, 3, 1, 2))
    assert train["y"].tolist() == [0, 1, 2, 1, 0]


@pytest.mark.parametrize("zipped", [True, False])
def test_fashion_mnist(zipped: bool, tmp_path: Path) -> None:
    layouts.fashion_mnist(tmp_path, zipped=zipped)
    train, test = read_fashion_mnist(tmp_path)
    assert train["x"].shape == (7, 1, 28, 28)
    expected = np.random.default_rng(0).integers(0, 256, (7, 28, 28), dtype=np.uint8)
    assert train["x"].squeeze(1).equal(torch.from_numpy(expected))
    assert test["y"].tolist() == list(range(7))


def test_tiny_imagenet_and_its_store(tmp_path: Path) -> None:
    layouts.tiny_imagenet(tmp_path)
    train, test = read_tiny_imagenet(tmp_path)
    assert train["x"].shape == (6, 3, 64, 64)
    assert train["y"].tolist() == [0, 0, 0, 1, 1, 1]
    assert test["y"].tolist() == [1, 0], "in the order of the annotations, numbered as in wnids.txt"
    assert abs(test["x"][:, 2].float().mean() - 200) < 3
    mapped, _ = read_tiny_imagenet(tmp_path, store=tmp_path / "store")
    stored = {file: file.stat().st_mtime_ns for file in (tmp_path / "store").iterdir()}
    again, _ = read_tiny_imagenet(tmp_path, store=tmp_path / "store")
    assert mapped["x"].equal(train["x"])
    assert again["x"].equal(train["x"])
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "store").iterdir()} == stored
    assert len(stored) == 2
    layouts.picture(tmp_path / "tiny-imagenet-200" / "train" / "n01" / "images" / "n01_0.JPEG", (255, 255, 255))
    changed, _ = read_tiny_imagenet(tmp_path, store=tmp_path / "store")
    assert changed["x"][0].min() == 255, "decoded anew, because a file changed"


def test_an_image_folder_is_fitted_to_one_size(tmp_path: Path) -> None:
    layouts.class_folders(tmp_path)
    layouts.picture(tmp_path / "cat" / "large.jpg", (200, 0, 0), (80, 40))
    with pytest.raises(InputError, match="name a size"):
        read_image_folder(tmp_path)
    assert read_image_folder(tmp_path, size=16)["x"].shape == (5, 3, 16, 16)
    assert read_image_folder(tmp_path, size=16, channels=1)["x"].shape == (5, 1, 16, 16)


@pytest.mark.parametrize("task", GLUE)
def test_glue(task: str, tmp_path: Path) -> None:
    layouts.glue(tmp_path, task)
    train, test = read_glue(task, tmp_path)
    assert train.first == test.first
    assert (train.second is None) == (task in ("sst2", "cola"))
    assert max(train.y.tolist()) + 1 == GLUE[task].classes == len(GLUE[task].labels)
    expected = {"cola": [1, 0], "rte": [1, 0], "qnli": [0, 1], "mnli": [2, 0, 1], "mrpc": [1, 0], "qqp": [1, 0], "sst2": [1, 0]}
    assert train.y.tolist() == expected[task]
    if task == "mrpc":
        assert train.first[0] == 'He said " no .', "quotes are ordinary characters"


def test_broken_lines_of_qqp_are_left_out_and_counted(tmp_path: Path) -> None:
    file = layouts.glue(tmp_path, "qqp") / "train.tsv"
    file.write_text(layouts.GLUE_LINES["qqp"] + "".join(f"{i}\t1\t2\tA?\tB?\t0\n" for i in range(2000)) + "7\t8\t9\tcut off\n")
    train, _ = read_glue("qqp", tmp_path)
    assert (len(train.first), len(train.y), train.left_out) == (2002, 2002, 1)


@pytest.mark.skipif(not (SHARED / "glue").is_dir(), reason="the real files are not here")
@pytest.mark.parametrize(
    ("task", "num_train", "num_test"), [("sst2", 67349, 872), ("cola", 8551, 1043), ("rte", 2490, 277), ("mrpc", 3668, 408)]
)
def test_the_real_glue(task: str, num_train: int, num_test: int) -> None:
    train, test = read_glue(task, SHARED / "glue")
    assert (len(train.y), len(test.y), train.left_out) == (num_train, num_test, 0)
    assert all(train.first)


def vocabulary(folder: Path) -> Path:
    folder.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "who", "she", "when", "here", "?", "."]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    return folder


def test_texts_become_columns_of_one_length(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tokenizer = load_tokenizer(vocabulary(tmp_path / "bert"))
    records = tokenise(Texts(["Who?", "When when when when when."], ["She.", "Here."], torch.tensor([0, 1])), tokenizer, 8)
    assert records["input_ids"].tolist() == [[2, 5, 9, 3, 6, 10, 3, 0], [2, 7, 7, 7, 3, 8, 10, 3]]
    assert records["attention_mask"].tolist() == [[True] * 7 + [False], [True] * 8]
    assert records["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 0, 1, 1, 1]]
    assert records["input_ids"].dtype == torch.int32
    alone = tokenise(Texts(["who"], None, torch.tensor([0])), tokenizer, 4)
    assert set(alone) == {"input_ids", "attention_mask", "y"}


@pytest.mark.skipif(not (SHARED / "tokenizers").is_dir(), reason="the real vocabularies are not here")
@pytest.mark.parametrize(
    ("name", "expected"), [("bert-base-uncased", [101, 7592, 2088, 102]), ("roberta-base", [0, 31414, 232, 2])]
)
def test_the_real_vocabularies(name: str, expected: list[int]) -> None:
    pytest.importorskip("transformers")
    records = tokenise(Texts(["Hello world"], None, torch.tensor([0])), load_tokenizer(SHARED / "tokenizers" / name), 6)
    assert records["input_ids"][0, :4].tolist() == expected
    assert records["attention_mask"].sum() == 4


def test_tables_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('age,name,height,kind\n3,"Ada, L.",1.5,yes\n4,Bob,2e1,no\n')
    records = read_numbers(tmp_path / "a.csv", "kind", without=["name"])
    assert records["x"].tolist() == [[3.0, 1.5], [4.0, 20.0]]
    assert records["y"].tolist() == [1, 0]
    table = read_table(tmp_path / "a.csv")
    assert table.column("name") == ["Ada, L.", "Bob"]
    assert table.labels("kind", ["yes", "no"])[0].tolist() == [0, 1], "in the order that was given"
    (tmp_path / "b.jsonl").write_text('{"text": "one\\u2028line", "label": 10}\n\n{"text": "two", "label": 9}\n')
    texts = read_table(tmp_path / "b.jsonl").texts(["text"], "label")
    assert texts.first == ["one\u2028line", "two"]
    assert texts.y.tolist() == [1, 0], "numbers in their own order"


def test_normalise_turns_bytes_into_numbers_inside_the_gradient() -> None:
    x = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    layer = Normalise((0.5, 0.4, 0.3), (0.1, 0.2, 0.3))
    mean, std = torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1), torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)
    torch.testing.assert_close(layer(x), (x.double() / 255 - mean) / std, check_dtype=False)
    larger = Normalise((0.5,) * 3, (0.2,) * 3, size=20)
    one_by_one: Any = vmap(lambda picture: larger(picture.unsqueeze(0)).squeeze(0))(x)
    torch.testing.assert_close(one_by_one, larger(x))
    assert one_by_one.shape == (5, 3, 20, 20)


class Pairs(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, row: int) -> Any:
        return np.full((2, 2), row, np.uint8), row % 3


def test_data_sets_become_columns_and_keep_their_types() -> None:
    records = as_records("records", Pairs())
    assert records["x"].dtype == torch.uint8
    assert records["x"][:, 0, 0].tolist() == list(range(10))
    some = as_records("records", torch.utils.data.Subset(Pairs(), [4, 2]))
    assert some["x"][:, 0, 0].tolist() == [4, 2]
    x = torch.randn(1000, 4)
    tensors = torch.utils.data.TensorDataset(x, torch.arange(1000))
    assert as_records("records", tensors)["x"].data_ptr() == x.data_ptr(), "taken as it is, not copied"


def test_hugging_face_data_sets_are_records() -> None:
    datasets = pytest.importorskip("datasets")
    columns = {"input_ids": [[1, 2], [3, 4], [5, 6]], "attention_mask": [[1, 1], [1, 0], [1, 1]], "label": [0, 1, 0]}
    records = as_records("records", datasets.Dataset.from_dict(columns))
    assert set(records) == {"input_ids", "attention_mask", "y"}
    assert records["input_ids"].tolist() == columns["input_ids"]
    parts = [datasets.Dataset.from_dict({"image": [[1.0], [i]], "label": [0, 1]}) for i in (2.0, 3.0)]
    with pytest.raises(InputError, match="equal_records"):
        from_clients(parts)
    assert from_clients(parts, equal_records=True).sizes == [2, 2]


def test_a_missing_data_set_says_what_where_and_whence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPFED_DATA", str(tmp_path))
    with pytest.raises(InputError) as refusal:
        read_cifar("cifar100")
    message = str(refusal.value)
    assert all(word in message for word in ("cifar-100-python/train", str(tmp_path), "DPFED_DATA", CIFAR100.source))
    layouts.cifar100(tmp_path)
    (tmp_path / "cifar-100-python" / "test").unlink()
    with pytest.raises(InputError, match=r"missing cifar-100-python/test\. Get"):
        read_cifar("cifar100")


def test_a_saved_data_set_of_one_part_is_refused(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"x": [1.0], "label": [0]}).save_to_disk(tmp_path / "one")
    with pytest.raises(InputError, match="one part only"):
        read_disk(tmp_path / "one")
