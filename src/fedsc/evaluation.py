"""What is measured, and on what: the global model, in evaluation mode, on the test set.

    accuracy            share of test images right; the headline is its value in the last round
    per_class           the same for each class
    head, middle, tail  mean of per_class over thirds of the classes by training size (long tail)
    nearest_prototype   the class of the nearest prototype by cosine, instead of the classifier
    calibrated          a linear discriminant of class statistics instead of the classifier
                        (`calibration.py`)
    summed              the sum of that discriminant and the averaged classifier, as in fedsc+
    averaged            the averaged classifier, where another is tested, as in fedsc+
                        (these three with the option `calibrated` only)
    client_mean, _worst per_class weighted by each client's class shares: mean and worst client
    ece                 expected calibration error, 15 equal bins of confidence

In few-shot runs accuracy is the mean over episodes and `accuracy_ci95` half its 95% interval; what
needs a classifier for the test classes is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .data.dataset import Dataset
from .data.episodes import Episodes, episode_accuracies
from .models.outputs import Outputs
from .prototypes import unit

EVALUATION_BATCH = {"cpu": 500, "cuda": 2500}  # by device: a GPU wants more at a time
CALIBRATION_BINS = 15


@torch.no_grad()
def run_model(
    forward: Callable[[Tensor], Outputs], model: nn.Module, batches: Iterable[Tensor]
) -> Outputs:
    """Features (N, d) and logits (N, C) of all images, in evaluation mode; stages are dropped."""
    was_training = model.training
    model.eval()
    outputs = [forward(batch)._replace(stages=()) for batch in batches]
    model.train(was_training)
    return Outputs(
        features=torch.cat([output.features for output in outputs]),
        logits=torch.cat([output.logits for output in outputs]),
    )


def evaluate(
    logits: Tensor,
    features: Tensor,
    data: Dataset,
    class_counts: Tensor,
    prototypes: tuple[Tensor, Tensor] | None,
    long_tailed: bool,
) -> dict[str, Any]:
    """The measurements of one round. `class_counts` (K, C) are the clients' training images."""
    labels = data.test_labels
    right = (logits.argmax(1) == labels).double()
    members = torch.bincount(labels, minlength=data.num_classes).double()
    per_class = torch.zeros_like(members).index_add_(0, labels, right) / members.clamp_min(1)

    # A class without test images has no accuracy, and no part in what is made of it.
    tested = members > 0
    class_counts = class_counts.to(per_class)
    shares = class_counts * tested
    somewhere = shares.sum(1) > 0
    shares = shares[somewhere] / shares[somewhere].sum(1, keepdim=True)
    by_client = shares @ per_class
    known_clients = len(by_client) > 0  # nodes that bring their own data do not tell
    found: dict[str, Any] = {
        "accuracy": float(right.mean()),
        "per_class": [
            round(value, 6) if there else None
            for value, there in zip(per_class.tolist(), tested.tolist(), strict=True)
        ],
        **({"client_mean": float(by_client.mean())} if known_clients else {}),
        **({"client_worst": float(by_client.min())} if known_clients else {}),
        "ece": calibration_error(logits, labels),
    }
    if long_tailed:
        for name, classes in zip(
            ("head", "middle", "tail"), thirds_by_size(class_counts.sum(0)), strict=True
        ):
            there = classes[tested[classes]]
            found[name] = float(per_class[there].mean()) if len(there) else None
    if prototypes is not None and bool(prototypes[1].any()):
        guess = nearest_prototype(features, *prototypes)
        found["nearest_prototype"] = float((guess == labels).double().mean())
    return found


def evaluate_few_shot(features: Tensor, episodes: Episodes) -> dict[str, Any]:
    accuracy = episode_accuracies(features, episodes).double()
    interval = 1.96 * float(accuracy.std()) / len(accuracy) ** 0.5 if len(accuracy) > 1 else 0.0
    return {"accuracy": float(accuracy.mean()), "accuracy_ci95": interval}


def nearest_prototype(features: Tensor, prototypes: Tensor, exists: Tensor) -> Tensor:
    """The class whose prototype has the largest cosine with each feature, (N,)."""
    cosine = unit(features) @ unit(prototypes).T
    return cosine.masked_fill(~exists, -torch.inf).argmax(1)


def accuracy(scores: Tensor, labels: Tensor) -> float:
    """The share of images whose own class has the highest of their scores (N, C)."""
    return float((scores.argmax(1) == labels).double().mean())


def calibration_error(logits: Tensor, labels: Tensor) -> float:
    """Expected calibration error: mean gap between confidence and accuracy over the bins."""
    logits = logits.double()
    top, guess = logits.max(1)
    # The largest of the softmax; PyTorch's own takes four times as long where classes are few.
    confidence = 1 / (logits - top[:, None]).exp().sum(1)
    if not bool(confidence.isfinite().all()):  # the model has diverged
        return math.nan
    right = (guess == labels).double()
    bins = (confidence * CALIBRATION_BINS).long().clamp_max(CALIBRATION_BINS - 1)
    gap = torch.zeros(CALIBRATION_BINS, dtype=torch.float64, device=logits.device)
    gap.index_add_(0, bins, confidence - right)
    return float(gap.abs().sum() / len(labels))


def thirds_by_size(class_sizes: Tensor) -> list[Tensor]:
    """Classes from largest to smallest in three parts, the middle one taking what is left over.

    Ten classes: 3, 4, 3.
    """
    order = torch.argsort(class_sizes, descending=True, stable=True)
    if len(order) < 3:
        return [order[:1], order, order[-1:]]
    third = len(order) // 3
    return [order[:third], order[third : len(order) - third], order[len(order) - third :]]


def summarise(accuracies: list[float]) -> dict[str, float]:
    """Last round (the headline), best round, and the mean of the last ten."""
    last_ten = accuracies[-10:]
    return {
        "last": accuracies[-1],
        "best": max(accuracies),
        "mean_last_10": sum(last_ten) / len(last_ten),
    }
