"""Rounds of federated averaging by one of several libraries, in a process of its own: see round_overhead.py.

Runs in whichever environment has the library, so nothing but PyTorch is imported at the top. Everybody trains the same linear
model on the same records, one SGD step on 8 of a client's 20 records, and averages. A parent process sends a number of rounds
a line, and is told the seconds by the wall clock and by this process's CPU clock.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

FEATURES, CLASSES, RECORDS, BATCH, LR = 20, 2, 20, 8, 0.1
CLIP, SIGMA = 1.0, 1.0
Rounds = Callable[[int], object]
Serve = Callable[[Rounds], None]


class Size(NamedTuple):
    num_clients: int
    cohort: int


def records(client: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(client)
    x = torch.randn(RECORDS, FEATURES, generator=random)
    return x, (x[:, 0] + 0.1 * client % 1 > 0).long()


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(FEATURES, CLASSES)


def dpfed_rounds(mechanism: str, size: Size, serve: Serve) -> None:
    """Everything that `dpfed.run` does in a round: the charge on the disk, the row, the checkpoint."""
    from dpfed import FedAvg, Gaussian, Plain, Recipe, Simulation, Task, from_clients
    from dpfed.rounds import begin

    federation = from_clients([records(i) for i in range(size.num_clients)], equal_records=True)
    mechanisms: dict[str, Any] = {
        "plain": Plain(batch_size=BATCH),
        "records private": Gaussian(sigma=SIGMA, clip=CLIP, batch_size=BATCH),
        "clients private": Gaussian(sigma=SIGMA, clip=CLIP, batch_size=BATCH, unit="client"),
    }
    recipe = Recipe(
        Task(linear(), federation),
        FedAvg(lr=LR, weight_decay=0.0),
        mechanisms[mechanism],
        rounds=20_000 if size.cohort <= 100 else 4_000,
        local_steps=1,
        cohort=size.cohort,
        schedule="constant",
        evaluate_every=10**6,
        engine=Simulation(device="cpu"),
    )
    with TemporaryDirectory() as folder:
        record, rows = begin(recipe, Path(folder) / "run")
        serve(lambda num: [next(rows) for _ in range(num)])
        record.close()


def pfl_rounds(mechanism: str, size: Size, serve: Serve) -> None:
    """pfl-research: a model that is reset for every user, one after the other (Granqvist et al., 2024, arXiv 2404.06430)."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel
    from pfl.privacy.gaussian_mechanism import GaussianMechanism
    from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear()

        def loss(self, x: Tensor, y: Tensor, is_eval: bool = False) -> Tensor:
            return nn.functional.cross_entropy(self.linear(x), y)

        def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
            return {}

    module = Model()
    data = [Dataset(raw_data=list(records(i)), user_id=str(i)) for i in range(size.num_clients)]
    users = FederatedDataset(lambda i: data[i], get_user_sampler("random", list(range(size.num_clients))))
    noise = [CentrallyAppliedPrivacyMechanism(GaussianMechanism(CLIP, SIGMA))] if mechanism == "clients private" else []
    backend = SimulatedBackend(training_data=users, val_data=None, postprocessors=noise)
    optimizer = torch.optim.SGD(module.parameters(), 1.0)
    model = PyTorchModel(module, local_optimizer_create=torch.optim.SGD, central_optimizer=optimizer)
    steps = {"local_num_epochs": None, "local_num_steps": 1, "local_batch_size": BATCH, "local_learning_rate": LR}

    def rounds(num: int) -> None:
        plan = {"central_num_iterations": num, "evaluation_frequency": 10**9, "val_cohort_size": 0}
        FederatedAveraging().run(
            algorithm_params=NNAlgorithmParams(train_cohort_size=size.cohort, **plan),
            backend=backend,
            model=model,
            model_train_params=NNTrainHyperParams(**steps),
        )

    serve(rounds)


def flower_rounds(mechanism: str, size: Size, serve: Serve) -> None:
    """Flower's simulation: its own FedAvg strategy, clients in Ray actors, one on each core."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client_app, server_app = ClientApp(), ServerApp()

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        x, y = records(int(context.node_config["partition-id"]))
        module = linear()
        module.load_state_dict(message.content["arrays"].to_torch_state_dict())
        chosen = torch.randperm(RECORDS)[:BATCH]
        optimizer = torch.optim.SGD(module.parameters(), LR)
        nn.functional.cross_entropy(module(x[chosen]), y[chosen]).backward()
        optimizer.step()
        content = {"arrays": ArrayRecord(module.state_dict()), "metrics": MetricRecord({"num-examples": RECORDS})}
        return Message(content=RecordDict(content), reply_to=message)

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        share = {"fraction_train": size.cohort / size.num_clients, "fraction_evaluate": 0.0}
        strategy = FedAvg(**share, min_train_nodes=size.cohort, min_available_nodes=size.num_clients)
        arrays = ArrayRecord(linear().state_dict())
        serve(lambda num: strategy.start(grid=grid, initial_arrays=arrays, num_rounds=num))

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, num_supernodes=size.num_clients, backend_config=resources)


CONTESTANTS = {"dpfed": dpfed_rounds, "pfl": pfl_rounds, "flower": flower_rounds}


def main(name: str, mechanism: str, num_clients: str, cohort: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print must not get between the answers
    torch.set_num_threads(1)

    def serve(rounds: Rounds) -> None:
        for line in sys.stdin:
            wall, cpu = time.perf_counter(), time.process_time()
            rounds(int(line))
            print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]), file=answers, flush=True)

    CONTESTANTS[name](mechanism, Size(int(num_clients), int(cohort)), serve)


if __name__ == "__main__":
    main(*sys.argv[1:])
