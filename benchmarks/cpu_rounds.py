"""Rounds on a CPU beside a careful plain loop on tensors in memory, in one run.

    python benchmarks/cpu_rounds.py cnn
    python benchmarks/cpu_rounds.py mlp

cnn: Fashion-MNIST, 10,000 images, 10 clients under NID1 0.2.
mlp: the same images, 784-200-10, 100 clients of which 20 take part in a round.

The plain loop is what a careful person writes for FedAvg and nothing else: images normalised once
beforehand, a permutation per epoch, SGD, weights averaged, the test set in large batches.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import torch
from torch import nn

from fedsc import Dataset, FedAvg, Federation, RunSpec, load_dataset
from fedsc.data.plan import cohort
from fedsc.federation import split_training_data
from fedsc.models import MLP, build_model

SETTINGS = {
    "cnn": {"train_limit": 10_000, "clients": 10, "partition": "nid1:0.2", "norm": "none"},
    "mlp": {"train_limit": 10_000, "clients": 100, "participation": 0.2, "partition": "nid1:0.2"},
}


ENGINES = (("sequential", "fp32"), ("workers", "fp32"), ("workers", "bf16"))


def make_model(name: str, data: Dataset) -> nn.Module:
    torch.manual_seed(0)
    if name == "mlp":
        return MLP(data.image_shape, 10, hidden=(200,))
    return build_model("cnn", data.image_shape, 10, "none")


def plain_rounds(spec: RunSpec, data: Dataset, model: nn.Module, rounds: int) -> list[list[float]]:
    """Seconds of training and of evaluation, round by round."""
    images = (data.train_images.float() / 255 - data.mean[0]) / data.std[0]
    test = (data.test_images.float() / 255 - data.mean[0]) / data.std[0]
    parts = [torch.from_numpy(part) for part in split_training_data(spec, data)]
    own = [(images[part], data.train_labels[part]) for part in parts]
    server = copy.deepcopy(model.state_dict())
    seconds = []
    for round in range(1, rounds + 1):
        began = time.perf_counter()
        chosen = cohort(0, round, len(parts), round_half(len(parts) * spec.participation))
        total = sum(len(parts[k]) for k in chosen)
        summed = {name: torch.zeros_like(w) for name, w in server.items()}
        for k in chosen:
            model.load_state_dict(server)
            model.train()
            optimiser = torch.optim.SGD(
                model.parameters(), spec.lr, spec.momentum, weight_decay=spec.weight_decay
            )
            x, y = own[k]
            for batch in torch.randperm(len(y)).split(spec.batch_size):
                optimiser.zero_grad()
                nn.functional.cross_entropy(model(x[batch]).logits, y[batch]).backward()
                optimiser.step()
            for name, w in model.state_dict().items():
                summed[name] += w * (len(y) / total)
        server = summed
        trained = time.perf_counter()
        model.load_state_dict(server)
        model.eval()
        with torch.no_grad():
            right = [model(part).logits.argmax(1) for part in test.split(1000)]
        (torch.cat(right) == data.test_labels).float().mean().item()
        seconds.append([trained - began, time.perf_counter() - trained])
    return seconds


def round_half(number: float) -> int:
    return max(1, round(number))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=SETTINGS)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    data = load_dataset("fashion-mnist")
    base = {**SETTINGS[args.case], "dataset": "fashion-mnist", "epochs": 1, "rounds": 10_000}
    rows = {}
    plain = plain_rounds(RunSpec(**base), data, make_model(args.case, data), args.rounds)
    rows["plain loop"] = [statistics.median(column) for column in zip(*plain[1:], strict=True)]
    for engine, precision in ENGINES:
        spec = RunSpec(**base, engine=engine, precision=precision)
        federation = Federation(spec, data, FedAvg(), make_model(args.case, data))
        timings = [federation.run_round(r)["timing"] for r in range(1, args.rounds + 1)][1:]
        rows[f"{engine} {precision}"] = [
            statistics.median(t["fit_seconds"] + t["aggregate_seconds"] for t in timings),
            statistics.median(t["evaluate_seconds"] for t in timings),
        ]
    print(f"{args.case}, {torch.get_num_threads()} threads; seconds a round (x plain loop)")
    for name, (train, test) in rows.items():
        a, b = train / rows["plain loop"][0], test / rows["plain loop"][1]
        print(f"{name:18s} train {train:8.3f} (x {a:.2f})  test {test:8.3f} (x {b:.2f})")


if __name__ == "__main__":
    main()
