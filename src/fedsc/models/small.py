"""Small networks: an MLP, the two-convolution CNN for 28x28 images, and Conv-4 for few-shot."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from .norm import conv_norm, norm_layer
from .outputs import Outputs


class MLP(nn.Module):
    """Hidden layers with ReLU. Features: the last one. Stages: all of them, before their ReLU."""

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        num_classes: int,
        norm: str = "none",
        hidden: Sequence[int] = (128, 64),
    ) -> None:
        super().__init__()
        sizes = (math.prod(image_shape), *hidden)
        self.stage_channels = tuple(hidden)
        self.hidden = nn.ModuleList(
            nn.Sequential(
                nn.Linear(inputs, outputs, bias=norm == "none"), norm_layer(norm, outputs, dims=1)
            )
            for inputs, outputs in zip(sizes, hidden, strict=False)
        )
        self.classifier = nn.Linear(sizes[-1], num_classes)

    def forward(self, images: Tensor) -> Outputs:
        x = images.flatten(1)
        stages = []
        for layer in self.hidden:
            stages.append(layer(x))
            x = F.relu(stages[-1])
        return Outputs(x, self.classifier(x), tuple(stages))


class SmallCNN(nn.Module):
    """Two 5x5 convolutions, each with max-pool, and a hidden layer of 512, the features.

    Stages: both convolutions (after their norm) and the hidden layer, before their ReLU.
    """

    stage_channels = (32, 64, 512)

    def __init__(
        self, image_shape: tuple[int, int, int], num_classes: int, norm: str = "batch"
    ) -> None:
        super().__init__()
        channels, height, width = image_shape
        self.conv1 = conv_norm(channels, 32, 5, norm)
        self.conv2 = conv_norm(32, 64, 5, norm)
        self.hidden = nn.Linear(64 * (height // 4) * (width // 4), 512)
        self.classifier = nn.Linear(512, num_classes)

    def forward(self, images: Tensor) -> Outputs:
        first = self.conv1(images)
        second = self.conv2(F.max_pool2d(F.relu(first), 2))
        third = self.hidden(F.max_pool2d(F.relu(second), 2).flatten(1))
        features = F.relu(third)
        return Outputs(features, self.classifier(features), (first, second, third))


class Conv4(nn.Module):
    """Four times 3x3 convolution, norm, ReLU, max-pool; features: the last map, flattened.

    256 features at 32x32. Stages: the four convolutions (after their norm), before their ReLU.
    """

    stage_channels = (64, 64, 64, 64)

    def __init__(
        self, image_shape: tuple[int, int, int], num_classes: int, norm: str = "batch"
    ) -> None:
        super().__init__()
        channels, height, width = image_shape
        self.convs = nn.ModuleList(
            conv_norm(inputs, 64, 3, norm) for inputs in (channels, 64, 64, 64)
        )
        self.classifier = nn.Linear(64 * (height // 16) * (width // 16), num_classes)

    def forward(self, images: Tensor) -> Outputs:
        x = images
        stages = []
        for conv in self.convs:
            stages.append(conv(x))
            x = F.max_pool2d(F.relu(stages[-1]), 2)
        features = x.flatten(1)
        return Outputs(features, self.classifier(features), tuple(stages))
