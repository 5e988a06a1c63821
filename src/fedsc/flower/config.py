"""The run configuration: the options of `fedsc run` and those that only a federation of nodes has.

Flower knows only keys that stand in the app's pyproject.toml, and no null: "" means "not given".
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..data.own import OWN_DATA
from ..errors import FedscError, unknown
from ..method import Method
from ..methods import method_class, method_from_text
from ..options import check, option, options_of
from ..spec import RunSpec

Config = Mapping[str, bool | float | int | str]


@dataclasses.dataclass(frozen=True)
class NodeOptions:
    """What a run on Flower has beside the fields of RunSpec."""

    out: str = option("", "run folder on the server (default: runs/flower/METHOD-seedN)")
    resume: bool = option(False, "go on with the run in `out`")
    overwrite: bool = option(False, "replace the run in `out`")
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


def read_run_config(config: Config) -> tuple[RunSpec, NodeOptions, Method]:
    """The specification, the options of the federation and the method, all checked."""
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
    spec = RunSpec(**{name: v for name, v in values.items() if name not in names})
    if spec.engine == "graphs":
        raise FedscError("engine = graphs trains clients side by side: on Flower take sequential")
    spec = dataclasses.replace(
        spec, engine="sequential", method=with_min_count(spec.method, options.min_count)
    )
    method = method_from_text(spec.method, spec.dataset)
    if not method.shares_weights():
        raise FedscError(
            f"{spec.method} is evaluated on the clients' own models, which stay on the nodes: "
            "take a form of it that shares weights"
        )
    return spec, options, method


def with_min_count(method: str, min_count: int) -> str:
    """The method with `min_count`, if it has that option and does not say so itself."""
    name, *words = method.split(",")
    fields = {field.name for field in dataclasses.fields(method_class(name.strip()))}
    said = any(word.partition("=")[0].strip() == "min_count" for word in words)
    return method if said or "min_count" not in fields else f"{method},min_count={min_count}"


def is_own_data(spec: RunSpec) -> bool:
    return spec.partition == OWN_DATA


def run_folder(spec: RunSpec, options: NodeOptions) -> Path:
    from ..experiments.compare import folder_name

    if options.out:
        return Path(options.out).expanduser()
    return Path("runs") / "flower" / f"{folder_name(spec.method)}-seed{spec.seed}"


# The app --------------------------------------------------------------------------------------

APP_HEADER = """\
# The Flower app of fedsc. Written by `fedsc flower app`: change it there, not here.
[project]
name = "fedsc-flower"
version = "{version}"
description = "FedSC and eight other methods across machines"
license = "MIT"
dependencies = ["fedsc[flower]>={version}"]

[tool.flwr.app]
publisher = "fedsc"

[tool.flwr.app.components]
serverapp = "fedsc.flower.server:app"
clientapp = "fedsc.flower.client:app"

[tool.flwr.app.config]
"""


def app_pyproject(version: str) -> str:
    """The pyproject.toml that `flwr run` reads, with every option, its default and its help."""
    lines = [APP_HEADER.format(version=version)]
    for opt in (*options_of(NodeOptions), *options_of(RunSpec)):
        default = "" if opt.default is None else opt.default
        choices = f" ({', '.join(opt.choices)})" if opt.choices else ""
        lines.append(f"# {opt.help}{choices}\n{as_key(opt.name)} = {json.dumps(default)}\n")
    return "".join(lines)


def as_key(name: str) -> str:
    return name.replace("_", "-")
