"""States of many clients in little memory: what was not used for longest lies on disk.

Files are never overwritten. A state that changes gets a new file, and the old one stays until
`discard_unused` is told that no checkpoint needs it any more: a run killed at any moment finds
all that its last checkpoint names.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Iterator, MutableMapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from .errors import FedscError
from .files import write_atomically
from .state import State, flatten, num_bytes, to_device, unflatten


class ClientStore(MutableMapping[int, State]):
    """A mapping from clients to states that holds at most `limit_bytes` of them in memory.

    `folder` is made when first needed; without one, a temporary folder is used.
    """

    def __init__(self, name: str, limit_bytes: int, folder: Path | None = None) -> None:
        self.name, self.limit_bytes = name, limit_bytes
        self._folder = folder
        self._in_memory: OrderedDict[int, State] = OrderedDict()  # least recently used first
        self._files: dict[int, str] = {}  # where the current state is, for those on disk
        self._in_checkpoint: set[str] = set()
        self._version = 0
        self._bytes = 0

    def folder(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="fedsc-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder

    def __getitem__(self, client: int) -> State:
        if client in self._in_memory:
            self._in_memory.move_to_end(client)
            return self._in_memory[client]
        state = self._read(self._files[client])
        self._keep(client, state)
        return state

    def __setitem__(self, client: int, state: State) -> None:
        self._drop_file(client)  # what is on disk is out of date
        self._keep(client, to_device(state, torch.device("cpu")))

    def __delitem__(self, client: int) -> None:
        if client not in self:
            raise KeyError(client)
        self._drop_file(client)
        if client in self._in_memory:
            self._bytes -= num_bytes(self._in_memory.pop(client))

    def __contains__(self, client: object) -> bool:
        return client in self._in_memory or client in self._files

    def __iter__(self) -> Iterator[int]:
        return iter(sorted({*self._in_memory, *self._files}))

    def __len__(self) -> int:
        return len({*self._in_memory, *self._files})

    def _drop_file(self, client: int) -> None:
        """Forget a client's file, and remove it unless the last checkpoint names it."""
        name = self._files.pop(client, None)
        if name is not None and name not in self._in_checkpoint:
            (self.folder() / name).unlink(missing_ok=True)

    def _keep(self, client: int, state: State) -> None:
        if client in self._in_memory:
            self._bytes -= num_bytes(self._in_memory.pop(client))
        self._in_memory[client] = state
        self._bytes += num_bytes(state)
        while self._bytes > self.limit_bytes and len(self._in_memory) > 1:
            oldest, old_state = next(iter(self._in_memory.items()))
            self._write(oldest, old_state)
            del self._in_memory[oldest]
            self._bytes -= num_bytes(old_state)

    def _write(self, client: int, state: State) -> None:
        if client in self._files:
            return
        self._version += 1
        name = f"{self.name}-{client}-{self._version}.safetensors"
        write_atomically(self.folder() / name, save(flatten(state)))
        self._files[client] = name

    def _read(self, name: str) -> State:
        path = self.folder() / name
        try:
            return unflatten(load(path.read_bytes()))
        except (OSError, SafetensorError, ValueError) as error:
            raise FedscError(f"cannot read a client's state from {path}: {error}") from None

    def save(self) -> dict[str, str]:
        """Put every state on disk; returns the file of each client, to be named in a checkpoint."""
        for client, state in self._in_memory.items():
            self._write(client, state)
        self._in_checkpoint |= set(self._files.values())
        return {str(client): name for client, name in self._files.items()}

    def restore(self, files: dict[str, str]) -> None:
        """Take up the states that a checkpoint names."""
        self._in_memory.clear()
        self._bytes = 0
        self._files = {int(client): os.path.basename(name) for client, name in files.items()}
        versions = [int(name.rsplit("-", 1)[1].split(".")[0]) for name in self._files.values()]
        self._version = max(versions, default=0)
        self._in_checkpoint = set(self._files.values())

    def discard_unused(self) -> None:
        """Remove files of states that have changed since; call it once a checkpoint is written."""
        if self._folder is None or not self._folder.exists():
            return
        used = self._in_checkpoint = set(self._files.values())
        for path in self._folder.glob(f"{self.name}-*.safetensors"):
            if path.name not in used:
                with contextlib.suppress(OSError):
                    path.unlink()
