"""Broken and hostile configuration files: an error that says what is allowed, or a valid job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fedsc.experiments.compare import Job, read_job
from fedsc.experiments.reproduce import read_asked
from fedsc.options import options_of
from fedsc.spec import RunSpec, read_config

from .inputs import any_json, changed_json, damaged, fuzzed, nothing_outside, read_or_refuse

TOML = b"""# a comment
methods = ["fedavg", "fedsc,tau=0.1"]
seeds = [0, 1]
rounds = 3
lr = 0.05
partition = "nid1:0.2"
compile = false
"""
VALUES = st.sampled_from(
    (
        *("1", "-1", "0.5", "nan", "inf", "1e999", "9" * 400, "9" * 5000, "true", '"x"', "[]"),
        *("[" * 3000, "{}", "{a.b = 1}", "1979-05-27", '"../x"', '"a.py:X"', '["fedsc"]', "[0]"),
        *('"\\ud800"', '"\\u001b[2J"', "0x7fffffffffffffff", '"cuda:99999999999999999999"'),
    )
)
NAMES = st.sampled_from(
    [opt.name for opt in options_of(RunSpec)] + ["methods", "seeds", "x", "a.b"]
)


def rows(pairs: list[tuple[str, str]]) -> bytes:
    return "".join(f"{name} = {value}\n" for name, value in pairs).encode()


@fuzzed
@given(content=damaged(TOML) | st.lists(st.tuples(NAMES, VALUES), max_size=4).map(rows))
def test_config(tmp_path_factory: Any, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "config.toml"
    path.write_bytes(content)

    def read() -> dict[str, RunSpec]:
        found = read_config(path)
        methods = found.pop("methods", None) or [found.pop("method", "fedsc")]
        seeds = found.pop("seeds", None) or [found.pop("seed", 0)]
        for name in ("method", "seed"):
            found.pop(name, None)
        return Job(methods, seeds, found).specs()

    specs = read_or_refuse(read)
    for name in specs or {}:
        assert Path(name).name == name


JOB = {"methods": ["fedavg", "fedsc"], "seeds": [0, 1], "settings": {"rounds": 2, "lr": 0.1}}


def as_bytes(value: Any) -> bytes:
    return json.dumps(value).encode()


@fuzzed
@given(content=damaged(as_bytes(JOB)) | changed_json(JOB).map(as_bytes) | any_json.map(as_bytes))
def test_job(tmp_path_factory: Any, content: bytes) -> None:
    out = tmp_path_factory.getbasetemp() / "job"
    out.mkdir(exist_ok=True)
    (out / "job.json").write_bytes(content)
    job = read_or_refuse(lambda: read_job(out, {}))
    for name in job.specs() if job else {}:
        assert (out / name).resolve().parent == out.resolve()


SWEEP = {
    **{"name": "sweep", "scale": "", "columns": ["sweep/accuracy"], "methods": ["fedsc"]},
    **{"seeds": [0], "values": {"tau": ["0.05", "0.1"], "lr": ["0.1"]}, "settings": {"rounds": 2}},
}
TABLE = {"name": "table1", "scale": "smoke", "columns": [], "methods": ["fedavg"], "seeds": [0]}


@fuzzed
@given(
    name=st.sampled_from(("sweep", "table1")),
    content=damaged(as_bytes(SWEEP))
    | changed_json(SWEEP).map(as_bytes)
    | changed_json(TABLE).map(as_bytes),
)
def test_grid(tmp_path_factory: Any, name: str, content: bytes) -> None:
    out = tmp_path_factory.getbasetemp() / "grid"
    out.mkdir(exist_ok=True)
    (out / f"{name}.json").write_bytes(content)
    with nothing_outside(out):
        asked = read_or_refuse(lambda: read_asked(out / f"{name}.json"))
    assert asked is None or asked.name == name
