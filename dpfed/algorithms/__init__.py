"""One file, one idea, five methods."""

from dpfed.algorithms.adam import Adam
from dpfed.algorithms.adam_bc import AdamBC
from dpfed.algorithms.adamw import AdamW
from dpfed.algorithms.adamw_bc import AdamWBC
from dpfed.algorithms.fafed import FAFED
from dpfed.algorithms.fed_adamw import FedAdamW
from dpfed.algorithms.fed_avg import FedAvg
from dpfed.algorithms.fed_avg_ls import FedAvgLS
from dpfed.algorithms.fed_cm import FedCM
from dpfed.algorithms.fed_lada import FedLADA
from dpfed.algorithms.fed_opt import FedOpt
from dpfed.algorithms.fed_prox import FedProx
from dpfed.algorithms.fed_sam import FedSAM
from dpfed.algorithms.local_adam import LocalAdam
from dpfed.algorithms.local_adamw import LocalAdamW
from dpfed.algorithms.micro_adam import MicroAdam
from dpfed.algorithms.scaffold import Scaffold
from dpfed.algorithms.sgd import SGD

__all__ = [
    "FAFED",
    "SGD",
    "Adam",
    "AdamBC",
    "AdamW",
    "AdamWBC",
    "FedAdamW",
    "FedAvg",
    "FedAvgLS",
    "FedCM",
    "FedLADA",
    "FedOpt",
    "FedProx",
    "FedSAM",
    "LocalAdam",
    "LocalAdamW",
    "MicroAdam",
    "Scaffold",
]
