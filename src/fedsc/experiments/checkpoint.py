"""Checkpoint files: a state and facts about it in one safetensors file that carries its checksum.

The checksum is the SHA-256 of the file itself with zeros in the place of the checksum. So a file
needs no other to be judged by, and equal runs write equal files.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from ..errors import FedscError
from ..state import State, flatten, unflatten

Facts = dict[str, Any]
ZEROS = "0" * 64


def seal(state: State, facts: Facts) -> bytes:
    """The content of a checkpoint file."""
    # One key: safetensors writes several in random order.
    metadata = {"fedsc": json.dumps({"sha256": ZEROS, **facts}, allow_nan=False)}
    content = bytearray(save(flatten(state), metadata=metadata))
    place = content.index(ZEROS.encode())
    content[place : place + 64] = hashlib.sha256(content).hexdigest().encode()
    return bytes(content)


def unseal(path: Path) -> tuple[Facts, State]:
    """The facts and the state of a checkpoint file; an error says what is wrong with it."""
    try:
        content = bytearray(path.read_bytes())
        facts = read_facts(content)
        checksum = facts.pop("sha256").encode()
        place = content.index(checksum)
        content[place : place + 64] = ZEROS.encode()
        if hashlib.sha256(content).hexdigest().encode() != checksum:
            raise ValueError("its checksum does not fit its content")
        return facts, unflatten(load(bytes(content)))
    except (OSError, SafetensorError, KeyError, TypeError, AttributeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise FedscError(f"{path} is damaged: {reason}") from None


def read_facts(content: bytes | bytearray) -> Facts:
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    facts: Facts = json.loads(header["__metadata__"]["fedsc"])
    return facts
