"""Where the global model puts the test images: t-SNE of its features (Fig. 7).

Written to `embedding.json` in the run folder. For each point: where it lies, its class, what the
model takes it for, and a client. A test image belongs to no client; it is dealt to one at random,
to client k with probability n_k^j / n^j for an image of class j. The partitions here deal the
images of a class at random too, so these are the images the client could as well have had.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..data.images import Progress as DecodingProgress
from ..data.randomness import generator
from ..engines.local import load_state
from ..errors import FedscError
from ..evaluation import EVALUATION_BATCH, run_model
from ..federation import Federation
from ..method import tested_model
from ..report.runs import RunData
from .reopen import OnStep, cached, checkpoint_of, reopen

IMAGES = 1000
PERPLEXITY = 30.0


def embedding_of(
    run: RunData,
    images: int = IMAGES,
    data_dir: Path | None = None,
    on_step: OnStep = lambda what, done, total: None,
    decoding: DecodingProgress | None = None,
) -> dict[str, Any]:
    """The embedding of a run; computed where its folder does not hold it yet."""

    def make() -> dict[str, Any]:
        on_step(f"t-SNE of {run.path.name}", 0, None)
        return embed(reopen(run, data_dir, decoding), images)

    return cached(run.path / "embedding.json", {**checkpoint_of(run), "images": images}, make)


def embed(federation: Federation, images: int) -> dict[str, Any]:
    """x, y, label, predicted and client of each point, and the names of the classes.

    In a few-shot run no client holds the test classes and no classifier knows them: `client` and
    `predicted` are null.
    """
    from sklearn.manifold import TSNE

    data, seed = federation.data, federation.spec.seed
    rng = generator("figures", seed)
    picked = np.sort(rng.permutation(len(data.test_labels))[:images])
    labels = data.test_labels.cpu().numpy()[picked]
    features, predicted = test_features(federation, torch.from_numpy(picked))
    if not np.isfinite(features).all():
        raise FedscError("the model has diverged: its features are no numbers, nothing to embed")
    if len(picked) < 5:
        raise FedscError(f"{len(picked)} images are too few for t-SNE: take at least 5")
    places = TSNE(
        perplexity=min(PERPLEXITY, (len(picked) - 1) / 3),
        init="pca" if features.std() > 0 else "random",
        random_state=seed % 2**32,
    ).fit_transform(features)
    return {
        "x": places[:, 0].round(3).tolist(),
        "y": places[:, 1].round(3).tolist(),
        "label": labels.tolist(),
        "classes": list(data.test_classes if data.few_shot else data.classes),
        "client": None if data.few_shot else deal(labels, federation.class_counts.numpy(), rng),
        "predicted": None if data.few_shot else predicted,
    }


def test_features(federation: Federation, picked: torch.Tensor) -> tuple[Any, list[int]]:
    """Features (N, d) of some test images, as the method compares them, and their classes as the
    method predicts them."""
    method, images = federation.method, federation.engine.images
    load_state(federation.model, tested_model(method, federation.server))

    def forward(batch: torch.Tensor) -> Any:
        return images.forward(federation.model, images.normalised(batch))

    chosen = federation.data.test_images[picked.to(federation.device)]
    outputs = run_model(
        forward, federation.model, chosen.split(EVALUATION_BATCH[chosen.device.type])
    )
    scores = method.predictions([outputs], federation.server)[0]
    features = method.embedding(outputs.features)
    return features.cpu().numpy(), scores.argmax(1).tolist()


def deal(labels: Any, class_counts: Any, rng: np.random.Generator) -> list[int | None]:
    """A client for each label, drawn by the share of the class that each client holds (K, C);
    none for a class that nobody holds."""
    totals = class_counts.sum(0)
    return [
        int(rng.choice(len(class_counts), p=class_counts[:, j] / totals[j])) if totals[j] else None
        for j in labels
    ]
