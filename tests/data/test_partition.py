"""Who gets which images: every setting deals all of them out once, as the paper describes."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedsc.data.partition import class_count_table, fingerprint, partition
from fedsc.errors import FedscError
from tests.golden import GOLDEN

Labels = NDArray[np.int64]

CIFAR10_LIKE = np.repeat(np.arange(10), 5000)
SETTINGS = [
    "iid",
    "nid1:0.2",
    "nid1:0.2:plain",
    "nid1:0.2:equal",
    "nid1:0.2:client",
    "nid2",
    "nid2:half",
    "nid2:extra",
    "shards:2",
]


def some_labels(per_class: int = 30, classes: int = 10) -> Labels:
    """In no order, as data come."""
    return np.random.default_rng(1).permutation(np.repeat(np.arange(classes), per_class))


def clients_for(text: str) -> int:
    return 6 if text.startswith("nid2") else 10


@pytest.mark.parametrize("text", SETTINGS)
def test_no_image_is_dealt_twice_and_none_is_forgotten(text: str) -> None:
    labels = some_labels()
    parts = partition(text, labels, clients_for(text), seed=0)
    assert len(parts) == clients_for(text)
    assert all(len(part) > 0 for part in parts)
    dealt = np.concatenate(parts)
    assert sorted(dealt.tolist()) == list(range(len(labels)))
    assert all((np.diff(part) > 0).all() for part in parts)  # sorted


def test_nid2_leaves_over_what_six_does_not_divide() -> None:
    labels = some_labels(per_class=32)  # 5 per shard, 2 left over in each class
    dealt = np.concatenate(partition("nid2", labels, 6, seed=0))
    assert len(np.unique(dealt)) == len(dealt)
    left = np.setdiff1d(np.arange(len(labels)), dealt)
    assert np.bincount(labels[left]).tolist() == [2] * 10


@pytest.mark.parametrize("text", SETTINGS)
def test_the_seed_alone_decides(text: str) -> None:
    labels = some_labels()
    clients = clients_for(text)
    one, same, other = (fingerprint(partition(text, labels, clients, seed)) for seed in (3, 3, 4))
    assert one == same
    assert one != other


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from(["iid", "nid1:0.5", "nid1:2:plain", "nid1:1:equal", "shards:1", "shards:3"]),
    st.lists(st.integers(0, 5), min_size=30, max_size=90),
    st.integers(1, 7),
    st.integers(0, 2**31),
)
def test_any_labels_are_dealt_out_once(
    text: str, values: list[int], clients: int, seed: int
) -> None:
    labels = np.array(values, dtype=np.int64)
    parts = partition(text, labels, clients, seed)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    assert min(len(part) for part in parts) >= 1


@pytest.mark.parametrize("text", ["nid1:0.05", "nid1:0.2", "nid1:0.2:plain"])
def test_nid1_gives_every_client_ten_images(text: str) -> None:
    labels = np.repeat(np.arange(10), 200)
    for seed in range(20):
        assert min(len(part) for part in partition(text, labels, 10, seed)) >= 10


def test_nid1_of_very_little_data_gives_every_client_one() -> None:
    for seed in range(20):
        parts = partition("nid1:0.5", some_labels(per_class=3, classes=4), 8, seed)
        assert min(len(part) for part in parts) >= 1


@pytest.mark.parametrize(
    ("text", "smallest", "largest", "classes_held", "imbalance"),
    [
        ("nid1:0.05", 620, 8860, 4.1, 0.52),
        ("nid1:0.2", 2270, 7400, 7.3, 0.37),
        ("nid1:0.5", 2980, 6790, 8.7, 0.28),
    ],
)
def test_nid1_is_as_skewed_as_published(
    text: str, smallest: float, largest: float, classes_held: float, imbalance: float
) -> None:
    """Means over ten draws; three standard errors are about 0.4 classes, 0.03 and 750 images."""
    sizes, held, d = [], [], []
    for seed in range(10):
        parts = partition(text, CIFAR10_LIKE, 10, seed)
        counts = np.array([np.bincount(CIFAR10_LIKE[part], minlength=10) for part in parts])
        sizes.append((counts.sum(1).min(), counts.sum(1).max()))
        held.append((counts > 0).sum(1).mean())
        share = counts / counts.sum(1, keepdims=True)
        d.append(np.sqrt(0.5 * ((share - 0.1) ** 2).sum(1)).mean())
    assert np.mean(held) == pytest.approx(classes_held, abs=0.4)
    assert np.mean(d) == pytest.approx(imbalance, abs=0.03)
    assert np.mean([low for low, _ in sizes]) == pytest.approx(smallest, abs=750)
    assert np.mean([high for _, high in sizes]) == pytest.approx(largest, abs=750)


def test_a_full_client_gets_no_more_of_later_classes() -> None:
    """A client passes N / K only with the class that takes it there."""
    for seed in range(5):
        for part in partition("nid1:0.1", CIFAR10_LIKE, 10, seed):
            counts = np.bincount(CIFAR10_LIKE[part], minlength=10)
            last = int(np.flatnonzero(counts)[-1])
            assert counts[:last].sum() < 5000


def test_plain_nid1_does_let_clients_grow() -> None:
    largest = max(
        len(p) for s in range(5) for p in partition("nid1:0.1:plain", CIFAR10_LIKE, 10, s)
    )
    capped = max(len(p) for s in range(5) for p in partition("nid1:0.1", CIFAR10_LIKE, 10, s))
    assert largest > 1.2 * capped


@pytest.mark.parametrize("text", ["nid1:0.3:equal", "nid1:0.3:client", "iid"])
def test_equal_sizes(text: str) -> None:
    sizes = [len(part) for part in partition(text, some_labels(), 10, seed=2)]
    assert sizes == [30] * 10
    uneven = [len(part) for part in partition(text, some_labels(), 7, seed=2)]
    assert max(uneven) - min(uneven) <= 1
    assert min(uneven) == 300 // 7


@pytest.mark.parametrize("name", GOLDEN["settings"]["nid2"])
def test_nid2_counts(name: str) -> None:
    expected = GOLDEN["settings"]["nid2"][name]
    classes = 5 * expected["biased_classes"]
    per_class = 6 * expected["shard"] + expected["unused_per_class"]
    labels = np.repeat(np.arange(classes), per_class)
    assert len(labels) == {"cifar10": 50_000, "cifar100": 50_000}.get(name, per_class * classes)
    counts = class_count_table(labels, partition("nid2", labels, 6, seed=0), classes)
    for k in range(5):
        own = range(k * expected["biased_classes"], (k + 1) * expected["biased_classes"])
        assert np.flatnonzero(counts[k]).tolist() == list(own)
        assert (counts[k][list(own)] == expected["biased_per_class"]).all()
        assert counts[k].sum() == expected["biased_total"]
    assert (counts[5] == expected["unbiased_per_class"]).all()
    assert counts[5].sum() == expected["unbiased_total"]


def test_forms_of_nid2() -> None:
    labels = np.repeat(np.arange(10), 60)
    half = class_count_table(labels, partition("nid2:half", labels, 6, seed=0), 10)
    assert half[5].tolist() == [30] * 10
    assert half[2].tolist() == [0, 0, 0, 0, 30, 30, 0, 0, 0, 0]
    extra = class_count_table(labels, partition("nid2:extra", labels, 6, seed=0), 10)
    assert extra[5].sum() == 100
    assert [row.nonzero()[0].tolist() for row in extra[:5]] == [
        [2 * k, 2 * k + 1] for k in range(5)
    ]
    assert extra.sum(0).tolist() == [60] * 10


def test_two_shards_hold_few_classes() -> None:
    """200 shards over 10 classes: a shard is of one class, so a client has at most two."""
    labels = np.repeat(np.arange(10), 600)
    counts = class_count_table(labels, partition("shards:2", labels, 100, seed=0), 10)
    assert counts.sum(1).tolist() == [60] * 100
    assert ((counts > 0).sum(1) <= 2).all()


def test_class_counts_by_hand() -> None:
    labels = np.array([0, 2, 2, 1, 0])
    parts = [np.array([0, 1, 2]), np.array([3, 4])]
    assert class_count_table(labels, parts, 4).tolist() == [[1, 0, 2, 0], [1, 1, 0, 0]]


def test_the_fingerprint_tells_where_a_client_ends() -> None:
    whole = np.arange(4)
    assert fingerprint([whole[:2], whole[2:]]) != fingerprint([whole[:1], whole[1:]])


@pytest.mark.parametrize(
    ("text", "clients", "words"),
    [
        ("nid1:0", 10, ["alpha = 0", "above 0"]),
        ("nid1:-0.5", 10, ["alpha = -0.5", "above 0"]),
        ("nid1:nan", 10, ["alpha = nan"]),
        ("nid1:inf", 10, ["alpha = inf"]),
        ("nid1:much", 10, ["'much'", "number"]),
        ("nid1", 10, ["'nid1'", "nid1:ALPHA"]),
        ("nid1:0.2:fair", 10, ["'fair'", "plain, equal, client"]),
        ("nid3", 10, ["'nid3'", "nid2"]),
        ("", 10, ["unknown partition ''"]),
        ("iid:3", 10, ["'iid:3'"]),
        ("iid", 301, ["301 clients", "300"]),
        ("nid1:0.2", 301, ["301 clients", "300"]),
        ("nid2", 10, ["6", "10"]),
        ("nid2:third", 6, ["'third'", "half, extra"]),
        ("shards:0", 10, ["0 shards", "1 to 30"]),
        ("shards:31", 10, ["31 shards", "1 to 30"]),
        ("shards:-2", 10, ["-2 shards"]),
        ("shards:few", 10, ["'few'", "number"]),
        ("shards:nan", 10, ["nan"]),
        ("shards:inf", 10, ["inf"]),
        ("shards:1.5", 10, ["1.5"]),
    ],
)
def test_a_wrong_setting_is_named(text: str, clients: int, words: list[str]) -> None:
    with pytest.raises(FedscError) as raised:
        partition(text, some_labels(), clients, seed=0)
    for word in words:
        assert word in str(raised.value)
    assert "\n" not in str(raised.value)


def test_nid2_needs_five_classes_and_six_images_of_each() -> None:
    with pytest.raises(FedscError, match="at least 5 classes"):
        partition("nid2", some_labels(classes=4), 6, seed=0)
    with pytest.raises(FedscError, match="class 0 has 5 images, nid2 needs at least 6"):
        partition("nid2", some_labels(per_class=5), 6, seed=0)


def test_a_hopeless_nid1_gives_up_in_time() -> None:
    """Ten images of one class, all for one of five clients."""
    started = time.perf_counter()
    with pytest.raises(FedscError, match=r"alpha = 1e-06.*5 clients"):
        partition("nid1:0.000001:plain", np.zeros(10, np.int64), 5, seed=0)
    assert time.perf_counter() - started < 10


@pytest.mark.parametrize("alpha", ["1e-300", "1e-5", "1e5", "1e300"])
def test_extreme_but_legal_alphas(alpha: str) -> None:
    labels = np.repeat(np.arange(10), 100)
    parts = partition(f"nid1:{alpha}", labels, 5, seed=0)
    assert sorted(np.concatenate(parts).tolist()) == list(range(1000))
    held = (class_count_table(labels, parts, 10) > 0).sum(1)
    if float(alpha) < 1:  # a class goes to one client, and a single image perhaps to another
        assert held.sum() <= 20
    else:
        assert held.tolist() == [10] * 5
        assert [len(part) for part in parts] == pytest.approx([200] * 5, abs=12)
