"""Several clients at once on a CPU: the sequential engine, once in each of a few threads.

One client cannot keep several cores busy: the steps of a small model are over before the cores have
shared them out, and those of a larger one wait for each other. A core of its own for each client
has nothing to wait for. PyTorch lets go of Python's lock during its operations, so threads are
enough, and they need no copies of the data.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from ..method import Upload
from ..state import State
from .local import ClientData, MemoryOf, OnImages
from .sequential import SequentialEngine


class ThreadEngine:
    """Trains the clients of a round in several replicas of the model, the largest client first."""

    def __init__(self, engine: SequentialEngine, num_clients: int) -> None:
        self.images = engine.images
        self.replicas = [engine, *(engine.replica() for _ in range(num_clients - 1))]

    def fit(
        self,
        round: int,
        clients: list[ClientData],
        global_model: State,
        received: State,
        memory_of: MemoryOf,
        on_images: OnImages,
    ) -> Iterator[tuple[Upload, State]]:
        """Train the clients; yields each one's upload and its memory for the next time."""
        lock, stopped = threading.Lock(), threading.Event()
        free = list(self.replicas)

        def count(number: int) -> None:
            if stopped.is_set():
                raise InterruptedError
            with lock:
                on_images(number)

        def fit_one(client: ClientData) -> tuple[Upload, State]:
            with lock:
                replica, memory = free.pop(), memory_of(client.id)
            try:
                return replica.fit_one(round, client, global_model, received, memory, count)
            finally:
                free.append(replica)

        largest_first = sorted(clients, key=lambda client: (-client.num_samples, client.id))
        cores = torch.get_num_threads()
        cores_each = max(1, cores // len(self.replicas))
        pool = ThreadPoolExecutor(
            len(self.replicas), initializer=torch.set_num_threads, initargs=(cores_each,)
        )
        try:
            done = list(pool.map(fit_one, largest_first))
        except BaseException:  # Ctrl-C, or a client that failed: the others need not go on
            stopped.set()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(cores)  # threads that PyTorch starts later follow the last call
        results = {c.id: result for c, result in zip(largest_first, done, strict=True)}
        yield from (results[client.id] for client in clients)


def has_random_layers(model: nn.Module, image_shape: tuple[int, int, int]) -> bool:
    """Whether a training pass draws numbers, as dropout does: from a generator that threads share,
    so that a run would not repeat."""
    before = torch.get_rng_state()
    with torch.no_grad():
        copy.deepcopy(model).train()(torch.zeros(2, *image_shape))
    return not torch.equal(before, torch.get_rng_state())
