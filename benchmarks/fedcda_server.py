"""FedCDA's server step with many clients: seconds, and memory against its limit.

    python benchmarks/fedcda_server.py --clients 100 --cohort 10 --parameters 5000000 --limit 1

Random models; the records of clients that do not fit into `--limit` GiB lie on disk.
"""

from __future__ import annotations

import argparse
import resource
import time

import torch

from fedsc import FedCDA, State, Task, Upload
from fedsc.data.plan import cohort
from fedsc.store import ClientStore


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--parameters", type=int, default=5_000_000)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--limit", type=float, default=1.0, help="GiB of records in memory")
    args = parser.parse_args()
    method = FedCDA(warmup=0.0)
    names = [f"layer{i}" for i in range(20)]  # about as many tensors as ResNet-10 has
    task = Task(args.clients, args.cohort, 10, 512, args.rounds, trainable=tuple(names))
    records = ClientStore("record", int(args.limit * 2**30))
    server: State = method.init_server(task)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for round in range(1, args.rounds + 1):
        uploads = []
        for client in cohort(0, round, args.clients, args.cohort):
            model = {name: torch.randn(args.parameters // len(names)) for name in names}
            uploads.append(Upload(client, 100, model, {"loss": torch.rand(())}))
        began = time.perf_counter()
        server = method.aggregate(server, uploads, records)
        records.discard_unused()
        seconds.append(time.perf_counter() - began)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    last = sorted(seconds[-10:])
    print(f"{args.clients} clients, {args.cohort} a round, {args.parameters:,} parameters")
    median = last[len(last) // 2]
    print(f"server step: median {median:.2f} s, worst {last[-1]:.2f} s of the last 10")
    print(f"peak memory above start: {peak:.2f} GiB with a limit of {args.limit} GiB on records")


if __name__ == "__main__":
    main()
