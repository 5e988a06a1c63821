"""What is measured, on hand-made logits and features whose results are known."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsc import Dataset
from fedsc.data.episodes import Episodes
from fedsc.evaluation import (
    calibration_error,
    evaluate,
    evaluate_few_shot,
    nearest_prototype,
    summarise,
    thirds_by_size,
)


def data_with(test_labels: list[int], classes: int = 3) -> Dataset:
    size = len(test_labels)
    return Dataset(
        name="made",
        train_images=torch.zeros(classes, 1, 2, 2, dtype=torch.uint8),
        train_labels=torch.arange(classes),
        test_images=torch.zeros(size, 1, 2, 2, dtype=torch.uint8),
        test_labels=torch.tensor(test_labels),
        classes=tuple("abcdefghijkl"[:classes]),
    )


def sure_of(guesses: list[int], classes: int = 3) -> Tensor:
    """Logits that leave no doubt."""
    return torch.nn.functional.one_hot(torch.tensor(guesses), classes) * 1000.0


LABELS = [0, 0, 0, 0, 1, 1, 2, 2]
GUESSES = [0, 0, 0, 1, 1, 0, 0, 1]  # right: 3 of 4, 1 of 2, 0 of 2
COUNTS = torch.tensor([[10, 0, 0], [0, 3, 1], [2, 2, 4]])


def test_accuracies_by_hand() -> None:
    found = evaluate(sure_of(GUESSES), torch.zeros(8, 2), data_with(LABELS), COUNTS, None, False)
    assert found["accuracy"] == 0.5
    assert found["per_class"] == [0.75, 0.5, 0.0]
    # Clients see 0.75; 3/4 of 0.5; (2 * 0.75 + 2 * 0.5) / 8.
    assert found["client_mean"] == pytest.approx((0.75 + 0.375 + 0.3125) / 3)
    assert found["client_worst"] == pytest.approx(0.3125)
    assert found["ece"] == pytest.approx(0.5)  # sure of everything, right in half
    assert set(found) == {"accuracy", "per_class", "client_mean", "client_worst", "ece"}


def test_a_class_without_test_images_does_not_count_as_right_or_break() -> None:
    found = evaluate(
        sure_of([0, 0, 1]), torch.zeros(3, 2), data_with([0, 0, 1]), COUNTS, None, False
    )
    assert found["accuracy"] == 1.0
    assert found["per_class"][:2] == [1.0, 1.0]


def test_thirds_by_training_size() -> None:
    sizes = torch.tensor([5, 50, 10, 40, 30, 20, 1, 2, 3, 4])
    head, middle, tail = thirds_by_size(sizes)
    assert head.tolist() == [1, 3, 4]
    assert middle.tolist() == [5, 2, 0, 9]
    assert tail.tolist() == [8, 7, 6]
    assert [part.tolist() for part in thirds_by_size(torch.tensor([1, 2, 3]))] == [[2], [1], [0]]
    equal = [part.tolist() for part in thirds_by_size(torch.full((7,), 9))]
    assert equal == [[0, 1], [2, 3, 4], [5, 6]]  # ties in the order of the classes


def test_head_middle_and_tail_by_hand() -> None:
    counts = torch.tensor([[1, 100, 10]])  # the order of the classes by size is 1, 2, 0
    found = evaluate(sure_of(GUESSES), torch.zeros(8, 2), data_with(LABELS), counts, None, True)
    assert (found["head"], found["middle"], found["tail"]) == (0.5, 0.0, 0.75)


def test_calibration_error_by_hand() -> None:
    """Two classes; confidences 0.9 (right), 0.9 (wrong), 0.6 (right): bins 13 and 9."""

    def logit(confidence: float) -> float:
        return math.log(confidence / (1 - confidence))

    logits = torch.tensor([[logit(0.9), 0.0], [logit(0.9), 0.0], [0.0, logit(0.6)]])
    labels = torch.tensor([0, 1, 1])
    # |0.9 - 0.5| * 2/3 + |0.6 - 1| * 1/3
    assert calibration_error(logits, labels) == pytest.approx(0.4, abs=1e-6)
    # In one bin, a gap above and a gap below cancel.
    together = torch.tensor([[logit(0.5), 0.0]] * 2)
    assert calibration_error(together, torch.tensor([0, 1])) == pytest.approx(0.0, abs=1e-6)


def test_complete_confidence_is_in_the_last_bin() -> None:
    assert calibration_error(sure_of([0, 1]), torch.tensor([0, 1])) == 0.0
    assert calibration_error(sure_of([0, 1]), torch.tensor([1, 0])) == 1.0


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(1, 60), st.integers(2, 6), st.integers(0, 2**31))
def test_calibration_error_against_a_loop(size: int, classes: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(size, classes, generator=rng, dtype=torch.float64)
    labels = torch.randint(0, classes, (size,), generator=rng)
    bins: dict[int, list[tuple[float, bool]]] = {}
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        total = sum(math.exp(x) for x in row)
        confidence, guess = max((math.exp(x) / total, j) for j, x in enumerate(row))
        bins.setdefault(min(14, int(confidence * 15)), []).append((confidence, guess == label))
    expected = 0.0
    for members in bins.values():
        mean_confidence = sum(c for c, _ in members) / len(members)
        accuracy = sum(right for _, right in members) / len(members)
        expected += len(members) / size * abs(mean_confidence - accuracy)
    assert calibration_error(logits, labels) == pytest.approx(expected, abs=1e-9)


def test_logits_that_are_no_numbers_are_no_crash() -> None:
    """A run whose training blew up still has a record; `_finite` turns NaN into null."""
    found = evaluate(
        torch.full((8, 3), torch.nan), torch.zeros(8, 2), data_with(LABELS), COUNTS, None, False
    )
    assert 0 <= found["accuracy"] <= 1


def test_nearest_prototype_by_angle() -> None:
    prototypes = torch.tensor([[100.0, 0.0], [0.0, 0.1], [-1.0, -1.0]])
    features = torch.tensor([[1.0, 0.2], [0.1, 9.0], [-3.0, -2.0], [50.0, 51.0]])
    exists = torch.tensor([True, True, True])
    assert nearest_prototype(features, prototypes, exists).tolist() == [0, 1, 2, 1]


def test_a_missing_prototype_is_never_the_nearest() -> None:
    prototypes = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    exists = torch.tensor([True, False, True])
    features = torch.tensor([[0.0, 5.0], [-1.0, -0.9], [0.0, 0.0]])
    guesses = nearest_prototype(features, prototypes, exists).tolist()
    assert guesses[0] == 2
    assert 1 not in guesses


def test_nearest_prototype_accuracy_in_the_record() -> None:
    features = torch.tensor([[1.0, 0.0]] * 4 + [[0.0, 1.0]] * 4)
    prototypes = torch.tensor([[2.0, 0.0], [0.0, 3.0], [9.0, 9.0]])
    exists = torch.tensor([True, True, False])
    data = data_with(LABELS)
    found = evaluate(sure_of(GUESSES), features, data, COUNTS, (prototypes, exists), False)
    assert found["nearest_prototype"] == 0.75
    nothing = (prototypes, torch.zeros(3, dtype=torch.bool))
    found = evaluate(sure_of(GUESSES), features, data, COUNTS, nothing, False)
    assert "nearest_prototype" not in found


def test_few_shot_by_hand() -> None:
    """Two episodes of two classes with accuracies 1 and 1/2."""
    features = torch.tensor([[0.0], [10.0], [1.0], [9.0], [8.0]])
    episodes = Episodes(
        support=torch.tensor([[[0], [1]], [[0], [1]]]),
        query=torch.tensor([[[2], [3]], [[4], [3]]]),
    )
    found = evaluate_few_shot(features, episodes)
    assert found["accuracy"] == pytest.approx(0.75)
    deviation = math.sqrt(2 * 0.25**2)  # of 1 and 1/2
    assert found["accuracy_ci95"] == pytest.approx(1.96 * deviation / math.sqrt(2))
    one = Episodes(episodes.support[:1], episodes.query[:1])
    assert evaluate_few_shot(features, one) == {"accuracy": 1.0, "accuracy_ci95": 0.0}


def test_summary_by_hand() -> None:
    accuracies = [0.9, *[0.1] * 5, *[0.2] * 5]
    assert summarise(accuracies) == pytest.approx({"last": 0.2, "best": 0.9, "mean_last_10": 0.15})
    assert summarise([0.4]) == {"last": 0.4, "best": 0.4, "mean_last_10": 0.4}
