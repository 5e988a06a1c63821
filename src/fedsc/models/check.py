"""Does a network follow the convention? One forward pass tells, before any training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..errors import FedscError, in_words
from .outputs import Outputs

CONVENTION = (
    "a model is an nn.Module whose forward(images) returns fedsc.models.Outputs("
    "features (B, d), logits (B, C), stages=()) with logits = self.classifier(features)"
)


def check_model(model: nn.Module, image_shape: tuple[int, int, int], num_classes: int) -> int:
    """Try the model on two black images and give its feature size d; else say what is wrong."""
    classifier = getattr(model, "classifier", None)
    if not isinstance(classifier, nn.Module):
        raise _breaks_convention(model, "it has no module as attribute `classifier`")
    with torch.no_grad(), _eval_mode(model):
        out = _try_forward(model, image_shape)
        if not isinstance(out, Outputs):
            raise _breaks_convention(model, f"forward gave a {type(out).__name__}, not Outputs")
        _check_shape(model, "features", out.features, "(2, d)", None)
        _check_shape(model, "logits", out.logits, f"(2, {num_classes})", num_classes)
        for index, stage in enumerate(out.stages):
            if not isinstance(stage, Tensor) or stage.ndim < 2 or len(stage) != 2:
                raise _breaks_convention(model, f"stages[{index}] is not a (B, channels, ...)")
        try:  # methods replace the classifier, or keep only the features: they must fit together
            expected = classifier(out.features)
        except Exception as error:
            problem = f"classifier(features) failed: {in_words(error)}"
            raise _breaks_convention(model, problem) from error
        if not torch.allclose(expected, out.logits, rtol=1e-3, atol=1e-4, equal_nan=True):
            raise _breaks_convention(model, "logits differ from classifier(features)")
    return out.features.shape[1]


def _check_shape(
    model: nn.Module, what: str, tensor: object, wanted: str, columns: int | None
) -> None:
    if not isinstance(tensor, Tensor):
        raise _breaks_convention(model, f"{what} is a {type(tensor).__name__}, not a Tensor")
    shape = tuple(tensor.shape)
    if len(shape) != 2 or shape[0] != 2 or columns not in (None, shape[1]):
        raise _breaks_convention(model, f"{what} of 2 images have shape {shape}, not {wanted}")


def _try_forward(model: nn.Module, image_shape: tuple[int, int, int]) -> object:
    weight = next(model.parameters(), torch.zeros(()))
    images = torch.zeros(2, *image_shape, device=weight.device, dtype=weight.dtype)
    try:
        return model(images)
    except Exception as error:
        shape = tuple(images.shape)
        problem = f"forward failed on images of shape {shape}: {in_words(error)}"
        raise _breaks_convention(model, problem) from error


@contextlib.contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards every submodule is as before, also one the user froze."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _breaks_convention(model: nn.Module, problem: str) -> FedscError:
    return FedscError(f"model {type(model).__name__}: {problem}; {CONVENTION}")
