"""The contract's own parts: averaging weights, checking and reading options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsc import FedscError, Method, RunSpec, Upload, option
from fedsc.method import weighted_average
from fedsc.methods import METHODS, FedAvg, FedSC, method_from_text, method_to_text
from fedsc.options import options_of, parse
from tests.golden import full


def upload(client: int, samples: int, weight: list[float], counter: int = 0) -> Upload:
    model = {"weight": torch.tensor(weight), "counter": torch.tensor(counter)}
    return Upload(client, samples, model)


def test_average_by_samples_by_hand() -> None:
    uploads = [upload(0, 1, [1.0, 10.0]), upload(1, 3, [5.0, -2.0])]
    assert FedAvg().average(uploads)["weight"].tolist() == [4.0, 1.0]


def test_uniform_average_by_hand() -> None:
    uploads = [upload(0, 1, [1.0, 10.0]), upload(1, 3, [5.0, -2.0])]
    assert FedAvg(aggregation="uniform").average(uploads)["weight"].tolist() == [3.0, 4.0]
    assert weighted_average(uploads, [0.0, 2.0])["weight"].tolist() == [5.0, -2.0]


def test_one_upload_comes_back_as_it_is() -> None:
    assert FedAvg().average([upload(4, 7, [0.1, 0.2])])["weight"].tolist() == pytest.approx(
        [0.1, 0.2]
    )


def test_integer_tensors_take_the_maximum() -> None:
    uploads = [upload(0, 100, [0.0], 3), upload(1, 1, [0.0], 8), upload(2, 5, [0.0], 4)]
    counter = FedAvg().average(uploads)["counter"]
    assert counter.dtype == torch.int64
    assert int(counter) == 8


def test_averaging_leaves_the_uploads_alone() -> None:
    uploads = [upload(0, 1, [1.0]), upload(1, 1, [3.0])]
    FedAvg().average(uploads)["weight"].add_(100)
    assert uploads[0].model["weight"].tolist() == [1.0]
    assert uploads[1].model["weight"].tolist() == [3.0]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.floats(-1e3, 1e3, width=32)), min_size=2),
    st.randoms(use_true_random=False),
)
def test_who_answers_first_does_not_matter(given_uploads: list[Any], random: Any) -> None:
    uploads = [upload(k, samples, [x]) for k, (samples, x) in enumerate(given_uploads)]
    mean = FedAvg().average(uploads)["weight"]
    shuffled = FedAvg().average(random.sample(uploads, len(uploads)))["weight"]
    assert torch.equal(mean, shuffled)
    total = sum(samples for samples, _ in given_uploads)
    expected = sum(samples / total * x for samples, x in given_uploads)
    assert float(mean[0]) == pytest.approx(expected, rel=1e-4, abs=1e-2)


# Options ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample(Method):
    name: ClassVar[str] = "sample"

    share: float = option(0.5, "a share", above=0, at_most=1)
    steps: int = option(3, "a number", at_least=2)
    limit: int | None = option(None, "a number or none", at_least=0)
    kind: Literal["red", "green"] = option("red", "a colour")
    loud: bool = option(False, "a switch")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"share": 0.0}, ["share = 0", "above 0", "at most 1"]),
        ({"share": 1.5}, ["share = 1.5", "at most 1"]),
        ({"share": float("nan")}, ["share = nan"]),
        ({"share": "half"}, ["share = 'half'", "a number"]),
        ({"share": True}, ["share = True", "a number"]),
        ({"steps": 1}, ["steps = 1", "at least 2"]),
        ({"steps": 2.5}, ["steps = 2.5", "whole number"]),
        ({"steps": True}, ["steps = True", "whole number"]),
        ({"steps": None}, ["steps = None", "whole number"]),
        ({"limit": -1}, ["limit = -1", "at least 0"]),
        ({"kind": "gren"}, ["'gren'", "did you mean 'green'", "red, green"]),
        ({"loud": 1}, ["loud = 1", "true or false"]),
        ({"aggregation": "mode"}, ["'mode'", "samples, uniform"]),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(
    given: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(FedscError) as raised:
        Sample(**given)
    for word in words:
        assert word in str(raised.value)


def test_values_at_the_limits_are_allowed() -> None:
    assert Sample(share=1.0, steps=2, limit=0, kind="green", loud=True).limit == 0
    assert Sample(limit=None).limit is None


def test_a_whole_number_serves_as_a_number() -> None:
    assert Sample(share=1) == Sample(share=1.0)
    assert type(Sample(share=1).share) is float


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("share", "0.25", 0.25),
        ("share", "1e-3", 0.001),
        ("steps", "12", 12),
        ("limit", "none", None),
        ("limit", "4", 4),
        ("kind", "green", "green"),
        ("loud", "true", True),
        ("loud", "Yes", True),
        ("loud", "0", False),
        ("loud", "no", False),
    ],
)
def test_values_written_as_text(name: str, text: str, value: Any) -> None:
    found = parse(Sample, name, text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("share", "much", ["share = 'much'", "a number"]),
        ("steps", "2.5", ["steps = '2.5'", "whole number"]),
        ("loud", "maybe", ["loud = 'maybe'", "true or false"]),
        ("stepps", "2", ["'stepps'", "did you mean 'steps'", "share"]),
    ],
)
def test_text_that_is_no_value(name: str, text: str, words: list[str]) -> None:
    with pytest.raises(FedscError) as raised:
        parse(Sample, name, text)
    for word in words:
        assert word in str(raised.value)


def test_options_of_a_class() -> None:
    found = {opt.name: opt for opt in options_of(Sample)}
    assert list(found) == [
        "aggregation",
        "trim",
        "logit_adjustment",
        "share",
        "steps",
        "limit",
        "kind",
        "loud",
    ]
    assert found["limit"].optional
    assert found["limit"].kind is int
    assert found["kind"].choices == ("red", "green")
    assert found["loud"].kind is bool
    assert found["share"].help == "a share"


def test_every_option_says_what_it_is() -> None:
    classes: list[type] = [RunSpec, *METHODS.values()]
    for cls in classes:
        for opt in options_of(cls):
            assert opt.help, f"{cls.__name__}.{opt.name}"


# Methods as text ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("fedavg", FedAvg()),
        ("fedsc", FedSC()),
        ("fedsc,tau=0.1", FedSC(tau=0.1)),
        ("fedsc, tau = 0.1 , neighbours=3", FedSC(tau=0.1, neighbours=3)),
        ("fedsc,full", full()),
        ("fedsc,full,tau=0.1", full(tau=0.1)),
        ("fedsc,literal", full(u_mode="round", cpdr="l1_sum", proto_source="eval")),
        ("fedsc,literal,cpdr=l2", full(u_mode="round", cpdr="l2", proto_source="eval")),
        ("fedsc,max_age=none,relational=no", FedSC(relational=False)),
        ("fedavg,aggregation=uniform", FedAvg(aggregation="uniform")),
    ],
)
def test_methods_as_text(text: str, method: Method) -> None:
    assert method_from_text(text) == method
    assert method_from_text(method_to_text(method)) == method


@pytest.mark.parametrize(
    ("text", "shortest"),
    [
        ("fedsc,rpcl_weight=1,schedule=constant,positives=inside", "fedsc,full"),
        ("fedsc,full,tau=0.1", "fedsc,full,tau=0.1"),
        ("fedsc,full,schedule=falling,positives=outside,rpcl_weight=0.1", "fedsc"),
        ("fedsc,literal,rpcl_weight=0.5", "fedsc,literal,rpcl_weight=0.5"),
        ("fedproto,private", "fedproto,proto_source=eval"),  # as many words either way
        ("moon,mu=5", "moon"),
    ],
)
def test_a_method_is_written_in_the_fewest_words(text: str, shortest: str) -> None:
    assert method_to_text(method_from_text(text)) == shortest


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fedsk", ["unknown method 'fedsk'", "did you mean 'fedsc'", "fedavg"]),
        ("fedsc,literall", ["preset", "'literall'", "literal"]),
        ("fedsc,tua=0.1", ["'tua'", "did you mean 'tau'"]),
        ("fedsc,tau=0", ["tau = 0", "above 0"]),
        ("fedsc,tau=nan", ["tau = nan"]),
        ("fedsc,tau=x", ["tau = 'x'"]),
        ("fedsc,metric=angel", ["'angel'", "did you mean 'angle'"]),
        ("fedavg,fast", ["'fast'", "no presets"]),
        ("", ["unknown method ''"]),
    ],
)
def test_methods_that_do_not_exist(text: str, words: list[str]) -> None:
    with pytest.raises(FedscError) as raised:
        method_from_text(text)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("option_name", ["tau", "rpcl_weight", "cpdr_weight"])
def test_no_option_may_be_infinite(option_name: str) -> None:
    """No run has an infinite weight, and no JSON file could record it."""
    with pytest.raises(FedscError, match=f"{option_name} = inf"):
        method_from_text(f"fedsc,{option_name}=inf")
