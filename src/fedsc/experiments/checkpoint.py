"""Checkpoint files: a state and facts about it in one safetensors file that carries its checksum.

The checksum is the SHA-256 of the file itself with zeros in the place of the checksum. So a file
needs no other to be judged by, and equal runs write equal files.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors.torch import save

from ..errors import FedscError
from ..files import LARGEST_TEXT, CannotReadError, cannot_read, parse_json, read_bytes
from ..report.checks import Check, is_count, is_number, is_text, record_of, wrong_in
from ..state import State, flatten, read_state

Facts = dict[str, Any]
ZEROS = "0" * 64


def is_files_of_clients(value: Any) -> bool:
    """As ClientStore.save gives them."""
    return isinstance(value, dict) and all(
        client.isdecimal() and len(client) < 20 and is_text(name) for client, name in value.items()
    )


FACTS: dict[str, Check] = {
    **{"sha256": is_text, "round": is_count, "accuracy": is_number},
    **dict.fromkeys(("memories", "records"), is_files_of_clients),
}


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
        content = bytearray(read_bytes(path))
        facts = read_facts(content, path)
        checksum = facts.pop("sha256").encode()
        place = content.index(checksum)
        content[place : place + 64] = ZEROS.encode()
        if hashlib.sha256(content).hexdigest().encode() != checksum:
            raise ValueError("its checksum does not fit its content")
        return facts, read_state(bytes(content))
    except FedscError:
        raise
    except OSError as error:
        raise cannot_read(path, error) from None
    except MemoryError:
        raise CannotReadError(f"{path} holds more than fits in memory") from None
    except ValueError as error:
        raise FedscError(f"{path} is damaged: {error}") from None


def read_facts(content: bytearray, path: Path) -> Facts:
    size = int.from_bytes(content[:8], "little")
    if size > min(len(content) - 8, LARGEST_TEXT):
        raise ValueError(f"its header announces {size:,} bytes, it has {len(content):,} in all")
    header = parse_json(content[8 : 8 + size].decode(), path)
    wrong = wrong_in(header, {"__metadata__": record_of({"fedsc": is_text})})
    if wrong:
        raise ValueError(f"of its header, {wrong}")
    facts: Facts = parse_json(header["__metadata__"]["fedsc"], path)
    wrong = wrong_in(facts, FACTS)
    if wrong:
        raise ValueError(wrong)
    return facts
