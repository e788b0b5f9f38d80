"""The models of the papers, ready for `FlatModel`: convolutional ones, transformers, and what of them is trained."""

from dpfed.models.convolutional import resnet18, tanh_cnn, wide_resnet
from dpfed.models.text import causal_lm, next_token, sequences, text_classifier
from dpfed.models.transformer import configuration, image_classifier
from dpfed.models.tuning import lora, train_all, train_head, train_last

__all__ = [
    "causal_lm",
    "configuration",
    "image_classifier",
    "lora",
    "next_token",
    "resnet18",
    "sequences",
    "tanh_cnn",
    "text_classifier",
    "train_all",
    "train_head",
    "train_last",
    "wide_resnet",
]
