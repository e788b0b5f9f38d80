"""Transformers from a local folder, by their names on the hub, or from their published configuration with keyed weights.

Only tensors are read: safetensors, never a pickle, and no code that comes with a model is run. All use the attention of
`dpfed.fast`. Pictures are expected as floats: put `dpfed.tasks.images.Normalise` before them.
"""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from dpfed import fast
from dpfed.errors import InputError
from dpfed.models.convolutional import seeded

HEADS = ("classifier", "score")
"""What stands on top of a classifier, in the words of transformers: new for other classes, and always trained."""

RATES = ("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "classifier_dropout", "drop_path_rate")

Name = Literal["vit-tiny", "vit-base", "swin-tiny", "swin-base", "roberta-base", "bert-base", "tinyllama"]
VIT = {"num_hidden_layers": 12, "image_size": 224, "patch_size": 16}
SWIN = {"image_size": 224, "patch_size": 4, "window_size": 7}
TWELVE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
LLAMA = {"hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4}
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "vit-tiny": ("ViTConfig", VIT | {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}),
    "vit-base": ("ViTConfig", VIT | TWELVE),
    "swin-tiny": ("SwinConfig", SWIN | {"embed_dim": 96, "depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24]}),
    "swin-base": ("SwinConfig", SWIN | {"embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32]}),
    "roberta-base": (
        "RobertaConfig",
        TWELVE
        | {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
        | {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    ),
    "bert-base": ("BertConfig", TWELVE | {"vocab_size": 28996}),  # cased, as the DP-AdamW paper has it
    "tinyllama": ("LlamaConfig", LLAMA | {"intermediate_size": 5632, "vocab_size": 32000, "max_position_embeddings": 2048}),
}


def configuration(name: Name, **changes: Any) -> Any:
    """The published configuration of an architecture, with changes: say ``image_size=32, patch_size=4`` for small pictures."""
    if name not in PUBLISHED:
        raise InputError(f"configuration: there is no {name!r}. Use one of: {', '.join(PUBLISHED)}.")
    kind, settings = PUBLISHED[name]
    return getattr(library("transformers"), kind)(**(settings | changes))


class ImageClassifier(nn.Module):
    """Pictures as floats ``[n, C, h, w]`` -> logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.model(pixel_values=pixel_values).logits


def image_classifier(
    source: str | Path | Any, num_classes: int | None = None, *, dropout: float | None = None, seed: int = 0
) -> ImageClassifier:
    """ViT, Swin and their like.

    Args:
        source: a folder that ``save_pretrained`` wrote, a name on the hub, or a configuration: then the weights are random.
        num_classes: with other classes than it was trained on, the model gets a new head.
        dropout: the rate of all its dropouts; None: what its configuration says.
        seed: keys the weights that are new.
    """
    return ImageClassifier(load("AutoModelForImageClassification", source, num_classes, dropout, seed))


class MeanPool1d(nn.AdaptiveAvgPool1d):
    """The same mean. Torch's own layer has no rule for mapped axes."""

    def forward(self, input: Tensor) -> Tensor:
        return input.mean(-1, keepdim=True)


def load(kind: str, source: str | Path | Any, num_classes: int | None, dropout: float | None, seed: int) -> nn.Module:
    """A model of transformers, in float32, with the attention of this library. What is new in it is drawn by key."""
    transformers = library("transformers")
    fast.register()
    if hasattr(source, "model_type"):
        config = _changed(source, num_classes, dropout)
        with seeded(seed, "theta0"):
            return _mapped(getattr(transformers, kind).from_config(config, attn_implementation="dpfed", dtype=torch.float32))
    where = {"local_files_only": Path(source).is_dir(), "trust_remote_code": False}
    try:
        with _silent(transformers):
            config = _changed(transformers.AutoConfig.from_pretrained(str(source), **where), num_classes, dropout)
            setting = {"attn_implementation": "dpfed", "dtype": torch.float32, "use_safetensors": True}
            checks = {"ignore_mismatched_sizes": True, "output_loading_info": True}
            with seeded(seed, "theta0"):
                found = getattr(transformers, kind).from_pretrained(str(source), config=config, **where, **setting, **checks)
    except Exception as error:  # whatever a damaged folder, or a hub out of reach, makes transformers raise
        raise InputError(
            f"model: '{source}' cannot be loaded ({error}). Name a folder with config.json and model.safetensors, as "
            "save_pretrained writes it, or a model on the hub that has safetensors."
        ) from error
    model, said = cast(tuple[nn.Module, dict[str, Any]], found)
    new = {*said["missing_keys"], *(name for name, *_ in said["mismatched_keys"])}
    if strange := sorted(name for name in new if not {*HEADS, "pooler"} & set(name.split("."))):
        raise InputError(
            f"model: '{source}' has no weights, or such of another shape, for {', '.join(strange[:3])} ({len(strange)} "
            "tensors), which lie outside of the head. Name a model of the architecture that its config.json states."
        )
    return _mapped(model)


def _mapped(model: nn.Module) -> nn.Module:
    for part in model.modules():
        if type(part) is nn.AdaptiveAvgPool1d and part.output_size == 1:
            part.__class__ = MeanPool1d
    return model


def library(name: str) -> Any:
    """transformers or peft, which come with the extra ``models``."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(f"model: it needs the package {name}. pip install 'dpfed[models]'") from error


def _changed(config: Any, num_classes: int | None, dropout: float | None) -> Any:
    config = copy.deepcopy(config)
    if num_classes is not None and num_classes != config.num_labels:
        if num_classes < 2:
            raise InputError(f"num_classes: must be at least 2, got {num_classes}.")
        config.num_labels = num_classes
    if dropout is not None:
        if not 0 <= dropout < 1:
            raise InputError(f"dropout: must be at least 0 and below 1, got {dropout}.")
        for name in RATES:
            if hasattr(config, name):
                setattr(config, name, dropout)
    return config


@contextmanager
def _silent(transformers: Any) -> Generator[None]:
    """What transformers would report of a loaded model is checked here instead."""
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before[0])
        if before[1]:
            logging.enable_progress_bar()
