"""DP-SGD: the gradient of each record on its own, clipped, summed, with noise.

Per-sample gradients are torch.func's, not Opacus' hooks. A loss sees a batch of one record, so by
construction no record's gradient depends on another; and a term on the weights themselves, such as
FedProx's, is part of it, which hooks on layers do not see.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from ..contract import given_loss
from ..data.plan import CROP_PADDING, ClientPlan
from ..data.randomness import generator
from ..method import Batch
from ..models.outputs import Outputs
from ..privacy import gaussian, poisson_batches, steps_and_rates
from .local import total_of

if TYPE_CHECKING:
    from .sequential import Visit

AT_ONCE = 64  # records whose gradients are held at the same time

Terms = dict[str, Tensor]
GradientOfOne = Callable[..., tuple[dict[str, Tensor], Terms]]


class PrivateSteps:
    """The steps of one client in one round under DP-SGD, on batches of its own drawing.

    Every record is in every batch with the same probability, independently (Poisson sampling), as
    the accountant's amplification assumes; the plan of ordinary training draws batches otherwise.
    """

    def __init__(self, visit: Visit, plan: ClientPlan) -> None:
        self.visit, training, client = visit, visit.training, visit.client_data
        self.privacy = training.privacy
        keys = training.seed, training.noise_key, visit.round, client.id
        self.batch_rng = generator("private_batches", *keys)
        self.noise_rng = generator("gradient_noise", *keys)
        epochs, self.steps_per_epoch = plan.order.shape[:2]
        _, (rate,) = steps_and_rates([client.num_samples], training.batch_size, epochs)
        self.expected_size = rate * client.num_samples
        steps = epochs * self.steps_per_epoch
        self.batches = poisson_batches(client.num_samples, rate, steps, self.batch_rng)

    def step(self, epoch: int, step: int) -> Terms:
        """Set the gradients of a step; returns the terms of the loss, the mean over its batch."""
        visit = self.visit
        picked = self.batches[epoch * self.steps_per_epoch + step]
        counted = torch.ones(len(picked))
        if len(picked) == 0:  # noise alone; a record that does not count keeps the shapes
            picked, counted = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
        shift = np.full((len(picked), 2), CROP_PADDING)
        flip = np.zeros(len(picked), dtype=bool)
        if visit.training.augment != "none":
            shift = self.batch_rng.integers(0, 2 * CROP_PADDING + 1, shift.shape)
            flip = self.batch_rng.integers(0, 2, flip.shape).astype(bool)
        if visit.training.augment == "crop-flip-batch":
            shift[:], flip[:] = shift[0], flip[0]
        device = visit.engine.device
        images, labels = visit.images.train_batch(
            visit.client_data.indices[picked.to(device)],
            torch.from_numpy(shift).to(device),
            torch.from_numpy(flip).to(device),
        )
        summed, terms = self.summed_gradients(images, labels, counted.to(device))
        clip, noise = self.privacy.clip or 0.0, self.privacy.noise
        for name, param in visit.params.items():
            total = summed[name]
            if noise:
                total = total + gaussian(total, noise * clip, self.noise_rng)
            # Divided by the expected size: the true size of a batch is private.
            param.grad = (total / self.expected_size).to(
                memory_format=torch.preserve_format, dtype=param.dtype
            )
        visit.on_images(len(labels))
        return {name: term / max(1, int(counted.sum())) for name, term in terms.items()}

    def summed_gradients(
        self, images: Tensor, labels: Tensor, counted: Tensor
    ) -> tuple[dict[str, Tensor], Terms]:
        """The sum of the clipped gradients of the records that count, and of their losses."""
        visit = self.visit
        with torch.no_grad():
            teachers = {
                name: visit.images.forward(teacher, images)
                for name, teacher in visit.teachers.items()
            }
        params = {name: param.detach() for name, param in visit.params.items()}
        of_each = vmap(
            gradient_of_one(visit), in_dims=(None, 0, 0, 0), out_dims=0, randomness="different"
        )
        summed = {name: torch.zeros_like(param) for name, param in params.items()}
        losses: Terms = {}
        for start in range(0, len(labels), AT_ONCE):
            some = slice(start, start + AT_ONCE)
            theirs = {
                name: Outputs(
                    output.features[some],
                    output.logits[some],
                    tuple(stage[some] for stage in output.stages),
                )
                for name, output in teachers.items()
            }
            gradients, terms = of_each(params, images[some], labels[some], theirs)
            scale = clip_factors(gradients, self.privacy.clip) * counted[some]
            for name, gradient in gradients.items():
                finite = gradient.nan_to_num(0.0, 0.0, 0.0)  # 0 times infinity is not 0
                summed[name] += torch.tensordot(scale.to(gradient), finite, dims=1)
            for name, term in terms.items():
                losses[name] = (
                    losses.get(name, torch.zeros_like(term[0]))
                    + (term.detach() * counted[some]).sum()
                )
        return summed, losses


def clip_factors(gradients: Mapping[str, Tensor], clip: float | None) -> Tensor:
    """What each record's gradient, over all tensors (B, ...), is multiplied with, (B,).

    Zero where it is not finite: clipping does not bound it, and it would be the whole sum.
    """
    squares = [gradient.flatten(1).double().square().sum(1) for gradient in gradients.values()]
    length = torch.stack(squares).sum(0).sqrt()
    if clip is None:
        return torch.ones_like(length)
    factors = (clip / length.clamp_min(1e-30)).clamp_max(1)
    return torch.where(length.isfinite(), factors, 0)


def gradient_of_one(visit: Visit) -> GradientOfOne:
    """The function (params, image, label, teachers' outputs) -> (gradient, terms) of one record."""

    def loss(
        params: dict[str, Tensor], image: Tensor, label: Tensor, teachers: Mapping[str, Outputs]
    ) -> tuple[Tensor, Terms]:
        def student(images: Tensor) -> Outputs:
            outputs: Outputs = functional_call(visit.model, params, (images,))
            return outputs

        batch = Batch(
            label[None],
            torch.ones(1, device=image.device),
            visit.images.forward(student, image[None]),
            {
                name: Outputs(
                    output.features[None],
                    output.logits[None],
                    tuple(stage[None] for stage in output.stages),
                )
                for name, output in teachers.items()
            },
            params,
            visit.global_params,
            visit.received,
            visit.client,
            visit.observed,
        )
        terms = given_loss(visit.method, visit.method.loss(batch))
        return total_of(terms), terms

    return grad(loss, has_aux=True)
