"""Which subject is a paper about? Citation graphs, where the guarantee protects a paper together with its links."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from dpfed.data import RECORD, Federation, dirichlet
from dpfed.errors import InputError
from dpfed.flat import FlatModel
from dpfed.tasks.fashion import start
from dpfed.tasks.graphs import CLASSES, Graph, GraphName, read_graph
from dpfed.tasks.neighbourhoods import Pairs, bound_readers, draw_lists, footprint, linked, rooted


class GraphConvolution(nn.Module):
    """The DP-GCN of Daigavane et al. 2021 (arXiv 2111.15521) with the shapes of the DP-AdamW paper's table 5, on one record.

    Encoder, one hop, decoder. The hop is a mean over the node and its neighbours, then a layer with a skip connection. For
    ogbn-arxiv: 128 x 255 + 255, twice 255 x 255 + 255, 255 x 40 + 40, together 173,695 parameters. Without neighbours it is an
    ordinary network on the features alone, with the same parameters.
    """

    def __init__(self, num_features: int, num_classes: int, hidden: int = 255) -> None:
        super().__init__()
        self.encoder = nn.Linear(num_features, hidden)
        self.core = nn.Linear(hidden, hidden)
        self.decoder = nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, num_classes))

    def forward(self, x: Tensor, neighbours: Tensor | None = None, there: Tensor | None = None) -> Tensor:
        hop = self.encoder(x).tanh()
        if neighbours is not None and there is not None:
            around = self.encoder(neighbours).tanh() * there.unsqueeze(-1)
            hop = (hop + around.sum(1)) / (1 + there.sum(1, keepdim=True))
        return self.decoder(self.core(hop).tanh() + hop)


@dataclass(frozen=True)
class Citation:
    """Papers of a citation graph (Cora, CiteSeer, PubMed, ogbn-arxiv), one client or many.

    A client knows only links between its own training papers. The weights are protected; whoever predicts for a paper reads its
    neighbours anew, and what a prediction tells of them is not part of the guarantee.

    Args:
        graph: cora, citeseer, pubmed or arxiv; the files lie in or under root.
        root: the folder with the data (default: DPFED_DATA).
        degree: neighbours that a paper reads at most, and that read it; 0 is the features alone.
        hidden: width of the layers.
        num_clients: who share the training papers; 1 is centralised training.
        alpha: how unlike their subjects are: 0.1 very, 100 hardly, inf at random.
        train_on: all papers but those for validation and test, or the few (60 to 140) of Planetoid's public split.
        judge: accuracy on the papers for test, or on those for validation (to choose learning rates).
    """

    graph: GraphName = "pubmed"
    root: str | None = None
    degree: int = 2
    hidden: int = 255
    num_clients: int = 1
    alpha: float = math.inf
    train_on: Literal["all", "public"] = "all"
    judge: Literal["test", "val"] = "test"

    def __post_init__(self) -> None:
        for name, least in (("degree", 0), ("hidden", 1), ("num_clients", 1)):
            if getattr(self, name) < least:
                raise InputError(f"task.{name}: must be at least {least}, got {getattr(self, name)}.")

    def build(self, seed: int) -> tuple[FlatModel, Federation]:
        module, federation = self.records(read_graph(self.graph, self.root), seed)
        start(module, seed)
        return FlatModel(module), federation

    def records(self, graph: Graph, seed: int) -> tuple[nn.Module, Federation]:
        """The model, and the graph as one record for every paper that is trained or judged on."""
        train, judged = self._train(graph), graph.test if self.judge == "test" else graph.val
        clients = dirichlet((train, graph.y[train]), self.num_clients, alpha=self.alpha, seed=seed).clients
        num_classes = max(CLASSES[self.graph], int(graph.y.max()) + 1)
        module = GraphConvolution(graph.x.shape[1], num_classes, self.hidden)
        if not self.degree:
            pool, test = ({"x": graph.x[rows], "y": graph.y[rows]} for rows in (train, judged))
            return module, Federation(pool, clients, test, footprint=RECORD)
        pairs, owner = linked(graph.edges), np.full(len(graph.x), -1)
        for i, rows in enumerate(clients):
            owner[train[rows].numpy()] = i
        read = bound_readers(draw_lists(within_clients(pairs, owner), self.degree, seed), self.degree, seed)
        pool = rooted(graph.x, graph.y, train, read, self.degree)
        test = rooted(graph.x, graph.y, judged, draw_lists(pairs, 4 * self.degree, seed), 4 * self.degree)
        return module, Federation(pool, clients, test, footprint=footprint(self.degree))

    def _train(self, graph: Graph) -> Tensor:
        if self.train_on == "public":
            return graph.train
        rest = torch.ones(len(graph.x), dtype=torch.bool)
        rest[torch.cat([graph.val, graph.test])] = False
        return rest.nonzero().squeeze(1)


def within_clients(pairs: Pairs, owner: np.ndarray) -> Pairs:
    """The pairs whose two nodes belong to one client."""
    return pairs[(owner[pairs[:, 0]] >= 0) & (owner[pairs[:, 0]] == owner[pairs[:, 1]])]
