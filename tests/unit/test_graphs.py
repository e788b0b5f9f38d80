"""Graphs from files in the layouts in which they are handed out, whole and damaged; and the model on one record."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dpfed
from dpfed.errors import InputError
from dpfed.flat import FlatModel
from dpfed.tasks.citation import Citation, GraphConvolution
from dpfed.tasks.graphs import read_arxiv, read_graph, read_planetoid

SHARED = Path(os.environ.get("DPFED_SHARED", Path(__file__).parents[3] / "shared"))


def planetoid_columns() -> dict[str, Any]:
    return {
        "x_data": np.array([3, 4, 1, 2], dtype=np.float32),
        "x_indices": np.array([0, 2, 1, 3], dtype=np.int32),
        "x_indptr": np.array([0, 2, 3, 3, 4], dtype=np.int32),
        "x_shape": np.array([4, 4]),
        "y": np.array([0, 6, 2, 1]),
        "edges": np.array([[0, 1, 2], [1, 2, 3]], dtype=np.int32),
        "train": np.array([0, 1]),
        "val": np.array([2]),
        "test": np.array([3]),
    }


def planetoid(folder: Path, **changes: Any) -> Path:
    (folder / "planetoid").mkdir(exist_ok=True)
    columns = {name: column for name, column in (planetoid_columns() | changes).items() if column is not None}
    np.savez(folder / "planetoid" / "cora.npz", **columns)
    return folder


NODES = 6


def arxiv(folder: Path, ending: str = ".csv.gz", **changes: str | bytes | None) -> Path:
    """The folder as OGB unpacks it. A change of None leaves the file out, bytes are written as they are."""
    random = np.random.default_rng(0)
    features = "\n".join(",".join(f"{value:.6f}" for value in row) for row in random.normal(size=(NODES, 128)))
    files: dict[str, str | bytes | None] = {
        "raw/edge": "0,1\n1,2\n4,5\n",
        "raw/node-feat": features,
        "raw/node-label": "4\n5\n28\n8\n27\n39\n",
        "raw/num-node-list": f"{NODES}\n",
        "raw/num-edge-list": "3\n",
        "split/time/train": "0\n1\n2\n",
        "split/time/valid": "3\n",
        "split/time/test": "4\n5\n",
    }
    for name, text in (files | {name.replace("__", "/").replace("_", "-"): text for name, text in changes.items()}).items():
        path = folder / "ogbn_arxiv" / (name + ending)
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            data = text.encode() if isinstance(text, str) else text
            path.write_bytes(gzip.compress(data) if ending.endswith("gz") and isinstance(text, str) else data)
    return folder


def test_planetoid_is_read_and_every_node_has_length_one(tmp_path: Path) -> None:
    graph = read_planetoid("cora", planetoid(tmp_path))
    expected = [[0.6, 0, 0.8, 0], [0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]]
    torch.testing.assert_close(graph.x, torch.tensor(expected))
    assert graph.edges.tolist() == [[0, 1, 2], [1, 2, 3]]
    assert [part.tolist() for part in (graph.y, graph.train, graph.val, graph.test)] == [[0, 6, 2, 1], [0, 1], [2], [3]]
    beside = tmp_path / "planetoid"
    assert read_graph("cora", beside).y.equal(graph.y), "the folder itself may be named, too"


@pytest.mark.parametrize("ending", [".csv.gz", ".csv"])
def test_arxiv_is_read(tmp_path: Path, ending: str) -> None:
    graph = read_arxiv(arxiv(tmp_path, ending))
    assert graph.x.shape == (NODES, 128)
    assert graph.x.dtype == torch.float32
    assert graph.y.tolist() == [4, 5, 28, 8, 27, 39]
    assert graph.edges.tolist() == [[0, 1, 4], [1, 2, 5]]
    assert [part.tolist() for part in (graph.train, graph.val, graph.test)] == [[0, 1, 2], [3], [4, 5]]


def test_what_is_missing_is_named_with_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"pubmed\.npz.*github\.com/kimiyoung/planetoid"):
        read_planetoid("pubmed", planetoid(tmp_path))
    with pytest.raises(InputError, match=r"raw/edge\.csv.*split/time/test\.csv.*ogb\.stanford\.edu"):
        read_arxiv(tmp_path)
    arxiv(tmp_path, raw__node_label=None)
    with pytest.raises(InputError, match=r"missing ogbn_arxiv/raw/node-label\.csv\[\.gz\] "):
        read_arxiv(tmp_path)
    monkeypatch.setenv("DPFED_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="DPFED_DATA"):
        Citation("citeseer").build(0)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"edges": None}, "edges"),
        ({"x_indptr": np.array([0, 2, 3, 4])}, "matrix"),
        ({"x_indptr": np.array([0, 3, 2, 3, 4])}, "matrix"),
        ({"x_shape": np.array([4])}, "matrix"),
        ({"x_shape": np.array([4, 10**12])}, "matrix"),
        ({"x_indices": np.array([0, 2, 1, 4])}, "matrix"),
        ({"x_data": np.array([1, np.nan, 1, 1], dtype=np.float32)}, "NaN"),
        ({"y": np.array([0, 6, 2])}, "labels"),
        ({"y": np.array([0, 7, 2, 1])}, "labels"),
        ({"y": np.array([0.0, 1.0, 2.0, 1.0])}, "labels"),
        ({"edges": np.array([[0, 1], [1, 4]])}, "edges"),
        ({"edges": np.array([[0, -1], [1, 3]])}, "edges"),
        ({"edges": np.array([[0, 1, 2]])}, "edges"),
        ({"test": np.array([1])}, "twice"),
        ({"train": np.array([0, 9])}, "train"),
        ({"val": np.array([], dtype=np.int64)}, "val"),
        ({"y": np.array([{}, {}, {}, {}], dtype=object)}, "cannot be read"),
    ],
)
def test_a_damaged_planetoid_file_is_refused(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InputError, match=rf"cora\.npz.*{complaint}"):
        read_planetoid("cora", planetoid(tmp_path, **changes))


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"not an npz"])
def test_a_torn_planetoid_file_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = planetoid(tmp_path) / "planetoid" / "cora.npz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(InputError, match=r"cora\.npz: (cannot be read|is empty)"):
        read_planetoid("cora", tmp_path)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"raw__edge": "0,1\n1,2\n"}, "num-edge-list"),
        ({"raw__edge": "0,1\n1,two\n4,5\n"}, "edge.csv.gz: is not a table"),
        ({"raw__edge": "0,1\n1,6\n4,5\n"}, "edges"),
        ({"raw__edge": "0,1,2\n1,3,2\n4,5,2\n"}, "3 columns, should have 2"),
        ({"raw__edge": b"no gzip"}, "edge.csv.gz: is damaged"),
        ({"raw__node_feat": gzip.compress(b"0.1,0.2\n" * 50)[:-12]}, "node-feat.csv.gz: is damaged"),
        ({"raw__node_feat": "0.1,0.2\n" * NODES}, "2 columns, should have 128"),
        ({"raw__node_label": "4\n5\n28\n"}, "labels"),
        ({"raw__node_label": "4\n5\n28\n8\n27\n40\n"}, "labels"),
        ({"raw__num_node_list": "7\n"}, "num-node-list"),
        ({"split__time__test": "2\n5\n"}, "twice"),
        ({"split__time__test": ""}, "empty"),
    ],
)
def test_a_damaged_arxiv_folder_is_refused(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        read_arxiv(arxiv(tmp_path, **changes))


# The model


def test_the_model_of_the_paper_has_its_number_of_parameters() -> None:
    """Table 5 of the DP-AdamW paper, tensor by tensor, for the 128 features and 40 classes of ogbn-arxiv."""
    model = FlatModel(GraphConvolution(128, 40))
    shapes = sorted(part.shape for part in model.layout.parts)
    assert shapes == sorted([(255,), (255, 128), (255,), (255, 255), (255,), (255, 255), (40,), (40, 255)])
    assert model.num_parameters == 173_695


def test_neighbours_that_are_not_there_do_not_count() -> None:
    """An empty place holds nothing: neither what stands in it nor how many of them there are."""
    torch.manual_seed(0)
    module = GraphConvolution(3, 2, hidden=5)
    x, neighbours = torch.randn(1, 3), torch.randn(1, 4, 3)
    alone = module(x)
    torch.testing.assert_close(module(x, neighbours, torch.zeros(1, 4, dtype=torch.bool)), alone)
    two = torch.tensor([[False, True, True, False]])
    torch.testing.assert_close(module(x, neighbours, two), module(x, neighbours[:, 1:3], torch.ones(1, 2, dtype=torch.bool)))
    assert not torch.allclose(module(x, neighbours, two), alone)
    hidden = torch.stack([module.encoder(node).tanh() for node in (x[0], neighbours[0, 1], neighbours[0, 2])]).mean(0)
    torch.testing.assert_close(module(x, neighbours, two)[0], module.decoder(module.core(hidden).tanh() + hidden))


# A run


def larger(folder: Path, n: int = 120) -> Path:
    """A graph whose neighbours tell the label."""
    random = np.random.default_rng(0)
    y = random.integers(0, 7, n)
    mates = [random.choice(np.flatnonzero(y == label), 3) for label in y]
    return planetoid(
        folder,
        x_data=np.ones(n, dtype=np.float32),
        x_indices=y + 7 * random.integers(0, 2, n),
        x_indptr=np.arange(n + 1),
        x_shape=np.array([n, 14]),
        y=y,
        edges=np.array([(i, j) for i, some in enumerate(mates) for j in some]).T,
        train=np.arange(20),
        val=np.arange(80, 100),
        test=np.arange(100, n),
    )


@pytest.mark.parametrize("num_clients", [1, 4])
def test_a_run_charges_for_nodes_and_keeps_its_target(tmp_path: Path, num_clients: int) -> None:
    task = Citation("cora", root=str(larger(tmp_path)), degree=1, hidden=8, num_clients=num_clients)
    mechanism = dpfed.Gaussian(epsilon=3.0, batch_size=5)
    recipe = dpfed.Recipe(task, dpfed.AdamW(lr=0.01), mechanism, rounds=3, local_steps=1, cohort=num_clients)
    record = dpfed.run(recipe, tmp_path / "run")
    events = {event for receipt in record.ledger for event in receipt.events}
    assert {(event.owned, event.readers) for event in events} == {(1, 2)}
    assert 2.99 < record.ledger.epsilon(recipe.delta) <= 3.0
    assert "read by at most 2 others" in record.statement()
    assert "at most 5C" in record.statement()
    features = replace(task, degree=0)
    alone = dpfed.run(replace(recipe, task=features), tmp_path / "alone")
    assert record.recipe["sigma"] > 2 * alone.recipe["sigma"]


@pytest.mark.skipif(not (SHARED / "data" / "planetoid").is_dir(), reason="the real graphs are not here")
@pytest.mark.parametrize(
    ("name", "nodes", "features", "links", "train"),
    [("cora", 2708, 1433, 5278, 140), ("citeseer", 3327, 3703, 4552, 120), ("pubmed", 19717, 500, 44324, 60)],
)
def test_the_real_graphs_are_read_whole(name: Any, nodes: int, features: int, links: int, train: int) -> None:
    graph = read_planetoid(name, SHARED / "data")
    assert graph.x.shape == (nodes, features)
    assert graph.edges.shape == (2, links)
    assert [len(part) for part in (graph.train, graph.val, graph.test)] == [train, 500, 1000]
    norms = graph.x.norm(dim=1)
    assert bool(((norms - 1).abs() < 1e-5).logical_or(norms == 0).all())
