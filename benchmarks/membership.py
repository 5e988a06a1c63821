"""Can it be told from what a client sends that a record is its own? With and without noise.

    python benchmarks/membership.py prototypes      # prototypes alone, by the size of a class
    python benchmarks/membership.py runs            # whole runs on digits: accuracy and attacks

Prints Markdown tables, the mean over seeds with its standard deviation. An AUC of 50 is guessing,
100 is certainty.

`prototypes`: a network is trained on some of the images. From the rest, which it has never seen, a
"client" takes n images of a class and releases their prototype as `fedsc` does with unit record.
The attacker knows the network, the prototype and 25 other images of the class, and scores an image
x by how far f(x) goes in the direction in which the prototype differs from the mean of those 25,
each dimension in units of its variance: the likelihood ratio for Gaussian features.

`runs`: the server attacks each client of the last round with what that client sent, its members
against the test images of the same class: by the distance of f(x) to the client's prototype, and by
the loss of x in the client's weights.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.nn import functional as F

from fedsc import RunSpec
from fedsc.data.plan import cohort
from fedsc.engines.local import load_state
from fedsc.experiments.runner import build, load
from fedsc.federation import Federation
from fedsc.methods import method_from_text
from fedsc.models.outputs import Outputs
from fedsc.privacy import Release, clip_rows, epsilon_of, noised_totals

DELTA = 1e-5
SIZES = (1, 2, 5, 10, 20, 40)  # images behind a prototype
NOISES = (0.0, 0.5, 1.0, 2.0, 5.0)
NUM_REFERENCE, NUM_OUTSIDERS, DRAWS = 25, 25, 20
FEW = 5  # a class with at most so many images at a client is a small one

ORDINARY = {"rounds": 10, "epochs": 5, "lr": 0.05}
RECORD = {"rounds": 10, "epochs": 3, "lr": 0.5, "batch_size": 500, "dp_unit": "record"}
WEIGHTS = {"dp_clip": 1.0}
FEATURES = {"dp_feature_clip": 5.0}
MANY = {"clients": 200, "partition": "iid", "rounds": 10, "epochs": 2, "lr": 0.2}
CLIENT = {**MANY, "dp_unit": "client", **WEIGHTS}
RUNS: list[tuple[str, dict[str, Any]]] = [
    ("fedsc,full", ORDINARY),
    ("fedsc,full", {**ORDINARY, "dp_unit": "record", **FEATURES, "dp_prototype_noise": 2.0}),
    ("fedsc,private", ORDINARY),
    *(
        ("fedsc,private", {**RECORD, **WEIGHTS, **FEATURES, "target_epsilon": target})
        for target in (30.0, 8.0, 3.0)
    ),
    ("fedavg", ORDINARY),
    *(("fedavg", {**RECORD, **WEIGHTS, "target_epsilon": target}) for target in (30.0, 8.0)),
    ("fedsc,full", MANY),
    ("fedsc,full", {**CLIENT, **FEATURES, "target_epsilon": 8.0}),
    ("fedavg", MANY),
    ("fedavg", {**CLIENT, "target_epsilon": 8.0}),
]


def federation(method: str, seed: int, options: dict[str, Any]) -> Federation:
    spec = RunSpec(method=method, seed=seed, device="cpu", **options)
    return build(spec, load(spec), method_from_text(method, "digits"))[0]


@torch.no_grad()
def outputs_of(made: Federation, state: dict[str, Tensor], images: Tensor) -> Outputs:
    load_state(made.model, state)
    found: Outputs = made.model.eval()(images)
    return found


def auc(members: Tensor, others: Tensor) -> float:
    """In percent, of scores that should be higher for members."""
    truth = np.r_[np.ones(len(members)), np.zeros(len(others))]
    return 100 * float(roc_auc_score(truth, torch.cat([members, others]).numpy()))


def over_seeds(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    spread = statistics.stdev(known) if len(known) > 1 else 0.0
    return f"{statistics.mean(known):.1f} ± {spread:.1f}"


def table(header: list[str], rows: Iterable[list[str]]) -> None:
    """Printed row by row, as they are measured."""
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)


# Prototypes alone ---------------------------------------------------------------------------------


def attack_prototypes(seed: int) -> dict[tuple[float, int], float | None]:
    """AUC by noise and by the number of images behind a prototype."""
    made = federation("fedsc", seed, {**ORDINARY, "train_limit": 500})
    for _ in made.rounds():
        pass
    images, labels = made.engine.images, made.data.train_labels
    trained_on = torch.from_numpy(np.concatenate(made.parts))
    unseen = torch.ones(len(labels), dtype=torch.bool)
    unseen[trained_on] = False
    picked = unseen.nonzero().flatten()
    features = outputs_of(made, made.server["model"], images.picked(picked)).features
    clip = float(features.norm(dim=1).median())
    features, labels = clip_rows(features, clip), labels[picked]
    rng = np.random.default_rng(seed)
    found: dict[tuple[float, int], list[float]] = {(z, n): [] for z in NOISES for n in SIZES}
    for label in range(made.data.num_classes):
        rows = (labels == label).nonzero().flatten().numpy()
        for _ in range(DRAWS):
            for size in SIZES:
                if size + NUM_REFERENCE + NUM_OUTSIDERS > len(rows):
                    continue
                order = torch.from_numpy(rng.permutation(rows))
                members, known, outside = order[: size + NUM_REFERENCE + NUM_OUTSIDERS].split(
                    [size, NUM_REFERENCE, NUM_OUTSIDERS]
                )
                mean, variance = features[known].mean(0), features[known].var(0) + 1e-2
                sums, counts = features[members].sum(0, keepdim=True), torch.tensor([float(size)])
                for noise in NOISES:
                    totals = noised_totals({"sums": sums, "counts": counts}, clip, noise, rng)
                    if totals["counts"] == 0:
                        found[noise, size].append(50.0)  # nothing is released
                        continue
                    prototype = totals["sums"][0] / totals["counts"][0]
                    scores = ((features - mean) * (prototype - mean) / variance).sum(1)
                    found[noise, size].append(auc(scores[members], scores[outside]))
    return {key: statistics.mean(values) if values else None for key, values in found.items()}


def prototypes_table(seeds: list[int]) -> None:
    each = [attack_prototypes(seed) for seed in seeds]
    rows = []
    for noise in NOISES:
        # Sums and counts are two releases.
        epsilon = epsilon_of([Release(noise, 1.0, 2)], DELTA)
        cells = [over_seeds([found[noise, size] for found in each]) for size in SIZES]
        rows.append([f"{noise:g}", "∞" if epsilon == float("inf") else f"{epsilon:.1f}", *cells])
    table(["noise", "epsilon of a release", *(f"n = {size}" for size in SIZES)], rows)


# Whole runs ---------------------------------------------------------------------------------------


def attack_run(method: str, seed: int, options: dict[str, Any]) -> dict[str, float | None]:
    made = federation(method, seed, options)
    last = made.spec.rounds
    records = made.rounds()
    for _ in range(last - 1):
        next(records)
    chosen = cohort(seed, last, made.task.num_clients, made.task.cohort_size)
    # The last round twice, with the same result: once to see what is sent.
    sent = made.hidden(made.fit(last, chosen), last)
    record = next(records)
    by: dict[str, list[tuple[int, float]]] = {"prototype": [], "loss": []}
    images, data = made.engine.images, made.data
    test, test_labels = next(images.test_batches(len(data.test_labels))), data.test_labels
    # Unit client: the server has one thing of all clients, and the members are all their records.
    members = [np.concatenate(made.parts)] if made.spec.dp_unit == "client" else made.parts
    for upload, part in zip(sent, members, strict=False):
        labels = data.train_labels[torch.from_numpy(part)]
        inside = outputs_of(made, upload.model, images.picked(torch.from_numpy(part)))
        outside = outputs_of(made, upload.model, test)
        losses = [
            F.cross_entropy(output.logits, truth, reduction="none")
            for output, truth in ((inside, labels), (outside, test_labels))
        ]
        for label in labels.unique().tolist():
            own, others = labels == label, test_labels == label
            by["loss"].append((int(own.sum()), auc(-losses[0][own], -losses[1][others])))
            if "prototypes" in upload.extra and upload.extra["counts"][label] > 0:
                prototype = upload.extra["prototypes"][label]
                near = -(inside.features[own] - prototype).norm(dim=1)
                far = -(outside.features[others] - prototype).norm(dim=1)
                by["prototype"].append((int(own.sum()), auc(near, far)))
    few = [value for size, value in by["prototype"] if size <= FEW]
    return {
        "epsilon": record.get("epsilon"),
        "accuracy": 100 * record["accuracy"],
        "prototype": mean_by_size(by["prototype"]),
        "few": statistics.mean(few) if few else None,
        "loss": mean_by_size(by["loss"]),
    }


def mean_by_size(found: list[tuple[int, float]]) -> float | None:
    total = sum(size for size, _ in found)
    return sum(size * value for size, value in found) / total if total else None


def run_rows(seeds: list[int], only: str | None) -> Iterator[list[str]]:
    for number, (method, options) in enumerate(RUNS, 1):
        unit, clients = options.get("dp_unit", "none"), options.get("clients", 10)
        if only is not None and only not in f"{method} {unit} {clients}":
            continue
        each = []
        for seed in seeds:
            print(f"{number}/{len(RUNS)}: {method} {options} seed {seed}", file=sys.stderr)
            each.append(attack_run(method, seed, options))
        spent = [run["epsilon"] for run in each if run["epsilon"] is not None]
        measured = [
            over_seeds([run[name] for run in each])
            for name in ("accuracy", "prototype", "few", "loss")
        ]
        yield [method, str(clients), unit, f"{max(spent):.1f}" if spent else "∞", *measured]


def runs_table(seeds: list[int], only: str | None) -> None:
    header = ["method", "clients", "unit", "epsilon", "accuracy", "AUC by prototype"]
    table([*header, f"classes of up to {FEW}", "AUC by loss"], run_rows(seeds, only))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("prototypes", "runs"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", help="rows whose `method unit clients` contains this")
    given = parser.parse_args()
    if given.what == "prototypes":
        prototypes_table(given.seeds)
    else:
        runs_table(given.seeds, given.only)


if __name__ == "__main__":
    main()
