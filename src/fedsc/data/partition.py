"""Who gets which images: the paper's settings for label shift, and two common ones.

Every function takes the labels (N,) and returns one array of indices per client. Written short on
the command line:

    iid                 equal random parts
    nid1:0.2            Dirichlet over clients for each class, with concentration alpha = 0.2
    nid1:0.2:plain      the same without keeping clients below N / K
    nid1:0.2:equal      the same, then cut again into equal parts (the released code of FedSC)
    nid1:0.2:client     Dirichlet over classes for each client, equal sizes of floor(N / K)
    nid2                5 clients with a fifth of the classes each, and 1 with all of them
    nid2:half           each class halved between its two clients
    nid2:extra          the sixth client gets N / 6 at random, the five share the rest
    shards:2            sorted by class, cut into 2 shards per client
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from ..errors import FedscError
from .randomness import generator

Indices = NDArray[np.int64]

MIN_SAMPLES = 10  # NID1 is drawn again until every client has as many
MAX_DRAWS = 2000
NID2_CLIENTS = 6
FORMS = "iid, nid1:ALPHA, nid1:ALPHA:plain|equal|client, nid2, nid2:half|extra, shards:N"


def partition(text: str, labels: Indices, num_clients: int, seed: int) -> list[Indices]:
    """The clients' indices under a setting written as above, sorted within each client."""
    kind, *words = text.split(":")
    number_of_words = {"iid": (0,), "nid1": (1, 2), "nid2": (0, 1), "shards": (1,)}
    if kind not in number_of_words or len(words) not in number_of_words[kind]:
        raise FedscError(f"unknown partition '{text}' (allowed: {FORMS})")
    if num_clients > len(labels):
        raise FedscError(
            f"{num_clients} clients but only {len(labels)} training images: "
            "take fewer clients or more data"
        )
    rng = generator("partition", seed)
    if kind == "iid":
        parts = split_iid(len(labels), num_clients, rng)
    elif kind == "nid1":
        alpha = _number(words[0], text, "alpha")
        if not 0 < alpha < np.inf:
            raise FedscError(f"alpha = {words[0]} in '{text}' is out of range (allowed: above 0)")
        form = words[1] if len(words) == 2 else "capped"
        if form not in ("capped", "plain", "equal", "client"):
            raise FedscError(f"unknown form '{form}' in '{text}' (allowed: plain, equal, client)")
        parts = split_nid1(labels, num_clients, alpha, form, rng)
    elif kind == "nid2":
        form = words[0] if words else "shards"
        if form not in ("shards", "half", "extra"):
            raise FedscError(f"unknown form '{form}' in '{text}' (allowed: half, extra)")
        if num_clients != NID2_CLIENTS:
            raise FedscError(
                f"nid2 is made for {NID2_CLIENTS} clients, not {num_clients}: leave --clients away"
            )
        parts = split_nid2(labels, form, rng)
    else:
        if not words[0].removeprefix("-").isdecimal():
            raise FedscError(f"shards = '{words[0]}' in '{text}' is not a whole number")
        per_client = int(words[0])
        parts = split_shards(labels, num_clients, per_client, rng)
    empty = [k for k, part in enumerate(parts) if len(part) == 0]
    if empty:
        raise FedscError(f"client {empty[0]} got no images under '{text}': take fewer clients")
    return [np.sort(part) for part in parts]


def split_iid(num_samples: int, num_clients: int, rng: np.random.Generator) -> list[Indices]:
    return np.array_split(rng.permutation(num_samples), num_clients)


def split_nid1(
    labels: Indices, num_clients: int, alpha: float, form: str, rng: np.random.Generator
) -> list[Indices]:
    """NID1: label shift by a Dirichlet distribution, drawn again until no client is too small."""
    # Data too small for 10 each still gets a partition: half the mean size is then enough.
    enough = min(MIN_SAMPLES, max(1, len(labels) // (2 * num_clients)))
    if form == "equal":
        enough = len(labels) // (2 * num_clients)
    for _ in range(MAX_DRAWS):
        if form == "client":
            parts = _draw_per_client(labels, num_clients, alpha, rng)
        else:
            parts = _draw_per_class(labels, num_clients, alpha, rng, capped=form != "plain")
        if min(len(part) for part in parts) >= enough:
            break
    else:
        raise FedscError(
            f"no NID1 partition with alpha = {alpha:g} gave each of {num_clients} clients "
            f"{enough} images in {MAX_DRAWS} draws: take fewer clients, more data or a larger alpha"
        )
    if form == "equal":
        return np.array_split(np.concatenate(parts), num_clients)
    return parts


def _draw_per_class(
    labels: Indices, num_clients: int, alpha: float, rng: np.random.Generator, capped: bool
) -> list[Indices]:
    """For each class, shares over the clients; a client that has N / K already gets no more."""
    parts: list[list[Indices]] = [[] for _ in range(num_clients)]
    sizes = np.zeros(num_clients)
    for label in range(labels.max() + 1):
        members = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(num_clients, alpha))
        if capped:
            open_to = sizes < len(labels) / num_clients
            shares = shares * open_to
            # A tiny alpha can put everything, to the last digit, on clients that are full.
            shares = shares / shares.sum() if shares.sum() > 0 else open_to / open_to.sum()
        # Ends at exactly 1: rounding must not hand the last client, perhaps full, one more.
        cumulative = np.cumsum(shares) / np.cumsum(shares)[-1]
        cuts = np.floor(cumulative[:-1] * len(members)).astype(np.int64)
        for k, piece in enumerate(np.split(members, cuts)):
            parts[k].append(piece)
            sizes[k] += len(piece)
    return [np.concatenate(pieces) for pieces in parts]


def _draw_per_client(
    labels: Indices, num_clients: int, alpha: float, rng: np.random.Generator
) -> list[Indices]:
    """For each client, shares over the classes, equal sizes; a class that runs out is closed."""
    num_classes = int(labels.max()) + 1
    stock = [list(rng.permutation(np.flatnonzero(labels == j))) for j in range(num_classes)]
    size = len(labels) // num_clients
    parts = []
    for _ in range(num_clients):
        shares = rng.dirichlet(np.full(num_classes, alpha))
        taken: list[int] = []
        while len(taken) < size:
            left = np.array([len(members) for members in stock])
            open_shares = np.where(left > 0, shares, 0)
            if open_shares.sum() == 0:
                open_shares = (left > 0).astype(float)
            wanted = rng.multinomial(size - len(taken), open_shares / open_shares.sum())
            for members, number in zip(stock, np.minimum(wanted, left), strict=True):
                taken += [members.pop() for _ in range(number)]
        parts.append(np.array(taken, dtype=np.int64))
    return parts


def split_nid2(labels: Indices, form: str, rng: np.random.Generator) -> list[Indices]:
    """NID2: clients 0 to 4 hold a fifth of the classes each, client 5 holds some of every class."""
    num_classes = int(labels.max()) + 1
    if num_classes < 5:
        raise FedscError(f"nid2 needs at least 5 classes, this data has {num_classes}")
    owner = np.empty(num_classes, dtype=np.int64)
    for client, classes in enumerate(np.array_split(np.arange(num_classes), 5)):
        owner[classes] = client
    if form == "extra":
        mixed = rng.permutation(len(labels))
        unbiased, rest = np.split(mixed, [len(labels) // 6])
        return [rest[owner[labels[rest]] == k] for k in range(5)] + [unbiased]
    parts: list[list[Indices]] = [[] for _ in range(NID2_CLIENTS)]
    for label in range(num_classes):
        members = rng.permutation(np.flatnonzero(labels == label))
        if form == "half":
            biased, unbiased = np.array_split(members, 2)
        else:  # six shards, five of them biased; up to 5 samples a class are left over
            shard = len(members) // 6
            if shard == 0:
                raise FedscError(
                    f"class {label} has {len(members)} images, nid2 needs at least 6 of each: "
                    "take more data or a shorter tail"
                )
            biased, unbiased = members[: 5 * shard], members[5 * shard : 6 * shard]
        parts[owner[label]].append(biased)
        parts[5].append(unbiased)
    return [np.concatenate(pieces) for pieces in parts]


def split_shards(
    labels: Indices, num_clients: int, per_client: int, rng: np.random.Generator
) -> list[Indices]:
    """Pathological label shift of the FedAvg paper: each client holds a few blocks of one class."""
    if not 1 <= per_client <= len(labels) // num_clients:
        raise FedscError(
            f"{per_client} shards for each of {num_clients} clients "
            f"(allowed: 1 to {len(labels) // num_clients} with {len(labels)} images)"
        )
    by_class = np.argsort(labels, kind="stable")
    shards = np.array_split(by_class, num_clients * per_client)
    dealt = rng.permutation(len(shards)).reshape(num_clients, per_client)
    return [np.concatenate([shards[s] for s in hand]) for hand in dealt]


def class_count_table(labels: Indices, parts: list[Indices], num_classes: int) -> Indices:
    """n_k^j: the images of each class at each client, (K, C)."""
    rows = [np.bincount(labels[part], minlength=num_classes) for part in parts]
    return np.stack(rows).astype(np.int64)


def fingerprint(parts: list[Indices]) -> str:
    """SHA-256 of a partition: two runs with the same one trained on the same split."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:".encode())
        digest.update(part.astype("<i8").tobytes())
    return digest.hexdigest()


def _number(word: str, text: str, what: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise FedscError(f"{what} = '{word}' in '{text}' is not a number") from None
