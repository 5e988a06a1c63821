"""What Flower costs: seconds a round and bytes on the wire, beside the sequential engine.

    python -m benchmarks.flower_rounds --rounds 4

Three real nodes on this machine with TLS and node authentication. All their traffic runs through a
proxy that counts bytes, so polling, heartbeats, TLS and HTTP are in it.
"""

from __future__ import annotations

import argparse
import contextlib
import selectors
import socket
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import fedsc
from fedsc.report.runs import read_run
from tests.flower.processes import Deployment, Simulation, free_ports, until

NODES = 3


class CountingProxy(threading.Thread):
    """Passes connections on to another port of this machine and counts what goes each way."""

    def __init__(self, port: int, to: int) -> None:
        super().__init__(daemon=True)
        self.listener, self.to = socket.create_server(("127.0.0.1", port)), to
        self.up = self.down = 0

    def run(self) -> None:
        while True:
            client, _ = self.listener.accept()
            threading.Thread(target=self.serve, args=(client,), daemon=True).start()

    def serve(self, client: socket.socket) -> None:
        with (
            contextlib.suppress(OSError),  # either end may go at any time
            client,
            socket.create_connection(("127.0.0.1", self.to)) as server,
        ):
            waiting = selectors.DefaultSelector()
            waiting.register(client, selectors.EVENT_READ)
            waiting.register(server, selectors.EVENT_READ)
            while True:
                for key, _ in waiting.select():
                    chunk = key.fileobj.recv(65536)  # type: ignore[union-attr]
                    if not chunk:
                        return
                    if key.fileobj is client:
                        self.up += len(chunk)
                        server.sendall(chunk)
                    else:
                        self.down += len(chunk)
                        client.sendall(chunk)


class CountedDeployment(Deployment):
    """The server listens at one port, and nodes find it at another, where they are counted."""

    def start_superlink(self) -> None:
        hidden = free_ports(1)
        script = str(self.federation / "superlink" / "start.sh")
        self.start("superlink", script, "--port", str(hidden))
        self.proxy = CountingProxy(self.port, hidden)
        self.proxy.start()
        time.sleep(10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--dataset", default="fashion-mnist")
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--images", type=int, default=3000)
    arguments = parser.parse_args()
    common: dict[str, Any] = {
        "model": arguments.model,
        "rounds": arguments.rounds,
        "epochs": 1,
        "clients": NODES,
        "threads": 1,
    }
    method = "fedsc,min_count=5"
    with tempfile.TemporaryDirectory(prefix="fedsc-flower-") as name:
        folder = Path(name)
        fedsc.run(
            arguments.dataset,
            method,
            train_limit=arguments.images,
            out=folder / "sequential",
            **common,
        )
        report("sequential", folder / "sequential")
        config = {**common, "dataset": arguments.dataset, "train-limit": arguments.images}
        config["method"] = method
        (folder / "simulation").mkdir()
        with Simulation(folder / "simulation") as simulation:
            simulation.train(NODES, {**config, "out": str(folder / "s")})
        report("simulation (Ray)", next((folder / "s").iterdir()))
        (folder / "deployment").mkdir()
        with CountedDeployment(folder / "deployment", NODES) as deployment:
            deployment.train({**config, "out": str(folder / "d")}, wait=False)
            metrics = folder / "d" / "fedsc_min_count=5-seed0" / "metrics.jsonl"
            until(lambda: metrics.exists(), "the first round")
            first = deployment.proxy.up, deployment.proxy.down
            until(lambda: (metrics.parent / "summary.json").exists(), "the last round", 900)
            last = deployment.proxy.up, deployment.proxy.down
        report("deployment (TLS)", metrics.parent)
        records = read_run(metrics.parent).records[1:]
        for way, a, b in zip(("up", "down"), first, last, strict=True):
            counted = sum(record[f"bytes_{way}"] for record in records)
            print(
                f"bytes {way}: {b - a:,} on the wire for {counted:,} of weights, prototypes and "
                f"counts in {len(records)} rounds, {(b - a) / counted:.4f}"
            )


def report(what: str, folder: Path) -> None:
    timings = [record["timing"] for record in read_run(folder).records[1:]]
    seconds = statistics.median(timing["seconds"] for timing in timings)
    fit = statistics.median(timing["fit_seconds"] for timing in timings)
    print(f"{what}: {seconds:.2f} s a round, {fit:.2f} of it training and travel", flush=True)


if __name__ == "__main__":
    main()
