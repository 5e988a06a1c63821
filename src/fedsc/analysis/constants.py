"""L1, L2, B and sigma² of the paper's assumptions, estimated from a run.

Looked at in two places of the run: its first round, from the initial weights, and the round after
its last checkpoint, from the global model there. In both, each client of the round trains as in the
run, and its objective (the terms of FedSC's loss, prototypes fixed) is differentiated batch by
batch at three points: the weights w it received, w a small step down the gradient, and the weights
it ended with. All values are maxima over what was seen, so the true constants are at least as
large.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data.plan import cohort, steps_per_epoch
from ..engines.local import ClientData, copy_state, load_state
from ..engines.sequential import Visit
from ..federation import Federation
from ..method import Client
from ..state import State
from .reopen import OnStep, engine_of

MOST_CLIENTS = 10
MOST_BATCHES = 20  # of a client
SMALL_STEP = 1e-3  # relative to the length of the weights


@dataclass(frozen=True)
class Estimates:
    """Maxima over all that was seen, and the loss before the first round."""

    L1: float
    L2: float
    B: float
    sigma2: float
    gradient2: float  # mean over clients of ||grad L||² after the checkpoint
    first_loss: float  # mean over clients at the initial weights


@dataclass(frozen=True)
class Seen:
    """One client's objective at one point."""

    gradient: Tensor  # (P,) float64: the mean over batches
    mean_norm: float  # of the batches' gradients
    variance: float
    loss: float
    features: Tensor  # (N, d) of the same images in evaluation mode


def estimate(federation: Federation, initial: State, on_step: OnStep) -> Estimates:
    """From a federation at its checkpoint, and its server's state before the first round."""
    places = ((1, initial), (federation.round + 1, federation.server))
    names = dict(federation.model.named_parameters())
    extractor = torch.cat(
        [
            torch.full((names[name].numel(),), "classifier" not in name.split("."))
            for name in federation.task.trainable
        ]
    )
    found: dict[int, list[tuple[list[Seen], float, float]]] = {1: [], federation.round + 1: []}
    chosen = {number: round_clients(federation, number) for number, _ in places}
    total, done = sum(map(len, chosen.values())), 0
    for number, server in places:
        for client in chosen[number]:
            on_step("gradients of the clients", done, total)
            found[number].append(look_at(federation, number, server, client, extractor))
            done += 1
    on_step("gradients of the clients", total, total)

    clients = [each for group in found.values() for each in group]
    last = found[federation.round + 1]
    return Estimates(
        L1=max(slope for _, slope, _ in clients),
        L2=max(slope for _, _, slope in clients),
        B=max(point.mean_norm for points, _, _ in clients for point in points),
        sigma2=max(point.variance for points, _, _ in clients for point in points),
        gradient2=sum(float(p[0].gradient.square().sum()) for p, _, _ in last) / len(last),
        first_loss=sum(p[0].loss for p, _, _ in found[1]) / len(found[1]),
    )


def round_clients(federation: Federation, number: int) -> list[ClientData]:
    task = federation.task
    chosen = cohort(federation.spec.seed, number, task.num_clients, task.cohort_size)
    return [federation.clients[k] for k in chosen[:MOST_CLIENTS]]


def look_at(
    federation: Federation, number: int, server: State, data: ClientData, extractor: Tensor
) -> tuple[list[Seen], float, float]:
    """A client's objective at its three points, and the slopes between them: of the gradient (for
    L1) and of the features (for L2)."""
    engine = engine_of(federation)
    received, message = server["model"], federation.method.broadcast(server)
    memory = federation.method.init_client(federation.task)
    client = Client(torch.tensor(data.id, device=engine.device), data.class_counts, memory)
    visit = Visit(engine, number, data, client, received, message, lambda images: None)
    start = copy_state(visit.model)
    trained = visit.train().model

    here = see(visit, start)
    weights = flat(visit, start)
    direction = here.gradient / here.gradient.norm().clamp_min(1e-30)
    nearby = shifted(visit, start, -SMALL_STEP * float(weights.norm()) * direction)
    points = [here, see(visit, nearby), see(visit, trained)]
    slopes = [(0.0, 0.0)]
    for state, point in zip((nearby, trained), points[1:], strict=True):
        way = flat(visit, state) - weights
        if float(way.norm()) == 0:
            continue
        own = way[extractor.to(way.device)].norm().clamp_min(1e-30)
        moved = (point.features - here.features).norm(dim=1).max()
        slopes.append(
            (float((point.gradient - here.gradient).norm() / way.norm()), float(moved / own))
        )
    return points, max(slope for slope, _ in slopes), max(slope for _, slope in slopes)


def see(visit: Visit, state: State) -> Seen:
    """The objective over the client's batches, in training mode as the clients see it."""
    visit.clean_pass("start")  # of the received model, as in training
    load_state(visit.model, state)
    visit.begin("step")
    visit.clean_pass("epoch")
    mean = torch.zeros(0)
    norms: list[float] = []
    losses: list[float] = []
    for images, labels in some_batches(visit):
        visit.model.train()
        batch = visit.batch(images, labels, torch.ones(len(labels), device=labels.device))
        visit.observe("step", batch)
        loss = torch.stack(list(visit.method.loss(batch).values())).sum()
        grads = torch.autograd.grad(loss, list(visit.params.values()), allow_unused=True)
        gradient = torch.cat(
            [
                (torch.zeros_like(p) if g is None else g).flatten().double()
                for g, p in zip(grads, visit.params.values(), strict=True)
            ]
        )
        mean = mean + gradient if norms else gradient
        norms.append(float(gradient.norm()))
        losses.append(float(loss.detach()))
    mean = mean / len(norms)
    load_state(visit.model, state)  # without what training mode did to running statistics
    visit.model.eval()
    with torch.no_grad():
        features = [
            visit.images.forward(visit.model, images).features for images, _ in some_batches(visit)
        ]
    return Seen(
        gradient=mean,
        mean_norm=sum(norms) / len(norms),
        # E||g - mean||² = E||g||² - ||mean||²
        variance=max(0.0, sum(norm**2 for norm in norms) / len(norms) - float(mean.square().sum())),
        loss=sum(losses) / len(losses),
        features=torch.cat(features).double(),
    )


def some_batches(visit: Visit) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of the training size without augmentation, the same at every point. They are of equal
    size: a last one that is smaller would have a larger variance, and one image no statistics."""
    data, training = visit.client_data, visit.training
    order = torch.randperm(data.num_samples, generator=torch.Generator().manual_seed(training.seed))
    size = min(training.batch_size, data.num_samples)
    shuffled = data.indices[order.to(data.indices.device)]
    batches = visit.images.clean_batches(shuffled, size)
    for number, (images, labels) in enumerate(batches):
        if number < MOST_BATCHES and len(labels) == size:
            yield images, labels


def flat(visit: Visit, state: State) -> Tensor:
    return torch.cat([state[name].flatten().double() for name in visit.params])


def shifted(visit: Visit, state: State, by: Tensor) -> State:
    """The state with its trainable tensors moved by a flat vector."""
    there, start = dict(state), 0
    for name in visit.params:
        part = by[start : start + state[name].numel()].view(state[name].shape)
        there[name] = state[name] + part.to(state[name])
        start += state[name].numel()
    return there


def mean_iterations(federation: Federation) -> float:
    """E of the theorems: local iterations in a round, the mean over clients by their samples."""
    spec = federation.spec
    sizes = [client.num_samples for client in federation.clients]
    steps = [steps_per_epoch(n, min(spec.batch_size, n)) for n in sizes]
    weighted = sum(n * s for n, s in zip(sizes, steps, strict=True))
    return spec.epochs * weighted / sum(sizes)
