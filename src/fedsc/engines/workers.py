"""Several clients at once on a CPU: worker processes, each with the sequential engine on one core.

One client cannot keep several cores busy: the steps of a small model are over before the cores have
shared them out, and most of their time is Python's. So each worker trains clients of its own.
Workers are forked, so the data are there without a copy; weights travel through shared memory.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import multiprocessing
import pickle
import signal
import sys
import tempfile
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import FedscError
from ..method import Upload
from ..state import State, num_bytes
from .local import ClientData, MemoryOf, OnImages, copy_into, refill_message
from .sequential import SequentialEngine

# One client in work and one waiting: a worker never waits for the next.
AHEAD = 2
LOOK_SECONDS = 0.1  # how often progress is asked for
ALIGNMENT = 64  # of tensors in shared memory


def can_fork() -> bool:
    """Whether workers can be made here: not on Windows or macOS, nor inside a daemon."""
    return sys.platform == "linux" and not multiprocessing.current_process().daemon


class WorkerEngine:
    """Trains the clients of a round in worker processes, the largest client first."""

    def __init__(
        self, engine: SequentialEngine, clients: list[ClientData], num_workers: int
    ) -> None:
        self.images, self.engine, self.clients = engine.images, engine, clients
        self.num_workers = num_workers
        self.workers: list[Worker] = []
        self.global_model: State = {}
        self.message: State = {}

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
        if not self.workers:
            self.start(global_model, received)
        copy_into(self.global_model, global_model)
        refill_message(self.message, received)
        largest_first = sorted(clients, key=lambda client: (-client.num_samples, client.id))
        todo = deque(client.id for client in largest_first)
        results: dict[int, tuple[Upload, State]] = {}
        cores = torch.get_num_threads()
        torch.set_num_threads(1)  # the cores are the workers': copies here must not wait for one
        try:
            for _ in range(AHEAD):
                for worker in self.workers:
                    if todo:
                        worker.send(round, todo[0], memory_of(todo.popleft()))
            while len(results) < len(clients):
                ready = wait([worker.connection for worker in self.workers], LOOK_SECONDS)
                for worker in self.workers:
                    on_images(worker.new_images())
                    if worker.connection not in ready:
                        continue
                    upload, memory = worker.receive()
                    results[upload.client] = upload, memory
                    if todo:
                        worker.send(round, todo[0], memory_of(todo.popleft()))
        except BaseException:  # Ctrl-C, or a client that failed: what others still do is of no use
            stop_all(self.workers)
            raise
        finally:
            torch.set_num_threads(cores)
        yield from (results[client.id] for client in clients)

    def start(self, global_model: State, received: State) -> None:
        """Fork the workers, with room in shared memory for all that will travel."""
        self.global_model, self.message = shared_copy(global_model), shared_copy(received)
        room = 4 * (num_bytes(global_model) + num_bytes(received)) + 2**20
        with warnings.catch_warnings():
            # Python warns of forking beside threads: the workers touch nothing that those hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            for _ in range(self.num_workers):
                self.workers.append(Worker(self, room, self.workers))
        weakref.finalize(self, stop_all, self.workers)


class Worker:
    """A worker process as its parent sees it."""

    def __init__(self, engine: WorkerEngine, room: int, before: list[Worker]) -> None:
        self.inboxes = [mmap.mmap(-1, room) for _ in range(AHEAD)]
        self.outboxes = [mmap.mmap(-1, room) for _ in range(AHEAD)]
        self.images = torch.zeros(1, dtype=torch.int64).share_memory_()
        self.seen_images = self.sent = self.received = 0
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        # A worker ends when its parent does, which it learns when nobody else holds the pipe.
        to_close = [self.connection, *(worker.connection for worker in before)]
        self.process = context.Process(
            target=serve, args=(engine, self, theirs, to_close), daemon=True
        )
        self.process.start()
        theirs.close()

    def send(self, round: int, client: int, memory: State) -> None:
        job = round, client, memory
        with self.explain_death():
            self.connection.send_bytes(pack(job, self.inboxes[self.sent % AHEAD]))
        self.sent += 1

    def receive(self) -> tuple[Upload, State]:
        with self.explain_death():
            content = self.connection.recv_bytes()
        result = unpack(content, self.outboxes[self.received % AHEAD])
        self.received += 1
        if isinstance(result, BaseException):
            raise result
        return result

    def new_images(self) -> int:
        """Images trained on since this was last asked."""
        seen, self.seen_images = self.seen_images, int(self.images)
        return self.seen_images - seen

    @contextlib.contextmanager
    def explain_death(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionError):
            self.process.join(1)
            raise FedscError(
                f"a worker process ended by itself (exit code {self.process.exitcode}), perhaps "
                "for lack of memory: take --engine sequential, or fewer --threads"
            ) from None


def serve(
    engine: WorkerEngine, worker: Worker, connection: Connection, to_close: list[Any]
) -> None:
    """The life of a worker: a client after another until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    for other in to_close:
        other.close()
    # One, however many cores there are: the parent's threads are not forked, and OpenMP would wait
    # for them for ever.
    torch.set_num_threads(1)

    def count(number: int) -> None:
        worker.images += number

    done = 0
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            content = connection.recv_bytes()
            round, client, memory = unpack(content, worker.inboxes[done % AHEAD])
            try:
                arguments = engine.clients[client], engine.global_model, engine.message, memory
                result: Any = engine.engine.fit_one(round, *arguments, count)
            except Exception as error:
                result = portable(error)
            connection.send_bytes(pack(result, worker.outboxes[done % AHEAD]))
            done += 1


def portable(error: Exception) -> Exception:
    """The error with the place where it was raised as a note, or if it cannot travel, as text."""
    text = "".join(traceback.format_exception(error))
    if not isinstance(error, FedscError):  # that is a line for people
        error.add_note(f"raised in a worker process:\n{text}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(text)
    return error


def stop_all(workers: list[Worker]) -> None:
    for worker in workers:
        worker.connection.close()
        worker.process.terminate()
    for worker in workers:
        worker.process.join()
    workers.clear()


# Messages: all but the tensors is pickled; those lie in shared memory, one after another ----------


def pack(content: Any, room: mmap.mmap) -> bytes:
    stream = io.BytesIO()
    _Packer(stream, room).dump(content)
    return stream.getvalue()


def unpack(content: bytes, room: mmap.mmap) -> Any:
    return _Unpacker(io.BytesIO(content), room).load()


class _Packer(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, room: mmap.mmap) -> None:
        super().__init__(stream, protocol=5)
        self.room, self.used = room, 0

    def persistent_id(self, item: Any) -> Any:
        if not isinstance(item, Tensor):
            return None
        flat = item.detach().contiguous().reshape(-1).view(torch.uint8)
        start, size = self.used, len(flat)
        if size == 0:
            return item.dtype, item.shape, None
        if size > len(self.room) - start:  # more than was foreseen; a full pipe would block
            with tempfile.NamedTemporaryFile(prefix="fedsc-", delete=False) as file:
                file.write(flat.numpy().data)
            return item.dtype, item.shape, file.name
        bytes_in(self.room, start, size).copy_(flat)
        self.used += -(-size // ALIGNMENT) * ALIGNMENT
        return item.dtype, item.shape, (start, size)


class _Unpacker(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, room: mmap.mmap) -> None:
        super().__init__(stream)
        self.room = room

    def persistent_load(self, place: Any) -> Tensor:
        dtype, shape, where = place
        if where is None:
            return torch.empty(shape, dtype=dtype)
        if isinstance(where, tuple):
            flat = bytes_in(self.room, *where).clone()
        else:
            flat = torch.frombuffer(bytearray(Path(where).read_bytes()), dtype=torch.uint8)
            Path(where).unlink()
        return flat.view(dtype).reshape(shape)


def bytes_in(room: mmap.mmap, start: int, size: int) -> Tensor:
    return torch.frombuffer(room, dtype=torch.uint8, count=size, offset=start)


def shared_copy(state: State) -> State:
    return {
        name: shared_copy(value) if isinstance(value, dict) else value.clone().share_memory_()
        for name, value in state.items()
    }
