"""dpfed: federated learning with a privacy guarantee for every single record.

>>> import torch, tempfile
>>> x, y = torch.randn(60, 4), torch.arange(60) % 3
>>> recipe = Recipe(
...     task=Task(torch.nn.Linear(4, 3), iid((x, y), num_clients=6)),
...     algorithm=FedAdamW(lr=0.01),
...     mechanism=Gaussian(epsilon=8.0, batch_size=10),
...     rounds=2, local_steps=2, cohort=3,
... )
>>> with tempfile.TemporaryDirectory() as folder:
...     record = run(recipe, folder + "/mine")
>>> 0 < record.ledger.epsilon(1e-5) <= 8
True
"""

from dpfed.adapters import save_adapter, save_merged
from dpfed.algorithms import (
    FAFED,
    SGD,
    Adam,
    AdamBC,
    AdamW,
    AdamWBC,
    FedAdamW,
    FedAvg,
    FedAvgLS,
    FedCM,
    FedLADA,
    FedOpt,
    FedProx,
    FedSAM,
    LocalAdam,
    LocalAdamW,
    MicroAdam,
    Scaffold,
)
from dpfed.alternating import Alternating
from dpfed.augment import pad_crop_flip
from dpfed.data import Federation, Footprint, by_user, dirichlet, from_clients, iid, quantity_skew, shards
from dpfed.engines.simulation import Simulation
from dpfed.errors import InputError
from dpfed.flat import FlatModel, Layout
from dpfed.holdings import federation_figure
from dpfed.ledger import Event, Ledger, Receipt, calibrate, epsilon
from dpfed.mechanism import AsReleased, Gaussian, Plain
from dpfed.recipe import Recipe
from dpfed.record import RunRecord
from dpfed.report import figure, table_text
from dpfed.rounds import run
from dpfed.tasks import Citation, FashionMini, Pictures, Sentences, Task, Tuning

__all__ = [
    "FAFED",
    "SGD",
    "Adam",
    "AdamBC",
    "AdamW",
    "AdamWBC",
    "Alternating",
    "AsReleased",
    "Citation",
    "Event",
    "FashionMini",
    "FedAdamW",
    "FedAvg",
    "FedAvgLS",
    "FedCM",
    "FedLADA",
    "FedOpt",
    "FedProx",
    "FedSAM",
    "Federation",
    "FlatModel",
    "Footprint",
    "Gaussian",
    "InputError",
    "Layout",
    "Ledger",
    "LocalAdam",
    "LocalAdamW",
    "MicroAdam",
    "Pictures",
    "Plain",
    "Receipt",
    "Recipe",
    "RunRecord",
    "Scaffold",
    "Sentences",
    "Simulation",
    "Task",
    "Tuning",
    "by_user",
    "calibrate",
    "dirichlet",
    "epsilon",
    "federation_figure",
    "figure",
    "from_clients",
    "iid",
    "pad_crop_flip",
    "quantity_skew",
    "run",
    "save_adapter",
    "save_merged",
    "shards",
    "table_text",
]
__version__ = "0.1.0"
