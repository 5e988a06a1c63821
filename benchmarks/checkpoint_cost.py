"""What a checkpoint costs: seconds and megabytes, with ResNet-10 and ten clients in every round.

    python benchmarks/checkpoint_cost.py --folder /tmp/checkpoints

The share is that of a run that writes one every 30 seconds. A real run writes them less often where
that is more than 2%.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from pathlib import Path

import torch

from fedsc import Dataset, RunSpec
from fedsc.experiments.folder import CLIENTS, RunFolder
from fedsc.experiments.runner import CHECKPOINT_SECONDS, begin, build
from fedsc.methods import method_from_text

METHODS = ("fedavg", "fedsc", "moon", "fedcda,warmup=0")
ROUNDS = 6  # FedCDA keeps three models of each client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    folder = parser.parse_args().folder
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (320, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.arange(320) % 10
    data = Dataset("random", images, labels, images[:64], labels[:64], tuple("0123456789"))
    print(f"{'method':18s}{'seconds':>9s}{'written':>10s}{'on disk':>10s}{'share':>8s}")
    for name in METHODS:
        spec = RunSpec(
            method=name, model="resnet10", partition="iid", rounds=ROUNDS, epochs=1, batch_size=32
        )
        out = folder / name
        method = method_from_text(name)
        federation, model_name = build(spec, data, method, client_folder=out / CLIENTS)
        run = RunFolder(out)
        begin(run, federation, model_name)
        seconds, written = [], 0
        for record in federation.rounds():
            before = set(out.rglob("*.safetensors"))
            began = time.perf_counter()
            run.save_checkpoint(federation, record["accuracy"])
            seconds.append(time.perf_counter() - began)
            new = {*out.rglob("*.safetensors")} - before | {out / "state.safetensors"}
            written = sum(path.stat().st_size for path in new)
        cost = statistics.median(seconds[ROUNDS // 2 :])
        kept = sum(path.stat().st_size for path in out.rglob("*.safetensors"))
        share = cost / (CHECKPOINT_SECONDS + cost)
        print(
            f"{name:18s}{cost:9.2f}{written / 1e6:7.0f} MB{kept / 1e6:7.0f} MB{share:8.1%}",
            flush=True,
        )
        shutil.rmtree(out)


if __name__ == "__main__":
    main()
