"""Tasks: a model, a federation, and how to judge. Ready-made ones, and one for your own."""

from dpfed.tasks.citation import Citation
from dpfed.tasks.custom import Task
from dpfed.tasks.fashion import FashionMini

__all__ = ["Citation", "FashionMini", "Task"]
