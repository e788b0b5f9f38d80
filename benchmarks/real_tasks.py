"""Real tasks for the benchmarks: pretrained models under LoRA, on CIFAR-100 and on SST-2.

Where they lie is said by the environment, so that nothing here names a machine:
    BENCH_CIFAR     a folder with train.npz and test.npz: pictures in lossless WebP one behind the other (``data``, ``offsets``)
                    and their labels (``fine``)
    BENCH_VIT       a ViT for pictures of 32 pixels, saved by transformers
    BENCH_TEXT      a folder with a BERT (``minilm``, its tokenizer included) and GLUE (``glue``)
"""

from __future__ import annotations

import io
import os
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from dpfed import Task, dirichlet
from dpfed.flat import Records
from dpfed.models import image_classifier, lora, text_classifier
from dpfed.tasks.images import MEAN_STD, Normalise
from dpfed.tasks.text import load_tokenizer, read_glue, tokenise

NUM_CLIENTS = 50
ORDINARY: dict[str, Any] = {"rank": 16, "alpha": 32, "targets": "all-linear"}
SMALL: dict[str, Any] = {"rank": 2, "alpha": 4, "targets": ("query", "value", "q_proj", "v_proj")}  # as the versions call them


def folder(name: str) -> Path:
    return Path(os.environ[name])


@cache
def cifar() -> tuple[Records, Records]:
    def part(name: str) -> Records:
        with np.load(folder("BENCH_CIFAR") / f"{name}.npz") as stored:
            content, ends, labels = stored["data"].tobytes(), stored["offsets"], stored["fine"]
        pictures = [np.asarray(Image.open(io.BytesIO(content[a:b])).convert("RGB")) for a, b in pairwise(ends)]
        return {"x": torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous(), "y": torch.from_numpy(labels)}

    return part("train"), part("test")


@cache
def sst2() -> tuple[Records, Records]:
    words = load_tokenizer(folder("BENCH_TEXT") / "minilm")
    train, test = (tokenise(texts, words, length=64) for texts in read_glue("sst2", folder("BENCH_TEXT") / "glue"))
    return train, test


def vit(seed: int = 0, **lora_setting: Any) -> nn.Module:
    model = image_classifier(folder("BENCH_VIT"), 100, dropout=0.0, seed=seed)
    return nn.Sequential(Normalise(*MEAN_STD["imagenet"]), lora(model, seed=seed, **(ORDINARY | lora_setting)))


def minilm(seed: int = 0, **lora_setting: Any) -> nn.Module:
    model = text_classifier(folder("BENCH_TEXT") / "minilm", 2, dropout=0.0, seed=seed)
    return lora(model, seed=seed, **(ORDINARY | lora_setting))


def vit_on_cifar(seed: int = 0, num_clients: int = NUM_CLIENTS, **lora_setting: Any) -> Task:
    """Labels from Dirichlet(0.1)."""
    train, test = cifar()
    return Task(vit(seed, **lora_setting), dirichlet(train, num_clients, alpha=0.1, seed=seed, test=test))


def small_vit_on_cifar(seed: int = 0) -> Task:
    """For every method, also under local noise: clients with more records, so that batches can be larger at the same epsilon,
    and fewer coordinates."""
    return vit_on_cifar(seed, num_clients=20, **SMALL)


def minilm_on_sst2(seed: int = 0, **lora_setting: Any) -> Task:
    """50 clients, labels from Dirichlet(0.8)."""
    train, test = sst2()
    return Task(minilm(seed, **lora_setting), dirichlet(train, NUM_CLIENTS, alpha=0.8, seed=seed, test=test))
