"""What the class and the hooks of a method must give.

A mistake in somebody's own method is said where its hook is called, in one line with the hook's
name, instead of failing later inside of an engine or, worse, when the run is to be resumed.

Only types, names, shapes and whether there is a gradient are looked at, never a value: nothing here
waits for a GPU, and in a captured graph it happens while capturing, not in its replays.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, get_args, get_origin

from torch import Tensor, nn

from .errors import FedscError
from .method import Method, Moment
from .state import Layout, State, lacking, layout

# Public functions of Method that are there to be called, not to be overridden.
HELPERS = {"average", "clip", "cross_entropy", "middle"}
HOOKS = {
    name
    for name, value in vars(Method).items()
    if inspect.isfunction(value) and not name.startswith("_") and name not in HELPERS
}
CLOSE = 0.8  # of two names, as difflib has it: "los" and "loss" are, "upload_norm" and "upload" not


# The class ----------------------------------------------------------------------------------------


def check_class(cls: type[Method]) -> None:
    """Options that are none, for want of a decorator, and hooks that nobody would ever call."""
    bases = [base for base in cls.__mro__ if issubclass(base, Method) and base is not Method]
    for base in bases:
        options = own_options(base)
        # is_dataclass would be true of every class here: it is inherited.
        if options and "__dataclass_params__" not in vars(base):
            raise FedscError(
                f"class {base.__name__} has options ({', '.join(options)}) but is not a dataclass: "
                "write @dataclass(frozen=True) above it"
            )
    names = dict.fromkeys(name for base in bases for name in vars(base))
    overridden = HOOKS & names.keys()
    for name in names:
        if name.startswith("_") or hasattr(Method, name) or not callable(getattr(cls, name)):
            continue
        # Beside `teachers`, a function `teacher` is no mistake.
        near = difflib.get_close_matches(name, sorted(HOOKS - overridden), n=1, cutoff=CLOSE)
        if near:
            raise FedscError(
                f"class {cls.__name__} has a function '{name}', which is no hook: did you mean "
                f"'{near[0]}'? A function for your own use may be called '_{name}'"
            )


def own_options(cls: type) -> list[str]:
    """The fields that a class itself writes down, whether or not they have become any."""
    hints = inspect.get_annotations(cls)
    return [name for name, hint in hints.items() if not is_class_variable(hint)]


def is_class_variable(hint: Any) -> bool:
    if isinstance(hint, str):  # with `from __future__ import annotations`
        return hint.startswith(("ClassVar", "typing.ClassVar"))
    return hint is ClassVar or get_origin(hint) is ClassVar


# The hooks ----------------------------------------------------------------------------------------


def given_state(method: Method, hook: str, given: Any) -> State:
    """What a hook gives, if it is a dict of tensors."""
    if not isinstance(given, dict):
        raise wrong(method, hook, described(given), "a dict of tensors")
    for name, value in given.items():
        if not isinstance(name, str):
            raise wrong(method, hook, f"the name {name!r}", "names that are text")
        if "/" in name:  # a checkpoint joins the names of dicts within dicts by it
            hint = "write another character, or a dict within the dict"
            raise wrong(method, hook, f"the name {name!r}", "names without '/'", hint)
        if isinstance(value, dict):
            given_state(method, hook, value)
        elif not isinstance(value, Tensor):
            what = f"'{name}' as {described(value)}"
            raise wrong(method, hook, what, "tensors, and dicts of them", number_as_tensor(value))
    return given


def given_weights(method: Method, hook: str, given: Any, model: State) -> State:
    """What a hook gives, if it has the weights that the model has."""
    if given is model:
        return model
    problem = lacking(layout(given_state(method, hook, given)), layout(model))
    if problem:
        raise wrong(method, hook, f"other weights than the model has: {problem}", "all of them")
    return given


def given_teachers(method: Method, given: Any, model: State) -> Mapping[str, State]:
    if not isinstance(given, Mapping):
        raise wrong(method, "teachers", described(given), "a dict of weights by teacher")
    for name, weights in given.items():
        given_weights(method, f"teachers, for '{name}',", weights, model)
    return given


def given_loss(method: Method, given: Any) -> dict[str, Tensor]:
    """What `loss` gives, if it is terms that can be summed and minimised."""
    due = "a dict of scalar tensors, the terms by name"
    if not isinstance(given, dict):
        hint = 'return {"ce": ...}' if isinstance(given, Tensor) else ""
        raise wrong(method, "loss", described(given), due, hint)
    if not given:
        raise wrong(method, "loss", "no terms", due)
    for name, term in given.items():
        if not isinstance(term, Tensor):
            hint = number_as_tensor(term)
            raise wrong(method, "loss", f"'{name}' as {described(term)}", due, hint)
        if term.ndim:
            hint = "take its mean()"
            raise wrong(method, "loss", f"'{name}' as {described(term)}", due, hint)
    if not any(term.requires_grad for term in given.values()):
        raise FedscError(
            f"{method.name}: loss gives terms without a gradient ({', '.join(map(str, given))}): "
            "make them of batch.student or batch.params, without detach(), item() or no_grad()"
        )
    return given


def given_aggregate(method: Method, given: Any, initial: Layout) -> State:
    """The server's new state, if a run can go on with it, now and when it is resumed.

    It may gain tensors. What it had when the run began must be there, as it was: a checkpoint is
    compared with that.
    """
    given_state(method, "aggregate", given)
    if "model" not in given:
        found = "a dict without 'model'" if given else "an empty dict"
        hint = 'return {**server, "model": self.average(uploads, server["model"])}'
        raise wrong(method, "aggregate", found, 'the new model under "model"', hint)
    problem = lacking(layout(given), initial)
    if problem:
        raise FedscError(
            f"{method.name}: aggregate gives another state than the run began with: {problem}; "
            "keep every tensor of it ({**server, ...}), in its shape and type"
        )
    return given


def given_numbers(method: Method, hook: str, given: Any) -> dict[str, float]:
    """What a hook gives, if it is numbers that a record can hold."""
    if not isinstance(given, dict):
        raise wrong(method, hook, described(given), "a dict of numbers")
    for name, value in given.items():
        if not isinstance(value, int | float):
            hint = "write float(...)" if isinstance(value, Tensor) else ""
            raise wrong(method, hook, f"'{name}' as {described(value)}", "numbers", hint)
    return given


def given_moments(method: Method, given: Any) -> tuple[Moment, ...]:
    allowed = get_args(Moment)
    if not isinstance(given, tuple | list) or not set(given) <= set(allowed):
        hint = f'a tuple of one is ("{given}",)' if given in allowed else ""
        raise wrong(method, "moments", repr(given), f"a tuple of {', '.join(allowed)}", hint)
    return tuple(given)


def given_network(method: Method, given: Any) -> nn.Module:
    if not isinstance(given, nn.Module):
        raise wrong(method, "adapt_model", described(given), "a torch.nn.Module")
    return given


def wrong(method: Method, hook: str, given: str, allowed: str, hint: str = "") -> FedscError:
    """`feddecay: upload gives 'norm' as a float, 3.2 (allowed: tensors): wrap ...`"""
    text = f"{method.name}: {hook} gives {given} (allowed: {allowed})"
    return FedscError(f"{text}: {hint}" if hint else text)


def described(value: Any) -> str:
    if value is None:
        return "None, as a function without return does"
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    kind = type(value).__name__
    article = "an" if kind[0] in "aeiou" else "a"
    number = f", {value:g}" if isinstance(value, int | float) else ""
    return f"{article} {kind}{number}"


def number_as_tensor(value: Any) -> str:
    return "wrap it in torch.tensor(...)" if isinstance(value, int | float) else ""
