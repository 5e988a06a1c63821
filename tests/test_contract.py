"""A mistake in a method of one's own is one line that names the hook, in every engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fedsc
from fedsc import METHODS, FedAvg, FedscError, Method, State
from fedsc.contract import check_class
from fedsc.methods import method_class

QUICK: dict[str, Any] = {
    "rounds": 2,
    "epochs": 1,
    "train_limit": 60,
    "clients": 2,
    "partition": "iid",
    "threads": 2,
    "device": "cpu",
}
ENGINES = ("sequential", "workers", "graphs")


def own_method(**hooks: Any) -> Method:
    """FedAvg with some hooks replaced."""
    cls: type[Method] = type("FedMine", (FedAvg,), {"name": "fedmine", **hooks})
    return cls()


def message_of(method: Method, **options: Any) -> str:
    with pytest.raises(FedscError) as raised:
        fedsc.run("digits", method, **{**QUICK, **options})
    assert "\n" not in str(raised.value)
    return str(raised.value)


def losses(batch: fedsc.Batch) -> Tensor:
    return F.cross_entropy(batch.student.logits, batch.labels, reduction="none")


def parameters(batch: fedsc.Batch) -> Tensor:
    return torch.stack([param.detach().sum() for param in batch.params.values()]).sum()


# The hooks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("hook", "function", "words"),
    [
        ("upload", lambda self, result: 3.5, "upload gives a float, 3.5 (allowed: a dict"),
        (
            "upload",
            lambda self, result: {"norm": 3.5},
            "upload gives 'norm' as a float, 3.5 (allowed: tensors, and dicts of them): wrap "
            "it in torch.tensor(...)",
        ),
        ("upload", lambda self, result: {"by": {"k": [1]}}, "upload gives 'k' as a list"),
        ("upload", lambda self, result: {1: torch.ones(1)}, "upload gives the name 1"),
        (
            "upload",
            lambda self, result: {"by": {"k/l": torch.ones(1)}},
            "upload gives the name 'k/l' (allowed: names without '/'): write another character",
        ),
        ("upload", lambda self, result: None, "upload gives None, as a function without return"),
        ("remember", lambda self, result: None, "remember gives None"),
        ("measure", lambda self, result: {"length": 2}, "measure gives 'length' as an int, 2"),
        ("init_client", lambda self, task: {"seen": 0}, "init_client gives 'seen' as an int, 0"),
        ("local_model", lambda self, model, memory: {}, "local_model gives other weights"),
        ("teachers", lambda self, model, memory: {"old": {}}, "teachers, for 'old', gives other"),
        ("loss", lambda self, batch: losses(batch).mean(), "loss gives a tensor of shape ()"),
        ("loss", lambda self, batch: {}, "loss gives no terms"),
        ("loss", lambda self, batch: {"ce": losses(batch)}, "loss gives 'ce' as a tensor of shape"),
        (
            "loss",
            lambda self, batch: {"ce": losses(batch).mean(), "pull": 0.0},
            "loss gives 'pull' as a float, 0 (allowed: a dict of scalar tensors",
        ),
        (
            "loss",
            lambda self, batch: {"pull": parameters(batch)},
            "loss gives terms without a gradient (pull)",
        ),
    ],
)
def test_what_a_clients_hook_must_give(
    hook: str, function: Callable[..., Any], words: str, engine: str
) -> None:
    assert message_of(own_method(**{hook: function}), engine=engine).startswith(f"fedmine: {words}")


@pytest.mark.parametrize(
    ("hook", "function", "words"),
    [
        ("adapt_model", lambda self, model, task: None, "adapt_model gives None"),
        ("init_server", lambda self, task: {"s": 1.0}, "init_server gives 's' as a float, 1"),
        ("broadcast", lambda self, server: {"round": 1}, "broadcast gives 'round' as an int, 1"),
        ("broadcast", lambda self, server: torch.ones(2), "broadcast gives a tensor of shape (2,)"),
        ("aggregate", lambda self, server, uploads, records: None, "aggregate gives None"),
        (
            "aggregate",
            lambda self, server, uploads, records: {},
            'aggregate gives an empty dict (allowed: the new model under "model")',
        ),
        (
            "aggregate",
            lambda self, server, uploads, records: uploads[0].model,
            "aggregate gives a dict without 'model' (allowed: the new model under",
        ),
        (
            "diagnostics",
            lambda self, server, uploads: {"norm": torch.ones(())},
            "diagnostics gives 'norm' as a tensor of shape () (allowed: numbers): write float(...)",
        ),
        (
            "moments",
            lambda self, round: "end",
            "moments gives 'end' (allowed: a tuple of start",
        ),
    ],
)
def test_what_a_servers_hook_must_give(hook: str, function: Callable[..., Any], words: str) -> None:
    text = message_of(own_method(**{hook: function}), engine="sequential")
    assert text.startswith(f"fedmine: {words}")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("hook", ["start_observing", "observe"])
def test_totals_that_are_not_returned(hook: str, engine: str) -> None:
    hooks = {"moments": lambda self, round: ("end",), hook: lambda self, *arguments: None}
    text = message_of(own_method(**hooks), engine=engine)
    assert text.startswith(f"fedmine: {hook} gives None")


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda self, batch: {"ce": losses(batch)}, "'ce' as a tensor of shape (1,)"),
        (lambda self, batch: {"pull": parameters(batch)}, "terms without a gradient (pull)"),
    ],
)
def test_a_loss_under_differential_privacy(loss: Callable[..., Any], words: str) -> None:
    """There each record has its own gradient, by other means."""
    method = own_method(loss=loss, private_units=("record",))
    text = message_of(method, dp_unit="record", dp_clip=1.0, dp_noise=1.0)
    assert text.startswith(f"fedmine: loss gives {words}")


# The server's state -------------------------------------------------------------------------------


def grown(self: Method, server: State, uploads: list[fedsc.Upload], records: Any) -> State:
    longer = torch.cat([server["s"], torch.ones(1)])
    return {**server, "s": longer, "model": self.average(uploads)}


def other_type(self: Method, server: State, uploads: list[fedsc.Upload], records: Any) -> State:
    return {**server, "s": server["s"].double(), "model": self.average(uploads)}


def forgetful(self: Method, server: State, uploads: list[fedsc.Upload], records: Any) -> State:
    return {"model": self.average(uploads)}


def half_a_model(self: Method, server: State, uploads: list[fedsc.Upload], records: Any) -> State:
    model = self.average(uploads)
    return {**server, "model": {name: model[name] for name in list(model)[:2]}}


@pytest.mark.parametrize(
    ("aggregate", "words"),
    [
        (grown, "s is torch.float32 of shape (4,), expected torch.float32 of shape (3,)"),
        (other_type, "s is torch.float64 of shape (3,), expected torch.float32"),
        (forgetful, "s is missing"),
        (half_a_model, "model/"),
    ],
)
def test_a_state_that_could_not_be_resumed(aggregate: Callable[..., Any], words: str) -> None:
    method = own_method(init_server=lambda self, task: {"s": torch.zeros(3)}, aggregate=aggregate)
    text = message_of(method, engine="sequential")
    assert f"aggregate gives another state than the run began with: {words}" in text


def test_a_state_that_changes_in_a_later_round() -> None:
    def late(self: Method, server: State, uploads: list[fedsc.Upload], records: Any) -> State:
        new = {"rounds": server["rounds"] + 1, "model": self.average(uploads)}
        return {**server, **new, "s": torch.zeros(3 if server["rounds"] < 1 else 4)}

    def fresh(self: Method, task: fedsc.Task) -> State:
        return {"s": torch.zeros(3), "rounds": torch.zeros(())}

    method = own_method(init_server=fresh, aggregate=late)
    fedsc.run("digits", method, **{**QUICK, "rounds": 1})
    assert "s is torch.float32 of shape (4,)" in message_of(method)


def test_a_state_may_gain_what_it_did_not_begin_with() -> None:
    """And that may be of any shape: a checkpoint need not have it."""

    def gains(self: Method, server: State, uploads: list[fedsc.Upload], records: Any) -> State:
        history = torch.cat([server.get("history", torch.zeros(0)), torch.ones(1)])
        return {**server, "history": history, "model": self.average(uploads)}

    run = fedsc.run("digits", own_method(aggregate=gains), **QUICK)
    assert run.server["history"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("engine", ["workers", "graphs"])
def test_a_message_that_changes_its_shape(engine: str) -> None:
    def broadcast(self: Method, server: State) -> State:
        return {"m": torch.zeros(2 if "told" in server else 1)}

    def tells(self: Method, server: State, uploads: list[fedsc.Upload], records: Any) -> State:
        return {**server, "told": torch.ones(()), "model": self.average(uploads)}

    text = message_of(own_method(broadcast=broadcast, aggregate=tells), engine=engine)
    assert "than in the first round: m is torch.float32 of shape (2,)" in text


# The class ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_our_own_methods_are_as_they_should_be(name: str) -> None:
    check_class(METHODS[name])


class Undecorated(FedAvg):
    name = "undecorated"

    strength: float = fedsc.option(0.1, "weight of the pull")


@dataclass(frozen=True)
class Above(Undecorated):
    """Decorated itself, but its parent's option is none all the same."""


@pytest.mark.parametrize("cls", [Undecorated, Above])
def test_a_forgotten_decorator(cls: type[Method]) -> None:
    with pytest.raises(FedscError, match=r"Undecorated has options \(strength\) but is not a data"):
        check_class(cls)
    with pytest.raises(FedscError, match=r"write @dataclass\(frozen=True\) above it"):
        fedsc.run("digits", cls(), **QUICK)


def test_a_forgotten_decorator_in_a_file(tmp_path: Path) -> None:
    """With the annotations as values, which `from __future__ import annotations` makes text."""
    file = tmp_path / "mine.py"
    lines = [
        "from typing import ClassVar",
        "import fedsc",
        "class Mine(fedsc.Method):",
        "    name: ClassVar[str] = 'mine'",
        "    private_units: ClassVar = ('record',)",
    ]
    file.write_text("\n".join(lines))
    assert method_class(f"{file}:Mine").name == "mine"  # without options it needs none
    file = tmp_path / "other.py"
    file.write_text("\n".join([*lines, "    pull: float = 0.1"]))
    with pytest.raises(FedscError, match=r"class Mine has options \(pull\)"):
        method_class(f"{file}:Mine")


def test_an_undecorated_child_without_options_is_complete() -> None:
    class Child(fedsc.FedProx):
        name: ClassVar[str] = "child"

    check_class(Child)
    assert Child(mu=0.5) == Child(mu=0.5)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("los", "loss"),
        ("agregate", "aggregate"),
        ("uploads", "upload"),
        ("init_servr", "init_serv"),
    ],
)
def test_a_misspelt_hook(written: str, meant: str) -> None:
    method = own_method(**{written: lambda self, *arguments: {}})
    text = message_of(method)
    assert text.startswith(f"class FedMine has a function '{written}', which is no hook: did you")
    assert f"mean '{meant}" in text
    assert f"'_{written}'" in text


def test_functions_of_ones_own_are_no_misspelt_hooks() -> None:
    def helper(self: Method) -> None: ...

    names = ("_los", "upload_norm", "pairwise", "distance", "averaged", "logits", "score", "step")
    check_class(type(own_method(**dict.fromkeys(names, helper))))
    both = own_method(teacher=helper, teachers=lambda self, model, memory: {})
    check_class(type(both))
