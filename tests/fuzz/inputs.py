"""How many inputs each reader gets, and how valid files are turned into broken ones."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from fedsc.errors import FedscError

INPUTS = int(os.environ.get("FEDSC_FUZZ", "100"))  # for each reader

fuzzed = settings(
    max_examples=INPUTS,
    deadline=None,
    database=None,
    # `make test` gives the same result every time; the longer targets look at new inputs.
    derandomize=INPUTS <= 100,
    suppress_health_check=list(HealthCheck),
)

HOSTILE_NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 2**63 - 1, 2**64 - 1)
HOSTILE_BYTES = (
    *(b"", b"\0", b"\n", b"\xff\xfe", b"\xc3(", b"nan", b"1e999", b"-1", b"null", b"[" * 2000),
    *(b"../../x", b"/etc/passwd", b"\x1b[2J", b"\\ud800", b"9" * 5000, b'{"a":' * 500),
)


@st.composite
def damaged(draw: st.DrawFn, valid: bytes) -> bytes:
    """A valid file with bytes flipped, cut out, repeated or put in, or cut off."""
    content = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        # Most of what decides is at the beginning and at the end.
        place = draw(st.integers(0, len(content)) | st.integers(0, min(64, len(content))))
        if draw(st.integers(0, 4)) == 0:
            place = max(0, len(content) - place)
        length = draw(st.integers(1, 16))
        kind = draw(st.sampled_from(("byte", "number", "cut", "insert", "repeat", "end", "text")))
        if kind == "byte":
            content[place : place + 1] = bytes([draw(st.integers(0, 255))])
        elif kind == "number":
            number = draw(st.sampled_from(HOSTILE_NUMBERS)).to_bytes(8, "little")
            size = draw(st.sampled_from((1, 2, 4, 8)))
            order = draw(st.sampled_from((1, -1)))
            content[place : place + size] = number[:size][::order]
        elif kind == "cut":
            del content[place : place + length]
        elif kind == "insert":
            content[place:place] = draw(st.binary(min_size=1, max_size=16))
        elif kind == "repeat":
            content[place:place] = content[place : place + length] * draw(st.integers(1, 50))
        elif kind == "text":
            content[place : place + length] = draw(st.sampled_from(HOSTILE_BYTES))
        else:
            del content[place:]
    return bytes(content)


any_json: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from((0, -1, 1, 0.5, 2**63, 10**400, 1e308, -1e308, "", "x", "../x", "$\\frac{"))
    | st.sampled_from(("\x1b[31m", "\ud800", "fedavg", "a.py:X", "nid1:0.2", "9" * 400))
    | st.floats(allow_nan=True)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)


@st.composite
def changed_json(draw: st.DrawFn, valid: Any) -> Any:
    """A valid JSON value with one to three of its parts replaced, removed or added."""
    value = valid
    for _ in range(draw(st.integers(1, 3))):
        value = _change(draw, value)
    return value


def _change(draw: st.DrawFn, value: Any) -> Any:
    if isinstance(value, dict) and value and draw(st.integers(0, 9)):
        key = draw(st.sampled_from(sorted(value)))
        action = draw(st.sampled_from(("inside", "inside", "replace", "remove", "rename")))
        rest = {k: v for k, v in value.items() if k != key}
        if action == "remove":
            return rest
        if action == "rename":
            return {**rest, draw(st.text(max_size=6)): value[key]}
        return {**value, key: _change(draw, value[key]) if action == "inside" else draw(any_json)}
    if isinstance(value, list) and value and draw(st.integers(0, 9)):
        place = draw(st.integers(0, len(value) - 1))
        action = draw(st.sampled_from(("inside", "remove", "repeat")))
        if action == "inside":
            return [*value[:place], _change(draw, value[place]), *value[place + 1 :]]
        return value[:place] + value[place:][:1] * (2 * (action == "repeat")) + value[place + 1 :]
    return draw(any_json)


def read_or_refuse(read: Callable[[], Any]) -> Any:
    """What the reader gives, or None where it refuses; any other exception fails the test."""
    try:
        return read()
    except FedscError:
        return None


@contextmanager
def nothing_outside(folder: Path) -> Iterator[None]:
    """Fails if anything beside `folder` in the folder above has changed, or is new."""
    before = _listing(folder.parent, folder)
    yield
    assert _listing(folder.parent, folder) == before


def _listing(root: Path, without: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if Path(folder, name) != without]
        for name in files:
            facts = os.lstat(os.path.join(folder, name))
            found[os.path.join(folder, name)] = (facts.st_size, facts.st_mtime_ns)
    return found


def with_little_memory(script: str, mib: int = 512) -> str:
    """What a script says in a process that may take `mib` more than it has after its imports."""
    head = (
        "import resource, sys, fedsc, warnings\n"
        "from pathlib import Path\n"
        "from fedsc.errors import FedscError\n"
        "from fedsc.data import cifar_pickle, fetch, folder, idx, images, npz, sources\n"
        "from fedsc.experiments import checkpoint\n"
        "from fedsc.files import read_json\n"
        "kib = next(int(l.split()[1]) for l in open('/proc/self/status') if 'VmSize' in l)\n"
        f"limit = kib * 1024 + {mib} * 2**20\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "def said(read, *args):\n"
        "    try:\n"
        "        read(*args)\n"
        "        print('read')\n"
        "    except FedscError as error:\n"
        "        print('refused:', error)\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, "-c", head + script],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
