"""The run configuration: the options of `fedsc run` and those that only a federation of nodes has.

Flower knows only keys that stand in the app's pyproject.toml, and no null: "" means "not given".
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from ..data.own import OWN_DATA
from ..errors import FedscError, unknown
from ..experiments.folder import folder_name
from ..method import Method
from ..methods import method_class, method_from_text
from ..options import check, option, options_of, parse
from ..spec import RunSpec

Config = Mapping[str, bool | float | int | str]


@dataclasses.dataclass(frozen=True)
class NodeOptions:
    """What a run on Flower has beside the fields of RunSpec."""

    out: str = option("runs/flower", "folder on the server for the run folders METHOD-seedN")
    resume: bool = option(False, "go on with the runs in `out`")
    overwrite: bool = option(False, "replace the runs in `out` that have the same names")
    data_dir: str = option("", "folder with the data sets, where a node does not say otherwise")
    min_count: int = option(
        5, "a class of which a node has fewer images sends no prototype", at_least=1
    )
    min_replies: float = option(
        0.5, "share of a round's nodes that must reply, or the run stops", above=0, at_most=1
    )
    round_timeout: float = option(3600.0, "seconds to wait for the replies of a round", above=0)
    start_timeout: float = option(300.0, "seconds to wait for all nodes before starting", above=0)

    def __post_init__(self) -> None:
        check(self)


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of those that a run configuration asks for."""

    spec: RunSpec
    method: Method

    @property
    def name(self) -> str:
        """Of its run folder, as `fedsc run` calls it."""
        return f"{folder_name(self.spec.method)}-seed{self.spec.seed}"

    @property
    def own_data(self) -> bool:
        """Whether every node brings its own images."""
        return self.spec.partition == OWN_DATA


def read_run_config(config: Config) -> tuple[NodeOptions, list[Job]]:
    """The options of the federation, and the runs to do one after another, all checked.

    As `fedsc run` takes several methods and seeds: `method = "fedavg; fedsc"`, `seed = "0; 1"`.
    """
    known = {opt.name: opt for cls in (RunSpec, NodeOptions) for opt in options_of(cls)}
    values: dict[str, Any] = {}
    for key, value in config.items():
        name = key.replace("-", "_")
        if name not in known:
            raise unknown("option in the run configuration", key, map(as_key, known))
        if value != "" or known[name].default == "":
            values[name] = value
    names = {opt.name for opt in options_of(NodeOptions)}
    options = NodeOptions(**{name: v for name, v in values.items() if name in names})
    settings = {name: v for name, v in values.items() if name not in names}
    methods = split_list(settings.pop("method", "fedsc"))
    seeds = [int(parse(RunSpec, "seed", s)) for s in split_list(settings.pop("seed", 0))]
    engine = settings.pop("engine", "auto")
    if engine in ("workers", "graphs"):
        raise FedscError(f"engine = {engine} trains clients together: on Flower take sequential")
    for name in ("dp_unit", "attack", "dropout", "straggler"):
        if settings.get(name, "none") not in ("none", "", 0, 0.0):
            raise FedscError(
                f"{as_key(name)} = {settings[name]} is for simulations by fedsc run: on Flower "
                "nodes fail by themselves, and noise from a seed the server knows hides nothing"
            )
    if settings.get("calibrated"):
        raise FedscError(
            f"calibrated = {settings['calibrated']} is for simulations by fedsc run: on Flower the "
            "server has no images of the nodes to measure it on; leave it out, or take "
            "method = fedsc+, whose nodes send what it needs"
        )
    jobs = [
        make_job(
            RunSpec(
                method=with_min_count(method, options.min_count),
                seed=seed,
                engine="sequential",
                **settings,
            )
        )
        for method in methods
        for seed in seeds
    ]
    if len({job.name for job in jobs}) < len(jobs):
        raise FedscError("a method and seed is asked for twice: give each once")
    return options, jobs


def split_list(value: Any) -> list[str]:
    return [word.strip() for word in str(value).split(";")]


def make_job(spec: RunSpec) -> Job:
    method = method_from_text(spec.method, spec.dataset)
    if not method.shares_weights():
        raise FedscError(
            f"{spec.method} is evaluated on the clients' own models, which stay on the nodes: "
            "take a form of it that shares weights"
        )
    return Job(spec, method)


def with_min_count(method: str, min_count: int) -> str:
    """The method with `min_count`, if it has that option and does not say so itself."""
    name, *words = method.split(",")
    fields = {field.name for field in dataclasses.fields(method_class(name.strip()))}
    said = any(word.partition("=")[0].strip() == "min_count" for word in words)
    return method if said or "min_count" not in fields else f"{method},min_count={min_count}"


# The app --------------------------------------------------------------------------------------

APP_HEADER = """\
# The Flower app of fedsc. Written by `fedsc flower app`: change it there, not here.
[project]
name = "fedsc-flower"
version = "{version}"
description = "FedSC and nine other methods across machines"
license = "MIT"
dependencies = ["fedsc[flower]>={version}"]

[tool.flwr.app]
publisher = "fedsc"

[tool.flwr.app.components]
serverapp = "fedsc.flower.server:app"
clientapp = "fedsc.flower.client:app"

[tool.flwr.app.config]
"""


NOTES = {
    "method": '; several: "fedavg; fedsc"',
    "seed": '; several: "0; 1; 2"',
    "partition": "; or own: every node brings its own images",
}


def app_pyproject(version: str) -> str:
    """The pyproject.toml that `flwr run` reads, with every option, its default and its help."""
    lines = [APP_HEADER.format(version=version)]
    for opt in (*options_of(NodeOptions), *options_of(RunSpec)):
        default = "" if opt.default is None else opt.default
        choices = f" ({', '.join(opt.choices)})" if opt.choices else NOTES.get(opt.name, "")
        lines.append(f"# {opt.help}{choices}\n{as_key(opt.name)} = {json.dumps(default)}\n")
    return "".join(lines)


def as_key(name: str) -> str:
    return name.replace("_", "-")
