"""The README's Python runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[1] / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example(number: int) -> None:
    code = EXAMPLES[number]
    assert len(code.splitlines()) < 25
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["run"].accuracy > 0.4


def test_every_file_in_the_tree_exists() -> None:
    root = Path(__file__).parents[1]
    tree = PAGE.split("src/fedsc/\n")[1].split("```")[0]
    listed = re.findall(r"^  ([\w.]+(?:/|\.py))", tree, re.MULTILINE)
    assert len(listed) > 10
    assert all((root / "src" / "fedsc" / name).exists() for name in listed)
