"""What a training step of each method costs, relative to FedAvg's, measured in one run.

    python benchmarks/step_cost.py --model resnet10 --steps 6 --repeats 3

Random images, one client, the sequential engine. Methods take turns, and the fastest of the
repeats counts, so that what else the machine does hits all of them alike. Each method first goes
through two rounds, so that MOON has its previous model and FedSC its prototypes.
"""

from __future__ import annotations

import argparse
import time

import torch

from fedsc import METHODS, Dataset, Federation, RunSpec
from fedsc.methods import method_from_text
from fedsc.models import build_model

SHAPES = {"resnet10": (3, 32, 32), "mobilenetv2": (3, 64, 64), "cnn": (1, 28, 28), "mlp": (1, 8, 8)}
BATCH = 64


def federation(method: str, model: str, steps: int, epochs: int, device: str) -> Federation:
    rng = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (BATCH * steps, *SHAPES[model]), generator=rng)
    labels = torch.arange(BATCH * steps) % 10
    data = Dataset(
        name="random",
        train_images=images.to(torch.uint8),
        train_labels=labels,
        test_images=images[:10].to(torch.uint8),
        test_labels=labels[:10],
        classes=tuple("0123456789"),
    ).to(torch.device(device))
    spec = RunSpec(method=method, partition="iid", clients=1, rounds=10_000, epochs=epochs)
    torch.manual_seed(0)
    network = build_model(model, SHAPES[model], 10)
    return Federation(spec, data, method_from_text(method), network)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="resnet10")
    parser.add_argument("--steps", type=int, default=6, help="steps in an epoch")
    parser.add_argument("--epochs", type=int, default=1, help="epochs in a round")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--methods", default=",".join(METHODS))
    args = parser.parse_args()
    running = {
        name: federation(name, args.model, args.steps, args.epochs, args.device)
        for name in args.methods.split(",")
    }
    best = dict.fromkeys(running, float("inf"))
    for repeat in range(args.repeats + 2):
        for name, one in running.items():
            began = time.perf_counter()
            one.run_round(repeat + 1)
            if args.device == "cuda":
                torch.cuda.synchronize()
            if repeat >= 2:
                best[name] = min(best[name], time.perf_counter() - began)
    steps = args.steps * args.epochs
    print(f"{args.model}, batch {BATCH}, {args.device}, {torch.get_num_threads()} threads")
    for name, seconds in best.items():
        ratio = seconds / best["fedavg"]
        print(f"{name:10s} {1000 * seconds / steps:8.2f} ms/step   x {ratio:.2f}")


if __name__ == "__main__":
    main()
