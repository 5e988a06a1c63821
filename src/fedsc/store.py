"""States of many clients in little memory: what was not used for longest lies on disk.

A file is named by its client and the checksum of its content. A state that changes gets a new file,
and the old one stays until `discard_unused` is told that no checkpoint needs it any more: a run
killed at any moment finds all that its checkpoints name, and a damaged file is found out.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, MutableMapping
from pathlib import Path

import torch
from safetensors.torch import save

from .errors import FedscError
from .files import (
    CannotReadError,
    cannot_read,
    explain_write_errors,
    read_bytes,
    write_atomically,
)
from .state import State, flatten, num_bytes, read_state, to_device


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
        self._bytes = 0

    def folder(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="fedsc-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        with explain_write_errors(self._folder):
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
        """Forget a client's file, and remove it unless a checkpoint names it."""
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
        content = save(flatten(state))
        name = f"{self.name}-{client}-{_checksum(content)}.safetensors"
        write_atomically(self.folder() / name, content)
        self._files[client] = name

    def _read(self, name: str) -> State:
        path = self.folder() / name
        try:
            return read_state(self._content(name))
        except (OSError, ValueError) as error:
            raise FedscError(f"cannot read a client's state from {path}: {error}") from None

    def _content(self, name: str) -> bytes:
        content = read_bytes(self.folder() / name)
        if not name.endswith(f"-{_checksum(content)}.safetensors"):
            raise ValueError("its checksum is not that in its name")
        return content

    def save(self) -> dict[str, str]:
        """Put every state on disk; returns the file of each client, to be named in a checkpoint."""
        for client, state in self._in_memory.items():
            self._write(client, state)
        self._in_checkpoint |= set(self._files.values())
        # In the order of the clients: equal runs give equal checkpoints.
        return {str(client): self._files[client] for client in sorted(self._files)}

    def restore(self, files: dict[str, str]) -> None:
        """Take up the states that a checkpoint names."""
        self._in_memory.clear()
        self._bytes = 0
        self._files = {int(client): os.path.basename(name) for client, name in files.items()}
        self._in_checkpoint = set(self._files.values())

    def check(self) -> None:
        """Read every file once; the first that is missing or damaged raises an error."""
        for name in self._files.values():
            path = self.folder() / name
            try:
                self._content(name)
            except CannotReadError:
                raise
            except (FileNotFoundError, ValueError) as error:
                raise FedscError(f"{path}: {error}") from None
            except OSError as error:
                raise cannot_read(path, error) from None

    def discard_unused(self, in_checkpoints: Iterable[str]) -> None:
        """Remove all files but those that are in use or in a checkpoint that is kept."""
        self._in_checkpoint = set(in_checkpoints)
        used = self._in_checkpoint | set(self._files.values())
        if self._folder is None or not self._folder.exists():
            return
        for path in self._folder.glob(f"{self.name}-*"):
            if path.name not in used:
                with contextlib.suppress(OSError):
                    path.unlink()


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
