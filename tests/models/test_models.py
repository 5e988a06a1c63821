"""The networks against known parameter counts, and the convention every model follows."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsc.errors import FedscError
from fedsc.models import (
    MLP,
    MODELS,
    MobileNetV2,
    Outputs,
    ResNet10,
    build_model,
    check_model,
    default_model,
    model_from_path,
    norm_layer,
)
from fedsc.models.norm import NORMS, FixedBatchNorm, fix_norms, group_count

# Small images, so that the tests are fast; conv4 needs 16 pixels.
SHAPES = {
    "mlp": (1, 8, 8),
    "cnn": (1, 8, 8),
    "conv4": (3, 16, 16),
    "resnet10": (3, 8, 8),
    "mobilenetv2": (3, 32, 32),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def parameter_count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def buffer_floats(model: nn.Module) -> int:
    return sum(b.numel() for b in model.buffers() if b.is_floating_point())


@pytest.mark.parametrize(
    ("name", "shape", "classes", "norm", "expected"),
    [
        ("resnet10", (3, 32, 32), 10, "auto", 4_903_242),
        ("resnet10", (3, 32, 32), 100, "batch", 4_949_412),
        ("resnet10", (3, 32, 32), 10, "group", 4_903_242),
        ("mobilenetv2", (3, 64, 64), 200, "auto", 2_079_176),
        ("cnn", (1, 28, 28), 10, "none", 1_663_370),  # as in McMahan et al. 2017
        ("cnn", (1, 28, 28), 10, "auto", 1_663_370 - 32 - 64 + 2 * (32 + 64)),
        ("mlp", (1, 8, 8), 10, "auto", 64 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10),
        ("conv4", (3, 32, 32), 60, "auto", 9 * 64 * (3 + 3 * 64) + 4 * 128 + 256 * 60 + 60),
    ],
)
def test_parameter_counts(
    name: str, shape: tuple[int, int, int], classes: int, norm: str, expected: int
) -> None:
    assert parameter_count(build_model(name, shape, classes, norm)) == expected


def test_batch_norm_floats_of_resnet10() -> None:
    assert buffer_floats(build_model("resnet10", (3, 32, 32), 10)) == 5_760
    assert buffer_floats(build_model("resnet10", (3, 32, 32), 10, "group")) == 0


def test_options_of_the_classes() -> None:
    assert parameter_count(MLP((1, 28, 28), 10, hidden=(200,))) == 784 * 200 + 200 + 2_010
    assert check_model(ResNet10((3, 16, 16), 60, widths=(64, 128, 256)), (3, 16, 16), 60) == 256


@pytest.mark.parametrize(
    ("name", "shape", "features", "stages"),
    [
        ("mlp", (1, 8, 8), 64, [(128,), (64,)]),
        ("cnn", (1, 28, 28), 512, [(32, 28, 28), (64, 14, 14), (512,)]),
        ("cnn", (1, 8, 8), 512, [(32, 8, 8), (64, 4, 4), (512,)]),
        ("cnn", (1, 9, 30), 512, [(32, 9, 30), (64, 4, 15), (512,)]),
        ("conv4", (3, 32, 32), 256, [(64, 32, 32), (64, 16, 16), (64, 8, 8), (64, 4, 4)]),
        (
            "resnet10",
            (3, 32, 32),
            512,
            [(64, 32, 32), (64, 32, 32), (128, 16, 16), (256, 8, 8), (512, 4, 4)],
        ),
        (
            "mobilenetv2",
            (3, 64, 64),
            512,
            [
                (32, 32, 32),
                (16, 32, 32),
                (24, 16, 16),
                (32, 8, 8),
                (64, 4, 4),
                (96, 4, 4),
                (160, 2, 2),
                (320, 2, 2),
            ],
        ),
    ],
)
def test_shapes(
    name: str, shape: tuple[int, int, int], features: int, stages: list[tuple[int, ...]]
) -> None:
    model = build_model(name, shape, 7)
    out = model(torch.randn(2, *shape))
    assert isinstance(out, Outputs)
    assert out.features.shape == (2, features)
    assert out.logits.shape == (2, 7)
    assert [tuple(stage.shape[1:]) for stage in out.stages] == stages
    assert model.stage_channels == tuple(stage[0] for stage in stages)
    assert check_model(model, shape, 7) == features


def test_stem_stride_one_doubles_the_maps_of_mobilenet() -> None:
    out = MobileNetV2((3, 32, 32), 5, stem_stride=1)(torch.randn(2, 3, 32, 32))
    assert [stage.shape[-1] for stage in out.stages] == [32, 32, 16, 8, 4, 4, 2, 2]


def relu6_mean(x: Tensor) -> Tensor:
    return F.relu6(x).mean(dim=(2, 3))


@pytest.mark.parametrize("name", MODELS)
def test_stages_are_before_the_relu_and_features_after(name: str) -> None:
    model: Any = build_model(name, SHAPES[name], 10)
    out = model(torch.randn(8, *SHAPES[name]))
    assert all((stage < 0).any() for stage in out.stages)
    assert (out.features >= 0).all()
    last = out.stages[-1]
    features = {
        "mlp": lambda: F.relu(last),
        "cnn": lambda: F.relu(last),
        "conv4": lambda: F.max_pool2d(F.relu(last), 2).flatten(1),
        "resnet10": lambda: F.relu(last).mean(dim=(2, 3)),
        "mobilenetv2": lambda: relu6_mean(model.last(last)),
    }[name]()
    torch.testing.assert_close(out.features, features)
    torch.testing.assert_close(out.logits, model.classifier(out.features))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_gets_a_finite_gradient(name: str, norm: str) -> None:
    model = build_model(name, SHAPES[name], 10, norm)
    out = model(torch.randn(4, *SHAPES[name]))
    # The stages take part, as they do in FedRCL: this fails if something overwrote one.
    loss = F.cross_entropy(out.logits, torch.arange(4)) + sum(s.square().mean() for s in out.stages)
    loss.backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
        assert parameter.grad.any(), parameter_name


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", MODELS)
def test_a_bias_only_where_no_norm_follows(name: str, norm: str) -> None:
    convs = [
        m for m in build_model(name, SHAPES[name], 10, norm).modules() if isinstance(m, nn.Conv2d)
    ]
    assert all((conv.bias is not None) == (norm == "none") for conv in convs)


@pytest.mark.parametrize("name", MODELS)
def test_group_norm_keeps_samples_apart(name: str) -> None:
    model = build_model(name, SHAPES[name], 10, "group")
    images = torch.randn(6, *SHAPES[name])
    together = model(images)
    alone = model(images[2:3])
    torch.testing.assert_close(together.logits[2:3], alone.logits, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(together.features[2:3], alone.features, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_channels_last_gives_the_same(name: str) -> None:
    model = build_model(name, SHAPES[name], 10).eval()
    images = torch.randn(3, *SHAPES[name])
    usual = model(images)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    other = model(images.to(memory_format=torch.channels_last))
    torch.testing.assert_close(other.logits, usual.logits, rtol=1e-3, atol=1e-4)
    other.logits.sum().backward()


@pytest.mark.parametrize(
    ("channels", "groups"),
    [(1, 1), (7, 1), (16, 8), (24, 12), (64, 32), (144, 24), (160, 32), (512, 32)],
)
def test_group_count(channels: int, groups: int) -> None:
    assert group_count(channels) == groups


def test_norm_layer() -> None:
    assert isinstance(norm_layer("batch", 8), nn.BatchNorm2d)
    assert isinstance(norm_layer("batch", 8, dims=1), nn.BatchNorm1d)
    assert isinstance(norm_layer("group", 8), nn.GroupNorm)
    assert isinstance(norm_layer("none", 8), nn.Identity)
    with pytest.raises(FedscError, match="unknown norm 'layer'"):
        norm_layer("layer", 8)


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 4, 5)])
def test_fixed_batch_norm_is_batch_norm_until_it_is_fixed(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    ours = FixedBatchNorm(3)
    theirs = nn.BatchNorm1d(3) if len(shape) == 2 else nn.BatchNorm2d(3)
    with torch.no_grad():
        theirs.weight.uniform_(0.5, 2)
        theirs.bias.normal_()
    ours.load_state_dict(theirs.state_dict())  # a state of one fits the other
    weights = torch.randn(shape)

    def gradient(layer: nn.Module, values: Tensor) -> Tensor:
        values = values.clone().requires_grad_()
        (layer(values) * weights).sum().backward()
        assert values.grad is not None
        return values.grad

    for round in (1, 2, 3):
        fix_norms(ours, round, num_rounds=6)
        values = torch.randn(shape) * 3 + 1
        torch.testing.assert_close(gradient(ours, values), gradient(theirs, values))
        torch.testing.assert_close(ours(values), theirs(values))
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)

    fix_norms(ours, 1, num_rounds=1)
    assert not ours.fixed  # nothing would have been measured yet
    fix_norms(ours, 4, num_rounds=6)
    theirs.eval()  # fixed, a layer trains as it is used
    before = copy.deepcopy(ours.state_dict())
    values = torch.randn(shape) * 5 - 2
    torch.testing.assert_close(ours(values), theirs(values))
    torch.testing.assert_close(gradient(ours, values), gradient(theirs, values))
    for name in ("running_mean", "running_var"):
        assert torch.equal(ours.state_dict()[name], before[name])


def test_auto_norm() -> None:
    def norms(name: str) -> set[type]:
        kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm)
        modules = build_model(name, SHAPES[name], 10).modules()
        return {type(m) for m in modules if isinstance(m, kinds)}

    assert norms("mlp") == set()
    assert all(norms(name) == {nn.BatchNorm2d} for name in MODELS if name != "mlp")


@pytest.mark.parametrize(
    ("dataset", "shape", "expected"),
    [
        ("digits", (1, 8, 8), "mlp"),
        ("fashion-mnist", (1, 28, 28), "cnn"),
        ("cifar10", (3, 32, 32), "resnet10"),
        ("tinyimagenet", (3, 64, 64), "mobilenetv2"),
        ("fc100", (3, 32, 32), "resnet10"),
        ("mine", (3, 16, 16), "mlp"),
        ("mine", (3, 48, 48), "resnet10"),
    ],
)
def test_default_model(dataset: str, shape: tuple[int, int, int], expected: str) -> None:
    assert default_model(dataset, shape) == expected
    assert check_model(build_model(expected, shape, 10), shape, 10) > 0


@pytest.mark.parametrize(
    ("name", "shape", "classes", "norm", "message"),
    [
        ("resnet", (3, 32, 32), 10, "auto", "unknown model 'resnet': did you mean 'resnet10'"),
        ("cnn", (1, 28, 28), 10, "grup", "unknown norm 'grup': did you mean 'group'"),
        ("conv4", (1, 8, 8), 10, "auto", "8x8 pixels .* 'conv4'.* at least 16x16"),
        ("cnn", (1, 3, 8), 10, "auto", "3x8 pixels .* 'cnn'.* at least 4x4"),
        ("mlp", (0, 8, 8), 10, "auto", r"image_shape \(0, 8, 8\)"),
        ("mlp", (1, 8, 8), 0, "auto", "num_classes is 0"),
        ("a/file.py:Net", (1, 8, 8), 10, "group", "norm 'group' applies to built-in"),
    ],
)
def test_build_model_errors(
    name: str, shape: tuple[int, int, int], classes: int, norm: str, message: str
) -> None:
    with pytest.raises(FedscError, match=message):
        build_model(name, shape, classes, norm)


OWN_MODEL = """
import math
from torch import nn
from fedsc.models import Outputs

class Net(nn.Module):
    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.body = nn.Linear(math.prod(image_shape), 12)
        self.classifier = nn.Linear(12, num_classes)

    def forward(self, images):
        features = self.body(images.flatten(1)).relu()
        return Outputs(features, self.classifier(features))

def number(image_shape, num_classes):
    return 5

def no_arguments():
    return None
"""


def test_a_users_own_model(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN_MODEL)
    model = build_model(f"{file}:Net", (1, 8, 8), 3)
    assert check_model(model, (1, 8, 8), 3) == 12
    again = model_from_path(f"{file}:Net", (1, 8, 8), 3)
    assert type(again) is type(model)
    copy = pickle.loads(pickle.dumps(model))
    images = torch.randn(2, 1, 8, 8)
    assert torch.equal(copy(images).logits, model(images).logits)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN_MODEL)
    build_model(f"{file}:Net", (1, 8, 8), 3)
    # A longer name too, for Python's own cache of compiled files tells versions by size and second.
    file.write_text(OWN_MODEL.replace("12", "128"))
    assert check_model(build_model(f"{file}:Net", (1, 8, 8), 3), (1, 8, 8), 3) == 128


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (None, "Net", "there is no file"),
        (OWN_MODEL, "Nett", "defines no class or function 'Nett'"),
        (OWN_MODEL, "", "defines no class or function ''"),
        (OWN_MODEL, "number", "gave a int, not an nn.Module"),
        (OWN_MODEL, "no_arguments", "failed: TypeError"),
        ("import no_such_package", "Net", "importing .* failed: ModuleNotFoundError"),
        ("def (", "Net", "importing .* failed: SyntaxError"),
    ],
)
def test_errors_in_a_users_file(tmp_path: Path, text: str | None, name: str, message: str) -> None:
    file = tmp_path / "own.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(FedscError, match=message):
        build_model(f"{file}:{name}", (1, 8, 8), 3)


class Own(nn.Module):
    """A model that gives whatever `forward_body` makes of its features and logits."""

    def __init__(self, forward_body: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.forward_body = forward_body
        self.classifier = nn.Linear(4, 3)

    def forward(self, images: Tensor) -> object:
        features = images.flatten(1)
        return self.forward_body(features, self.classifier(features))


@pytest.mark.parametrize(
    ("forward_body", "message"),
    [
        (lambda f, z: z, "forward gave a Tensor, not Outputs"),
        (lambda f, z: (f, z), "forward gave a tuple, not Outputs"),
        (lambda f, z: Outputs(f[:, :, None], z), r"features .* \(2, 4, 1\), not \(2, d\)"),
        (lambda f, z: Outputs(f, z[:, :2]), r"logits .* \(2, 2\), not \(2, 3\)"),
        (lambda f, z: Outputs(cast(Tensor, None), z), "features is a NoneType"),
        (lambda f, z: Outputs(f, z, (f[0],)), r"stages\[0\]"),
        (lambda f, z: Outputs(f[:, :2], z), r"classifier\(features\) failed"),
        (lambda f, z: Outputs(f + 1, z), r"logits differ from classifier\(features\)"),
        (lambda f, z: 1 / 0, "forward failed .* ZeroDivisionError"),
    ],
)
def test_check_model_says_what_is_wrong(
    forward_body: Callable[[Tensor, Tensor], object], message: str
) -> None:
    model = Own(forward_body)
    with pytest.raises(FedscError, match=message) as raised:
        check_model(model, (1, 2, 2), 3)
    assert "whose forward(images) returns" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert model.training


def test_check_model_wants_a_classifier() -> None:
    with pytest.raises(FedscError, match="`classifier`"):
        check_model(nn.Flatten(), (1, 2, 2), 3)


def test_check_model_leaves_the_model_as_it_was() -> None:
    model: Any = build_model("cnn", (1, 8, 8), 3)
    model.conv1.eval()  # a part the user froze
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert check_model(model, (1, 8, 8), 3) == 512
    assert model.training
    assert model.conv2.training
    assert not model.conv1.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
