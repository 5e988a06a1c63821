"""The methods, by the name the command line knows them by."""

from __future__ import annotations

import dataclasses
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ..contract import check_class
from ..errors import FedscError, in_words, unknown
from ..method import Method
from ..options import option_text, parse
from ..plugins import is_path, object_from_path
from .fedavg import FedAvg
from .fedcda import FedCDA
from .fednh import FedNH
from .fedntd import FedNTD
from .fedproto import FedProto
from .fedprox import FedProx
from .fedrcl import FedRCL
from .fedsc import FedSC
from .fedsc_plus import FedSCPlus
from .moon import Moon

__all__ = [
    "METHODS",
    "FedAvg",
    "FedCDA",
    "FedNH",
    "FedNTD",
    "FedProto",
    "FedProx",
    "FedRCL",
    "FedSC",
    "FedSCPlus",
    "Moon",
    "changed_options",
    "installed_methods",
    "method_class",
    "method_from_text",
    "method_to_text",
]

METHODS: dict[str, type[Method]] = {
    cls.name: cls
    for cls in (FedAvg, FedProx, Moon, FedNTD, FedProto, FedNH, FedRCL, FedCDA, FedSC, FedSCPlus)
}


def installed_methods() -> dict[str, EntryPoint]:
    """The methods that installed packages register under the entry point `fedsc.methods`."""
    return {point.name: point for point in entry_points(group="fedsc.methods")}


def method_class(name: str) -> type[Method]:
    """A method of ours, of an installed package (entry point `fedsc.methods`), or of a file."""
    if name in METHODS:
        return METHODS[name]
    if is_path(name):
        cls = object_from_path("method", name)
    else:
        installed = installed_methods()
        if name not in installed:
            raise unknown("method", name, [*METHODS, *installed, "path/to/file.py:Name"])
        try:
            cls = installed[name].load()
        except Exception as error:
            raise FedscError(f"method '{name}' cannot be loaded: {in_words(error)}") from error
    if not (isinstance(cls, type) and issubclass(cls, Method) and dataclasses.is_dataclass(cls)):
        raise FedscError(f"method '{name}' is not a dataclass that inherits from fedsc.Method")
    if not isinstance(getattr(cls, "name", None), str):
        raise FedscError(f"method '{name}' has no name: give it `name: ClassVar[str] = \"...\"`")
    check_class(cls)
    return cls


def method_from_text(text: str, dataset: str = "") -> Method:
    """A method as written on the command line: `fedsc`, `fedsc,tau=0.1`, `fedsc,literal,tau=0.1`.

    A word without "=" names a preset; what follows overrides it. Where a method's paper chose a
    value for a data set, that is the default on it.
    """
    name, *words = [word.strip() for word in text.split(",")]
    cls = method_class(name)
    settings: dict[str, Any] = dict(cls.dataset_defaults.get(dataset, {}))
    for word in words:
        key, equals, value = word.partition("=")
        if equals:
            settings[key.strip()] = parse(cls, key.strip(), value.strip())
        elif word in cls.presets:
            settings.update(cls.presets[word])
        elif cls.presets:
            raise unknown(f"preset of {name}", word, cls.presets)
        else:
            raise FedscError(f"'{word}' in '{text}': {name} has no presets; write option=value")
    return cls(**settings)


def method_to_text(method: Method, dataset: str = "", name: str | None = None) -> str:
    """The text that `method_from_text` makes this method of: its name (or, of a method from a file,
    the one it was asked for by) and what is not default."""
    preset, changed = shortest(method, dataset)
    options = (f"{option}={option_text(value)}" for option, value in changed.items())
    return ",".join([name or method.name, *preset, *options])


def shortest(method: Method, dataset: str = "") -> tuple[list[str], dict[str, Any]]:
    """The options that are not as by default, or as in a preset if that leaves fewer words."""
    ways: list[list[str]] = [[], *([preset] for preset in method.presets)]
    named = [(way, changed_options(method, dataset, *way)) for way in ways]
    return min(named, key=lambda way: len(way[0]) + len(way[1]))


def changed_options(method: Method, dataset: str = "", preset: str | None = None) -> dict[str, Any]:
    """The hyperparameters that are not the method's default on the data set, or the preset's."""
    usual = {
        **{field.name: field.default for field in dataclasses.fields(method)},
        **method.dataset_defaults.get(dataset, {}),
        **(method.presets[preset] if preset else {}),
    }
    return {k: getattr(method, k) for k, value in usual.items() if getattr(method, k) != value}
