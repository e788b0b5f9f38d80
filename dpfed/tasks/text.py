"""GLUE as people have it, and texts turned into numbers once, up front.

Every GLUE task is a folder of tab-separated files without quoting. The labels of the official test parts were never published,
so the validation part (``dev.tsv``) is the test part here, as it is in the papers; this library tunes nothing on it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpfed.errors import InputError
from dpfed.flat import Records
from dpfed.tasks.folders import DataSet, read_text

BROKEN = 1000  # one line in so many may be broken in the official files of QQP, and is left out


class Texts(NamedTuple):
    """Sentences, or pairs of them, with their labels. ``left_out``: broken lines of the file."""

    first: list[str]
    second: list[str] | None
    y: Tensor
    left_out: int = 0


class GlueTask(NamedTuple):
    """Where a task keeps what: columns by name, or by place in a file without a header."""

    folder: str
    texts: tuple[str | int, ...]
    label: str | int
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    dev: str = "dev"
    width: int | None = None  # columns of a file without a header
    may_break: bool = False

    @property
    def classes(self) -> int:
        return len(self.labels)

    @property
    def data_set(self) -> DataSet:
        folders = tuple(prefix + self.folder for prefix in ("glue/", "GLUE/", "glue_data/", ""))
        files = tuple(f"{part}.tsv" for part in ("train", self.dev))
        return DataSet(f"GLUE {self.folder}", folders, files, "https://gluebenchmark.com/tasks")


ACCURACY, F1 = ("accuracy",), ("f1", "accuracy")
ENTAILMENT = ("entailment", "not_entailment")
NLI = ("entailment", "neutral", "contradiction")
GLUE: dict[str, GlueTask] = {
    "cola": GlueTask("CoLA", (3,), 1, ("0", "1"), ("matthews", "accuracy"), width=4),
    "mnli": GlueTask("MNLI", ("sentence1", "sentence2"), "gold_label", NLI, ACCURACY, dev="dev_matched"),
    "mrpc": GlueTask("MRPC", ("#1 String", "#2 String"), "Quality", ("0", "1"), F1),
    "qnli": GlueTask("QNLI", ("question", "sentence"), "label", ENTAILMENT, ACCURACY),
    "qqp": GlueTask("QQP", ("question1", "question2"), "is_duplicate", ("0", "1"), F1, may_break=True),
    "rte": GlueTask("RTE", ("sentence1", "sentence2"), "label", ENTAILMENT, ACCURACY),
    "sst2": GlueTask("SST-2", ("sentence",), "label", ("0", "1"), ACCURACY),
}


def read_glue(task: str, root: str | Path | None = None) -> tuple[Texts, Texts]:
    """(train, test) of a GLUE task; test is its validation part (MNLI: the matched one)."""
    if task not in GLUE:
        raise InputError(f"task: there is no GLUE task {task!r} here. Use one of: {', '.join(GLUE)}.")
    folder = GLUE[task].data_set.find(root)
    train, test = (_read_tsv(folder / file, GLUE[task]) for file in GLUE[task].data_set.files)
    return train, test


def _read_tsv(path: Path, task: GlueTask) -> Texts:
    lines = [line.removesuffix("\r") for line in read_text(path).removesuffix("\n").split("\n")]
    header: list[str | int] = [*lines[0].split("\t")] if task.width is None else [*range(task.width)]
    wanted = (*task.texts, task.label)
    if lacking := [str(name) for name in wanted if name not in header]:
        raise InputError(
            f"{path}: has no column {' and no '.join(lacking)}; its first line is {lines[0][:80]!r}. Get it again."
        )
    places = [header.index(name) for name in wanted]
    texts: tuple[list[str], ...] = tuple([] for _ in task.texts)
    y: list[int] = []
    broken: list[int] = []
    number = {label: c for c, label in enumerate(task.labels)}
    for at, line in enumerate(lines[task.width is None :], start=1 + (task.width is None)):
        cells = line.split("\t")
        if len(cells) != len(header) or cells[places[-1]] not in number:
            if not task.may_break:
                raise InputError(
                    f"{path}, line {at}: expected {len(header)} cells and one of {', '.join(task.labels)} in column "
                    f"{wanted[-1]!r}, got {len(cells)} cells: {line[:60]!r}. Correct the line, or get the file again."
                )
            broken.append(at)
            continue
        for column, place in zip(texts, places, strict=False):
            column.append(cells[place])
        y.append(number[cells[places[-1]]])
    if len(broken) * BROKEN > len(lines):
        raise InputError(f"{path}: {len(broken)} of {len(lines)} lines are broken, first line {broken[0]}. Get the file again.")
    if not y:
        raise InputError(f"{path}: holds no records. Get the file again.")
    return Texts(texts[0], texts[1] if len(texts) > 1 else None, torch.tensor(y), len(broken))


def load_tokenizer(folder: str | Path) -> Any:
    """The transformers tokenizer in a folder: saved by transformers, or the bare vocabulary of BERT or RoBERTa. No code in the
    folder is run, and nothing is fetched."""
    folder = Path(folder)
    try:
        import transformers
    except ImportError as error:
        raise InputError("tokenizer: it needs the package transformers. pip install 'dpfed[models]'") from error
    if any((folder / name).is_file() for name in ("tokenizer.json", "config.json")):
        kind: Any = transformers.AutoTokenizer
    elif (folder / "vocab.txt").is_file():
        kind = transformers.BertTokenizer
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        kind = transformers.RobertaTokenizer
    else:
        raise InputError(
            f"tokenizer: '{folder}' is no folder with one (tokenizer.json; or vocab.txt of BERT; or vocab.json and merges.txt "
            "of RoBERTa), and none is fetched. Name the folder of a model that transformers saved with its tokenizer: "
            "--task.model FOLDER, or --task.tokenizer FOLDER."
        )
    try:
        return kind.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a damaged vocabulary makes the tokenizer raise
        raise InputError(f"{folder}: its tokenizer cannot be loaded ({error}). Save it again with transformers.") from error


def tokenise(texts: Texts, tokenizer: Any, length: int = 128) -> Records:
    """Texts as columns of one fixed length: ``input_ids`` int32, ``attention_mask`` bool, ``y``; for pairs also
    ``token_type_ids`` where the model takes them. What is longer is cut, the longer text of a pair first."""
    special = tokenizer.num_special_tokens_to_add(pair=texts.second is not None)
    most = tokenizer.model_max_length
    if not special < length <= most:
        raise InputError(f"length: takes {special + 1} to {most} tokens here, got {length}. Set it to 64 or 128 for sentences.")
    if tokenizer.pad_token is None:
        raise InputError("tokenizer: has no padding token. Set one: tokenizer.pad_token = tokenizer.eos_token")
    pairs = texts.second is not None and "token_type_ids" in tokenizer.model_input_names
    kinds = {"input_ids": torch.int32, "attention_mask": torch.bool} | ({"token_type_ids": torch.int32} if pairs else {})
    records = {name: torch.empty(len(texts.y), length, dtype=dtype) for name, dtype in kinds.items()}
    for start in range(0, len(texts.y), 10_000):
        part = slice(start, start + 10_000)
        found = tokenizer(
            texts.first[part],
            None if texts.second is None else texts.second[part],
            padding="max_length",
            truncation="longest_first",
            max_length=length,
            return_token_type_ids=pairs,
            return_tensors="np",
        )
        for name, column in records.items():
            column[part] = torch.from_numpy(found[name])
    return records | {"y": texts.y}
