"""Pictures and sentences: a model, trained whole or fine-tuned, on a public data set that is dealt to clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, get_args

from torch import nn

from dpfed.augment import pad_crop_flip
from dpfed.data import Federation, dirichlet
from dpfed.errors import InputError
from dpfed.flat import FlatModel, Records
from dpfed.metrics import needs_shares
from dpfed.models.convolutional import resnet18, tanh_cnn, wide_resnet
from dpfed.models.text import text_classifier
from dpfed.models.transformer import PUBLISHED, configuration, image_classifier, library
from dpfed.models.tuning import lora, train_all, train_head, train_last
from dpfed.tasks.images import MEAN_STD, Normalise, read_cifar, read_fashion_mnist, read_tiny_imagenet
from dpfed.tasks.text import GLUE, load_tokenizer, read_glue, tokenise

PictureName = Literal["cifar10", "cifar100", "tiny_imagenet", "fashion_mnist"]
SentenceName = Literal["cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2"]
SENTENCES: tuple[SentenceName, ...] = get_args(SentenceName)

# Classes, channels and side of the pictures, and what reads them.
PICTURES: dict[PictureName, tuple[int, int, int, Callable[[str | None], tuple[Records, Records]]]] = {
    "cifar10": (10, 3, 32, partial(read_cifar, "cifar10")),
    "cifar100": (100, 3, 32, partial(read_cifar, "cifar100")),
    "tiny_imagenet": (200, 3, 64, read_tiny_imagenet),
    "fashion_mnist": (10, 1, 28, read_fashion_mnist),
}
CONVOLUTIONAL: dict[str, Callable[..., nn.Module]] = {
    "resnet-18": resnet18,
    "wrn-16-4": wide_resnet,
    "tanh-cnn": tanh_cnn,
}


@dataclass(frozen=True)
class Tuning:
    """What of a transformer is trained.

    Args:
        what: lora; ffa-lora (of LoRA's two factors only B); the head; the last layers with all behind them; or all.
        rank: of LoRA.
        alpha: LoRA counts alpha / rank.
        dropout: of what goes into LoRA.
        targets: where LoRA stands.
        layers: how many are the last ones.
    """

    what: Literal["lora", "ffa-lora", "head", "last", "all"] = "lora"
    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: Literal["attention", "all-linear"] = "attention"
    layers: int = 1

    def of(self, model: nn.Module, seed: int) -> nn.Module:
        if self.what == "head":
            return train_head(model)
        if self.what == "last":
            return train_last(model, self.layers)
        if self.what == "all":
            return train_all(model)
        return lora(
            model,
            rank=self.rank,
            alpha=self.alpha,
            dropout=self.dropout,
            targets=self.targets,
            freeze_a=self.what == "ffa-lora",
            seed=seed,
        )


@dataclass(frozen=True)
class Pictures:
    """CIFAR, Tiny-ImageNet or Fashion-MNIST in a Dirichlet federation; the data lie under root.

    Args:
        data: which pictures.
        model: vit-tiny, vit-base, swin-tiny, swin-base (random weights); resnet-18, wrn-16-4, tanh-cnn (trained whole); or the
            folder or the name on the hub of a pretrained model, which is what fine-tuning is for.
        tuning: what of a transformer is trained.
        size: the side to which pictures are enlarged; 0: what a pretrained model expects, 224 for the larger transformers, and
            as they are for vit-tiny and convolutional networks.
        pad: train on pictures that are moved by up to so many pixels and mirrored, afresh each time; 0 is as they are.
        num_clients: who share the training pictures.
        alpha: how unlike their label proportions are: 0.1 very, 100 hardly.
        root: the folder with the data (default: DPFED_DATA).
        metrics: what the rows say about the test pictures: accuracy, macro_accuracy, matthews, worst_client_accuracy.
    """

    data: PictureName = "cifar100"
    model: str = "vit-tiny"
    tuning: Tuning = field(default_factory=Tuning)
    size: int = 0
    pad: int = 0
    num_clients: int = 50
    alpha: float = 0.1
    root: str | None = None
    metrics: tuple[str, ...] = ("accuracy",)

    def build(self, seed: int) -> tuple[FlatModel, Federation]:
        _, num_channels, side, read = PICTURES[self.data]
        train, test = read(self.root)
        augment = pad_crop_flip(self.pad, shape=(num_channels, side, side)) if self.pad else None
        federation = dirichlet(train, self.num_clients, alpha=self.alpha, seed=seed, test=test)
        model = FlatModel(self.module(seed), augment=augment, metrics=self.metrics)
        return model, federation.deal_test(seed) if needs_shares(self.metrics) else federation

    def module(self, seed: int) -> nn.Module:
        """Bytes of pixels to logits."""
        num_classes, num_channels, side, _ = PICTURES[self.data]
        mean, std = MEAN_STD.get(self.data, MEAN_STD["imagenet"])
        if self.model in CONVOLUTIONAL:
            model = CONVOLUTIONAL[self.model](num_classes, num_channels=num_channels, seed=seed)
            expected = side
        elif self.model in PUBLISHED:
            expected = self.size or (side if self.model == "vit-tiny" else 224)
            patch = {"patch_size": 4 if expected <= 32 else 8} if expected < 224 and self.model.startswith("vit") else {}
            config = configuration(self.model, image_size=expected, num_channels=num_channels, **patch)  # type: ignore[arg-type]
            model = self.tuning.of(image_classifier(config, num_classes, dropout=0.0, seed=seed), seed)
        else:
            mean, std, expected = expectations(self.model)
            model = self.tuning.of(image_classifier(self.model, num_classes, dropout=0.0, seed=seed), seed)
        enlarged = self.size or expected
        return nn.Sequential(Normalise(mean[:num_channels], std[:num_channels], None if enlarged == side else enlarged), model)


@dataclass(frozen=True)
class Sentences:
    """A task of GLUE in a Dirichlet federation; the data lie under root. The validation part is the test.

    Args:
        data: which task.
        model: the folder of a pretrained BERT, RoBERTa or their like; or its name on the hub.
        tokenizer: the folder of its tokenizer, which is never fetched; by default that of the model.
        tuning: what of the model is trained.
        length: tokens of a record; what is longer is cut.
        num_clients: who share the training sentences.
        alpha: how unlike their label proportions are: 0.1 very, 100 hardly.
        root: the folder with the data (default: DPFED_DATA).
    """

    data: SentenceName = "sst2"
    model: str = "roberta-base"
    tokenizer: str = ""
    tuning: Tuning = field(default_factory=Tuning)
    length: int = 64
    num_clients: int = 20
    alpha: float = 0.8
    root: str | None = None

    def build(self, seed: int) -> tuple[FlatModel, Federation]:
        task, words = GLUE[self.data], load_tokenizer(self.tokenizer or self.model)
        train, test = (tokenise(texts, words, length=self.length) for texts in read_glue(self.data, self.root))
        module = self.tuning.of(text_classifier(self.model, task.classes, dropout=0.0, seed=seed), seed)
        federation = dirichlet(train, self.num_clients, alpha=self.alpha, seed=seed, test=test)
        return FlatModel(module, metrics=task.metrics), federation


def expectations(source: str) -> tuple[tuple[float, ...], tuple[float, ...], int]:
    """Mean and deviation of the pixels, and the side of the pictures, that a pretrained model was trained on."""
    transformers = library("transformers")
    try:
        said, _ = transformers.image_processing_base.ImageProcessingMixin.get_image_processor_dict(source)
        side = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False).image_size
        return tuple(said["image_mean"]), tuple(said["image_std"]), int(side)
    except Exception as error:  # whatever a damaged folder, or a hub out of reach, makes transformers raise
        raise InputError(
            f"task.model: '{source}' does not say what pictures it expects ({error}). Name a folder with config.json and "
            "preprocessor_config.json, as save_pretrained writes them, a model on the hub, or one of "
            f"{', '.join([*CONVOLUTIONAL, *(name for name in PUBLISHED if name.startswith(('vit', 'swin')))])}."
        ) from error
