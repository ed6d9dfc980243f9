"""Patterns of everyday code: complex numbers and FFT."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from networks.patterns.case import Case, case, linear, net, of, param
from networks.patterns.shapes import FLAT, IMAGE, ROWS, TEXT


def fourier_layer(self: Any, x: Tensor) -> Tensor:
    f = torch.fft.rfft2(x)
    out = torch.zeros(x.shape[0], 5, 8, 4, dtype=torch.cfloat)
    out[:, :, :2, :2] = torch.einsum("bixy,ioxy->boxy", f[:, :, :2, :2], self.w)
    return torch.fft.irfft2(out, s=(8, 6)) + self.skip(x)


def spectrum(self: Any, x: Tensor) -> Tensor:
    s = torch.stft(self.fc(x), 8, hop_length=4, window=self.window, return_complex=True)
    return torch.istft(
        s * torch.polar(s.abs().clamp(max=3), s.angle() * 0), 8, hop_length=4, window=self.window, length=16
    )


def complex_rotary(self: Any, x: Tensor) -> Tensor:
    q = torch.view_as_complex(self.q(x).unflatten(-1, (4, 2)))
    turn = torch.polar(torch.ones(x.shape[1], 4), torch.outer(torch.arange(x.shape[1]).float(), self.freq))
    return torch.view_as_real(q * turn).flatten(2)


def transforms(self: Any, x: Tensor) -> list[Tensor]:
    y = self.fc(x)
    f = torch.fft.fftn(y, dim=(1, 2))
    return [
        torch.fft.fft(y, dim=1).abs(),
        torch.fft.ifftn(torch.fft.fftshift(f, dim=(1,)), dim=(1, 2)).real,
        torch.fft.ifftshift(torch.fft.rfft(y, norm="ortho")).imag,
        torch.fft.irfft(torch.fft.rfft(y, n=10), n=8),
        torch.fft.hfft(f, dim=-1),
        torch.fft.ihfft(y).real,
        torch.fft.fft2(y).abs().log1p(),
        torch.fft.irfftn(torch.fft.rfftn(y, dim=(1, 2)), s=(4, 8), dim=(1, 2)),
        torch.fft.ifft2(f).real + torch.fft.ifft(f, dim=1).imag,
    ]


def complex_arithmetic(self: Any, x: Tensor) -> list[Tensor]:
    z = torch.complex(self.fc(x), x)
    w = z * self.w.conj() + self.w.abs() - z.conj() / (1 + z.abs())
    return [
        w.real,
        w.imag,
        w.angle(),
        (w @ w.mH).real,
        torch.view_as_real(w),
        torch.vdot(self.w, self.w).real,
        w.exp().resolve_conj().abs(),
        w,
    ]


CASES: dict[str, Case] = {
    "fourier_layer": case(
        net(fourier_layer, w=param(4, 5, 2, 2, dtype=torch.complex64), skip=of(nn.Conv2d, 4, 5, 1)), IMAGE
    ),
    "fourier_filter": case(
        net(
            lambda self, x: torch.fft.irfft2(
                torch.fft.rfft2(x, norm="ortho") * torch.view_as_complex(self.w), s=x.shape[-2:], norm="ortho"
            ),
            w=param(4, 8, 4, 2),
        ),
        IMAGE,
    ),
    "stft": case(net(spectrum, fc=linear(16, 16), window=of(torch.hann_window, 8)), "x=float32[B,16]"),
    "spectrogram": case(
        net(
            lambda self, x: self.fc(
                torch.stft(x, 8, 4, window=self.window, return_complex=True).abs().pow(2).mT
            ),
            fc=linear(5, 4),
            window=of(torch.hann_window, 8),
        ),
        "x=float32[B,4*T]",
    ),
    "complex_rotary": case(
        net(complex_rotary, q=linear(8, 8), freq=lambda: torch.tensor([1.0, 0.3, 0.1, 0.03])), TEXT
    ),
    "transforms": case(net(transforms, fc=linear(6, 8)), FLAT),
    "complex_arithmetic": case(
        net(complex_arithmetic, fc=linear(6, 6), w=param(6, dtype=torch.complex64)), ROWS
    ),
    "complex_input": case(
        net(
            lambda self, x: x @ self.w + self.b,
            w=param(6, 5, dtype=torch.complex64),
            b=param(5, dtype=torch.complex64),
        ),
        "x=complex64[B,6]",
    ),
}
