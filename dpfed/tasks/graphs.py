"""Citation graphs from the files in which they are handed out: Planetoid's three as ``.npz``, ogbn-arxiv as its OGB folder."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from dpfed.errors import InputError
from dpfed.tasks.folders import DataSet, plain_or_gz, read_bytes, read_text

GraphName = Literal["cora", "citeseer", "pubmed", "arxiv"]
CLASSES = {"cora": 7, "citeseer": 6, "pubmed": 3, "arxiv": 40}
NPZ_COLUMNS = ("x_data", "x_indices", "x_indptr", "x_shape", "y", "edges", "train", "val", "test")
ARXIV = DataSet(
    "ogbn-arxiv",
    ("ogbn_arxiv", "arxiv"),
    (
        *(f"raw/{name}.csv[.gz]" for name in ("edge", "node-feat", "node-label", "num-node-list", "num-edge-list")),
        *(f"split/time/{name}.csv[.gz]" for name in ("train", "valid", "test")),
    ),
    "https://ogb.stanford.edu/docs/nodeprop (arxiv.zip)",
)


class Graph(NamedTuple):
    """Papers with features and a label each, who cites whom, and which papers are for training, validation and test."""

    x: Tensor  # [n, features]
    y: Tensor  # [n]
    edges: Tensor  # [2, links], in no particular direction
    train: Tensor
    val: Tensor
    test: Tensor


def read_graph(name: GraphName, root: str | Path | None = None) -> Graph:
    """A graph by name, from a folder in or under ``root`` (default: DPFED_DATA)."""
    return read_arxiv(root) if name == "arxiv" else read_planetoid(name, root)


def read_planetoid(name: Literal["cora", "citeseer", "pubmed"], root: str | Path | None = None) -> Graph:
    """Cora, CiteSeer or PubMed: sparse features in the columns x_data, x_indices, x_indptr, x_shape, labels, links, node ids.

    Every paper's features are brought to length 1, each by itself.
    """
    source = "https://github.com/kimiyoung/planetoid, made one npz with the columns " + ", ".join(NPZ_COLUMNS)
    path = DataSet(name, ("planetoid", "."), (f"{name}.npz",), source).find(root) / f"{name}.npz"
    try:
        with np.load(io.BytesIO(read_bytes(path, 2**31)), allow_pickle=False) as stored:
            columns = {column: stored[column] for column in NPZ_COLUMNS}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{path}: cannot be read ({error}). Get the file again, with the columns {NPZ_COLUMNS}.") from error
    data, indices, indptr = (columns[f"x_{part}"] for part in ("data", "indices", "indptr"))
    num_nodes, num_features = [int(n) for n in (*columns["x_shape"].flat, 0, 0)][:2]
    whole = (
        len(indptr) == num_nodes + 1 and 0 < num_features < 2**20 and indptr[0] == 0 and indptr[-1] == len(data) == len(indices)
    )
    if not whole or (np.diff(indptr) < 0).any() or (len(indices) and not 0 <= indices.min() <= indices.max() < num_features):
        raise InputError(f"{path}: x_data, x_indices, x_indptr are no {num_nodes} x {num_features} matrix. Get it again.")
    x = np.zeros((num_nodes, num_features), dtype=np.float32)
    x[np.repeat(np.arange(num_nodes), np.diff(indptr)), indices] = data
    x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    ids = (columns[part] for part in ("train", "val", "test"))
    return checked(str(path), CLASSES[name], x, columns["y"], columns["edges"], *ids)


def read_arxiv(root: str | Path | None = None) -> Graph:
    """ogbn-arxiv as OGB unpacks it: raw/*.csv.gz, and the split by the papers' years."""
    folder = ARXIV.find(root)

    def column(name: str, kind: type, width: int = 1) -> Any:
        path = plain_or_gz(folder, f"{name}.csv[.gz]")
        try:
            rows = np.loadtxt(io.StringIO(read_text(path)), delimiter=",", dtype=kind, ndmin=2)
        except ValueError as error:
            raise InputError(f"{path}: is not a table of numbers ({error}). Get the file again.") from error
        if rows.shape[1] != width:
            raise InputError(f"{path}: has {rows.shape[1]} columns, should have {width}. Get the file again.")
        return rows if width > 1 else rows[:, 0]

    x, y = column("raw/node-feat", np.float32, 128), column("raw/node-label", np.int64)
    edges = column("raw/edge", np.int64, 2).T
    for name, found in (("num-node-list", len(x)), ("num-edge-list", edges.shape[1])):
        if (said := column(f"raw/{name}", np.int64).tolist()) != [found]:
            raise InputError(f"{folder}/raw: {name} says {said}, but the tables hold {found}. Get the files again.")
    ids = (column(f"split/time/{name}", np.int64) for name in ("train", "valid", "test"))
    return checked(str(folder), CLASSES["arxiv"], x, y, edges, *ids)


def checked(where: str, num_classes: int, x: Any, y: Any, edges: Any, *ids: Any) -> Graph:
    """The columns as a graph, refused where they do not belong together."""
    num_nodes, parts = len(x), dict(zip(("train", "val", "test"), ids, strict=True))
    wrong = [
        ("features: hold NaN or Inf", not np.isfinite(x).all()),
        (f"labels: {len(y)} for {num_nodes} nodes", y.shape != (num_nodes,)),
        (f"labels: must be whole numbers from 0 to {num_classes - 1}", not _within(y, num_classes)),
        ("edges: must be pairs of nodes", edges.ndim != 2 or len(edges) != 2 or not _within(edges, num_nodes)),
        *((f"{name}: must be ids of nodes", part.ndim != 1 or not _within(part, num_nodes)) for name, part in parts.items()),
    ]
    if complaint := next((text for text, bad in wrong if bad), None):
        raise InputError(f"{where}: {complaint}. Get the file again.")
    together = np.concatenate([*parts.values()])
    if len(np.unique(together)) != len(together):
        raise InputError(f"{where}: a node stands twice in train, val and test. A test node must not be trained on.")
    as_long = [torch.from_numpy(np.array(column, dtype=np.int64)) for column in (y, edges, *parts.values())]
    return Graph(torch.from_numpy(x), *cast(tuple[Tensor, Tensor, Tensor, Tensor, Tensor], tuple(as_long)))


def _within(numbers: Any, end: int) -> bool:
    return numbers.dtype.kind in "iu" and numbers.size > 0 and 0 <= int(numbers.min()) <= int(numbers.max()) < end
