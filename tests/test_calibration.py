"""Calibration: the discriminant by hand, and what `--calibrated` measures of every method."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import BaseEstimator
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from fedsc.calibration import linear_discriminant
from fedsc.state import State

# The discriminant ---------------------------------------------------------------------------------


def statistics_of(features: torch.Tensor, labels: torch.Tensor, num_classes: int) -> State:
    of_class = [features[labels == j] for j in range(num_classes)]
    sums = torch.stack([rows.sum(0) for rows in of_class])
    counts = torch.tensor([float(len(rows)) for rows in of_class])
    return {"class_sums": sums, "class_counts": counts, "products": features.T @ features}


def test_a_discriminant_by_hand() -> None:
    # Two classes around (0, 0) and (4, 0), with the variances 1 and 4; a tenth of their mean, 0.25,
    # is added: 1.25 and 4.25. W = S^-1 (m_j - (2, 0)) = (-+1.6, 0); b = -W (m_j + (2, 0)) / 2.
    around = torch.tensor([[1.0, 2.0], [-1.0, 2.0], [1.0, -2.0], [-1.0, -2.0]])
    features = torch.cat([around, around + torch.tensor([4.0, 0.0])])
    labels = torch.tensor([0] * 4 + [1] * 4)
    weight, bias = linear_discriminant(statistics_of(features, labels, 2))
    assert torch.allclose(weight, torch.tensor([[-1.6, 0.0], [1.6, 0.0]]), atol=1e-6)
    assert torch.allclose(bias, torch.tensor([1.6, -4.8]), atol=1e-6)
    # Halfway between the means both score alike.
    middle = torch.tensor([2.0, 7.0])
    assert (weight @ middle + bias).tolist() == pytest.approx([-1.6, -1.6])


def test_a_discriminant_is_scikit_learns() -> None:
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 3
    centers = torch.randn(3, 4, generator=rng)
    mixing = torch.randn(4, 4, generator=rng)
    features = 5 + centers[labels] + torch.randn(60, 4, generator=rng) @ mixing
    weight, bias = linear_discriminant(statistics_of(features, labels, 3))
    theirs = LinearDiscriminantAnalysis(
        solver="lsqr", priors=[1 / 3] * 3, covariance_estimator=Shrunk()
    )
    theirs.fit(features.double().numpy(), labels.numpy())
    ours = torch.softmax(features @ weight.T + bias, 1)
    expected = torch.from_numpy(theirs.predict_proba(features.double().numpy()))
    assert torch.allclose(ours.double(), expected, atol=1e-4)


class Shrunk(BaseEstimator):  # type: ignore[misc]
    """The covariance with a tenth of its mean variance added."""

    def fit(self, rows: Any) -> Shrunk:
        covariance = np.cov(rows.T, bias=True)
        self.covariance_ = covariance + 0.1 * np.trace(covariance) / len(covariance) * np.eye(4)
        return self


def test_a_class_nobody_has_sent_is_never_guessed() -> None:
    features, labels = torch.randn(20, 3), torch.arange(20) % 2
    weight, bias = linear_discriminant(statistics_of(features, labels, 3))
    assert (features @ weight.T + bias)[:, 2].max() < -1e20
    assert bool(weight.isfinite().all())


@pytest.mark.parametrize("features", [torch.ones(4, 3), torch.full((4, 3), torch.nan)])
def test_features_without_use_raise_nothing(features: torch.Tensor) -> None:
    weight, _ = linear_discriminant(statistics_of(features, torch.arange(4) % 2, 2))
    assert weight.shape == (2, 3)
