"""One file, one idea, five methods."""

from dpfed.algorithms.fed_adamw import FedAdamW
from dpfed.algorithms.fed_avg import FedAvg
from dpfed.algorithms.local_adamw import LocalAdamW

__all__ = ["FedAdamW", "FedAvg", "LocalAdamW"]
