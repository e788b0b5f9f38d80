"""Tasks: a model, a federation, and how to judge. Ready-made ones, and one for your own."""

from dpfed.tasks.citation import Citation
from dpfed.tasks.custom import Task
from dpfed.tasks.fashion import FashionMini
from dpfed.tasks.finetuning import Pictures, Sentences, Tuning

__all__ = ["Citation", "FashionMini", "Pictures", "Sentences", "Task", "Tuning"]
