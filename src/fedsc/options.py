"""Settings as fields of frozen dataclasses: one place for a default, its help and its limits.

The command line, the configuration file and `fedsc methods` are all derived from these fields.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any, Literal, Union

from .errors import FedscError, unknown

LARGEST_NUMBER = 2**53  # whole numbers beyond this are no numbers of anything here
LIMITS = ("above", "at_least", "at_most")  # of a number, in a field's metadata


def option(
    default: Any,
    help: str,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Any:
    """A dataclass field with one line of documentation and the range of its values."""
    limits = {"above": above, "at_least": at_least, "at_most": at_most}
    return dataclasses.field(default=default, metadata={"help": help, **limits})


def option_text(value: Any) -> str:
    """As it is written on the command line: `true`, `none`, `0.1`, `1`."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


@dataclasses.dataclass(frozen=True)
class Option:
    """One field as the command line and the documentation see it."""

    name: str
    kind: type  # bool, int, float or str
    optional: bool  # None is allowed
    choices: tuple[str, ...]  # empty: any value of the kind
    default: Any
    help: str
    limits: str  # of a number: "above 0 and at most 1", or nothing


def options_of(cls: type) -> list[Option]:
    """The options of a dataclass, in the order they are written."""
    hints = typing.get_type_hints(cls)
    found = []
    for field in dataclasses.fields(cls):
        hint, optional = hints[field.name], False
        if typing.get_origin(hint) in (Union, types.UnionType):
            hint = next(a for a in typing.get_args(hint) if a is not type(None))
            optional = True
        choices: tuple[str, ...] = ()
        if typing.get_origin(hint) is Literal:
            hint, choices = str, typing.get_args(hint)
        help_line = field.metadata.get("help", "")
        limits = " and ".join(_limits(field.metadata))
        found.append(Option(field.name, hint, optional, choices, field.default, help_line, limits))
    return found


def check(settings: Any) -> None:
    """Fail at construction, naming the value and what is allowed. Call it from `__post_init__`."""
    fields = {field.name: field for field in dataclasses.fields(settings)}
    for opt in options_of(type(settings)):
        value = getattr(settings, opt.name)
        if value is None and opt.optional:
            continue
        if opt.choices and value not in opt.choices:
            raise unknown(f"value for {opt.name}", str(value), opt.choices)
        if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
            raise FedscError(f"{opt.name} is out of range (allowed: at most {LARGEST_NUMBER})")
        if opt.kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
            object.__setattr__(settings, opt.name, value)  # frozen, and 1 must hash like 1.0
        if opt.kind is int and hasattr(value, "__index__") and not isinstance(value, bool):
            value = int(value)  # NumPy's whole numbers are as good as Python's
            object.__setattr__(settings, opt.name, value)
        if type(value) is not opt.kind:
            raise FedscError(f"{opt.name} = {value!r} is not {_article(opt.kind)}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            _check_range(opt.name, value, fields[opt.name].metadata)


def _check_range(name: str, value: float, limits: typing.Mapping[str, Any]) -> None:
    above, at_least, at_most = (limits.get(word) for word in LIMITS)
    wrong = (
        not math.isfinite(value)
        or (above is not None and not value > above)
        or (at_least is not None and not value >= at_least)
        or (at_most is not None and not value <= at_most)
    )
    if wrong:
        words = ["finite"] if not math.isfinite(value) else []
        words += _limits(limits)
        raise FedscError(f"{name} = {value:g} is out of range (allowed: {' and '.join(words)})")


def _limits(metadata: typing.Mapping[str, Any]) -> list[str]:
    limits = ((word.replace("_", " "), metadata.get(word)) for word in LIMITS)
    return [f"{words} {limit:g}" for words, limit in limits if limit is not None]


def parse(cls: type, name: str, text: str) -> Any:
    """The value of a field written as text, as in `tau=0.1` on the command line."""
    known = {opt.name: opt for opt in options_of(cls)}
    if name not in known:
        raise unknown(f"option of {cls.__name__}", name, known)
    opt = known[name]
    if opt.optional and text.lower() in ("none", ""):
        return None
    if opt.kind is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if text.lower() not in words:
            raise FedscError(f"{name} = {text!r} is not true or false")
        return words[text.lower()]
    try:
        return opt.kind(text)
    except ValueError:
        raise FedscError(f"{name} = {text!r} is not {_article(opt.kind)}") from None


def _article(kind: type) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]
