"""The loss around the models of one round (Fig. 1b), along filter-normalised directions.

From the checkpoint one more round is trained, with the plan that round has in the run: w is the
global model the clients received, w_k what client k made of it, "global" what the server made of
the w_k.
The loss is the cross-entropy of the classifier on test images, in evaluation mode.

Two kinds of surface, both over w' + a d_1 + b d_2, each direction scaled filter by filter to the
norm of the filter in the weights (Li et al., Visualizing the Loss Landscape of Neural Nets, 2018;
biases and what belongs to normalisation layers stay as they are):

    around    each model by itself, w' = w_k or global; d_1 and d_2 are Gaussian, the same for all
    plane     all models in one picture, w' = global; d_1 and d_2 are random mixtures of the w_k - w
              and the models are projected onto the plane. On a Gaussian plane they would all lie at
              its origin: among a million dimensions two random directions meet none of the drift.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..data.images import Progress as DecodingProgress
from ..data.plan import cohort
from ..data.randomness import generator
from ..engines.local import load_state
from ..evaluation import EVALUATION_BATCH, run_model
from ..federation import Federation
from ..method import Upload
from ..models.outputs import Outputs
from ..report.runs import RunData
from ..state import State
from .reopen import OnStep, cached, checkpoint_of, engine_of, reopen

POINTS = 15  # of the grid in each direction
IMAGES = 250
MARGIN = 1.5  # the plane reaches so much further than the farthest model


def landscape_of(
    run: RunData,
    points: int = POINTS,
    images: int = IMAGES,
    data_dir: Path | None = None,
    on_step: OnStep = lambda what, done, total: None,
    decoding: DecodingProgress | None = None,
) -> dict[str, Any]:
    """The landscapes of a run; computed where its folder does not hold them yet.

    grid, loss, models   the plane: coordinates, loss[row of b][column of a], and each model with
                         its place `at` and its own loss
    around               grid, and for some models the loss around them
    """

    def make() -> dict[str, Any]:
        return landscape(reopen(run, data_dir, decoding), points, images, on_step)

    made_from = {**checkpoint_of(run), "points": points, "images": images}
    return cached(run.path / "landscape.json", made_from, make)


def landscape(federation: Federation, points: int, images: int, on_step: OnStep) -> dict[str, Any]:
    seed, received = federation.spec.seed, federation.server["model"]
    uploads = local_models(federation, on_step)
    # Into a dict of its own: what the run keeps of its clients stays as it is.
    records: ChainMap[int, State] = ChainMap({}, federation.records)
    new = federation.method.aggregate(federation.server, uploads, records)["model"]
    models = {"global": new, **{f"client {u.client}": u.model for u in uploads}}
    loss_at = test_loss(federation, images)
    rng = torch.Generator().manual_seed(int(generator("figures", seed, 1).integers(2**63)))

    drifts = [difference(upload.model, received) for upload in uploads]
    mixtures = [
        filter_normalised(mix(drifts, torch.randn(len(drifts), generator=rng)), new)
        for _ in range(2)
    ]
    places = {name: project(difference(model, new), *mixtures) for name, model in models.items()}
    reach = MARGIN * max(1e-3, *(abs(value) for at in places.values() for value in at))
    grid = np.linspace(-reach, reach, points)
    around_grid = np.linspace(-1, 1, points)

    sides = 1 + len(shown_clients(uploads)) + 1
    steps = Steps(on_step, f"landscape, {images} images at a point", sides * points)
    plane = surface(loss_at, new, mixtures, grid, steps)
    gaussian = [gaussian_like(new, rng) for _ in range(2)]
    around = []
    for name in ("global", *(f"client {k}" for k in shown_clients(uploads))):
        own = [filter_normalised(direction, models[name]) for direction in gaussian]
        around.append(
            {"name": name, "loss": surface(loss_at, models[name], own, around_grid, steps)}
        )
    return {
        "grid": grid.tolist(),
        "loss": plane,
        "models": [
            {"name": name, "at": list(places[name]), "loss": loss_at(model)}
            for name, model in models.items()
        ],
        "around": {"grid": around_grid.tolist(), "models": around},
    }


class Steps:
    """Counts rows of surfaces for whoever watches."""

    def __init__(self, on_step: OnStep, what: str, total: int) -> None:
        self.on_step, self.what, self.total, self.done = on_step, what, total, 0

    def one(self) -> None:
        self.done += 1
        self.on_step(self.what, self.done, self.total)


def local_models(federation: Federation, on_step: OnStep) -> list[Upload]:
    """Train the clients of the round after the checkpoint; the run's own files stay untouched."""
    task, number = federation.task, federation.round + 1
    chosen = cohort(federation.spec.seed, number, task.num_clients, task.cohort_size)
    uploads = []
    for done, client in enumerate(chosen):
        on_step("local models of one round", done, len(chosen))
        upload, _ = engine_of(federation).fit_one(
            number,
            federation.clients[client],
            federation.server["model"],
            federation.method.broadcast(federation.server),
            federation.memory_of(client),
            lambda images: None,
        )
        uploads.append(upload)
    on_step("local models of one round", len(chosen), len(chosen))
    return uploads


def shown_clients(uploads: list[Upload]) -> list[int]:
    """The clients with most, middling and fewest images, or all where there are fewer than 3."""
    order = sorted(uploads, key=lambda upload: (-upload.num_samples, upload.client))
    places = sorted({0, (len(order) - 1) // 2, len(order) - 1})
    return [order[place].client for place in places]


def test_loss(federation: Federation, images: int) -> Callable[[State], float]:
    """Mean cross-entropy of a state on some images: of the test set, or in a few-shot run, whose
    test classes the classifier does not know, of the training set."""
    data = federation.data
    few_shot = data.few_shot
    pool = data.train_images if few_shot else data.test_images
    labels = data.train_labels if few_shot else data.test_labels
    chosen = generator("figures", federation.spec.seed, 2).permutation(len(labels))[:images]
    picked = torch.from_numpy(np.sort(chosen)).to(federation.device)
    some_images, some_labels = pool[picked], labels[picked]
    view, model = federation.engine.images, federation.model

    def forward(batch: Tensor) -> Outputs:
        return view.forward(model, view.normalised(batch))

    def loss_at(state: State) -> float:
        load_state(model, state)
        logits = run_model(
            forward, model, some_images.split(EVALUATION_BATCH[some_images.device.type])
        ).logits
        return float(F.cross_entropy(logits.double(), some_labels))

    return loss_at


def surface(
    loss_at: Callable[[State], float],
    origin: State,
    directions: list[State],
    grid: Any,
    steps: Steps,
) -> list[list[float]]:
    """loss[i][j] = L(origin + grid[j] d_1 + grid[i] d_2)."""
    rows = []
    for b in grid:
        rows.append([loss_at(moved(origin, directions, (a, b))) for a in grid])
        steps.one()
    return rows


def moved(origin: State, directions: list[State], by: tuple[float, float]) -> State:
    there = dict(origin)
    for name in directions[0]:
        there[name] = origin[name] + by[0] * directions[0][name] + by[1] * directions[1][name]
    return there


# Directions: the weights with two dimensions or more, by name -------------------------------------


def weights(state: State) -> Iterator[tuple[str, Tensor]]:
    """What a direction moves. Biases, normalisation layers and counters have one dimension."""
    for name, tensor in state.items():
        if tensor.ndim >= 2 and tensor.is_floating_point():
            yield name, tensor


def difference(state: State, origin: State) -> State:
    return {name: tensor - origin[name] for name, tensor in weights(state)}


def mix(directions: list[State], shares: Tensor) -> State:
    return {
        name: sum(float(s) * d[name] for s, d in zip(shares, directions, strict=True))
        for name in directions[0]
    }


def gaussian_like(state: State, rng: torch.Generator) -> State:
    return {
        name: torch.randn(tensor.shape, generator=rng).to(tensor) for name, tensor in weights(state)
    }


def filter_normalised(direction: State, state: State) -> State:
    """Each filter of the direction (its first index) scaled to the norm of the filter's weights."""
    scaled = {}
    for name, tensor in direction.items():
        dims = tuple(range(1, tensor.ndim))
        have = torch.linalg.vector_norm(tensor, dim=dims, keepdim=True)
        want = torch.linalg.vector_norm(state[name], dim=dims, keepdim=True)
        scaled[name] = torch.where(have > 0, tensor * want / have.clamp_min(1e-30), 0)
    return scaled


def project(vector: State, first: State, second: State) -> tuple[float, float]:
    """The coordinates of the nearest point of the plane: least squares, for directions that need
    not be orthogonal."""
    gram = np.array([[inner(a, b) for b in (first, second)] for a in (first, second)])
    along = np.array([inner(vector, first), inner(vector, second)])
    a, b = np.linalg.lstsq(gram, along, rcond=None)[0]
    return float(a), float(b)


def inner(a: State, b: State) -> float:
    return float(sum((a[name].double() * b[name].double()).sum() for name in a))
