"""A U-Net of two levels (Ronneberger et al. 2015): double convolutions with BatchNorm, downsampling by
maxpool, upsampling by a transposed convolution and bilinearly, skip connections by cat.

Height and width are dynamic multiples of 4. Otherwise a skip would not fit its upsampled partner.
"""

from typing import Any

import torch
from torch import Tensor, nn

from . import generator, trained

N = 3
RECURRENT = False
INPUTS = ["img=float32[B,3,4*H,4*W]", "H=2..64", "W=2..64"]


class Double(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2)
        self.down1 = Double(3, width)
        self.down2 = Double(width, 2 * width)
        self.bottom = Double(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.join2 = Double(4 * width, 2 * width)
        self.up1 = nn.Sequential(
            nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False), nn.Conv2d(2 * width, width, 1)
        )
        self.join1 = Double(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, img: Tensor) -> Tensor:  # [B, 3, 4 H, 4 W]
        a = self.down1(img)  # [B, C, 4 H, 4 W]
        b = self.down2(self.pool(a))  # [B, 2 C, 2 H, 2 W]
        y = self.bottom(self.pool(b))  # [B, 4 C, H, W]
        y = self.join2(torch.cat([b, self.up2(y)], dim=1))
        y = self.join1(torch.cat([a, self.up1(y)], dim=1))
        return self.head(y)  # [B, classes, 4 H, 4 W]


def model(width: int = 8, classes: int = 4) -> nn.Module:
    return UNet(width, classes)


def sample(
    batch: int, seed: int, height: int = 8, width: int = 6
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    return (torch.randn(batch, 3, 4 * height, 4 * width, generator=generator(seed)),), {}


def member(i: int) -> nn.Module:
    return trained(model, 400 + i, [sample(8, 4000 + i)])
