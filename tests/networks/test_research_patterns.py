"""Tests patterns of research code in both presets, as test_patterns.py does: routing of experts, tables of
positions, graphs, flows, filters, codebooks.

Some of them are simple for one member but difficult for many: values at positions of a mask that depends on
the members' weights, sizes as numbers of steps, windows by strides, parts of a model in a smaller dtype.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.parametrize as P
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils import parametrizations

from networks.patterns.case import Case, case, chain, linear, net, of, param
from networks.patterns.check import build_case, check_case
from networks.patterns.shapes import FLAT, IMAGE, ROWS, TEXT
from widepack import CaptureError, VerificationError


def t5_bias(self: Any, x: Tensor) -> Any:
    t = x.shape[1]
    rel = torch.arange(t)[None] - torch.arange(t)[:, None]
    n = -rel
    ret = (n < 0).to(torch.long) * 4
    n = n.abs()
    small = n < 2
    large = 2 + (torch.log(n.float().clamp(min=1) / 2) / math.log(16 / 2) * 2).to(torch.long)
    large = torch.min(large, torch.full_like(large, 3))
    ret = ret + torch.where(small, n, large)
    bias = self.table(ret).permute(2, 0, 1).unsqueeze(0)
    q = self.q(x).view(x.shape[0], t, 2, 4).transpose(1, 2)
    return (q @ q.mT + bias).softmax(-1)


def kv_groups(self: Any, x: Tensor, mask: Tensor) -> Any:
    b, t, _ = x.shape
    q = self.q(x).view(b, t, 4, 2).transpose(1, 2)
    k = self.k(x).view(b, t, 2, 2).transpose(1, 2).repeat_interleave(2, dim=1)
    v = self.v(x).view(b, t, 2, 2).transpose(1, 2)[:, :, None].expand(b, 2, 2, t, 2).reshape(b, 4, t, 2)
    s = (q @ k.mT).masked_fill(mask[:, None, None, :], torch.finfo(q.dtype).min)
    return (s.softmax(-1) @ v).transpose(1, 2).contiguous().view(b, t, -1)


def moe_scatter(self: Any, x: Tensor) -> Any:
    g = self.gate(x)
    v, i = g.topk(2, dim=-1)
    gates = torch.full_like(g, float("-inf")).scatter(-1, i, v).softmax(-1)
    y = torch.einsum("bd,edh->beh", x, self.w1).relu()
    y = torch.einsum("beh,ehd->bed", y, self.w2)
    load = torch.zeros(3, dtype=g.dtype).index_add(
        0, i.flatten(), torch.ones_like(i.flatten(), dtype=g.dtype)
    )
    return (torch.einsum("bed,be->bd", y, gates), load)


def moe_gather(self: Any, x: Tensor) -> Any:
    i = self.gate(x).argmax(-1)
    w, b = (self.w1[i], self.b[i])
    return torch.bmm(w, x.unsqueeze(-1)).squeeze(-1) + b


def moe_dispatch(self: Any, x: Tensor) -> Any:
    p = self.gate(x).softmax(-1)
    p1, i1 = p.max(-1)
    m = F.one_hot(i1, 3)
    pos = (torch.cumsum(m, 0) - 1) * m
    m = m * (pos < 2)
    d = m.to(x.dtype).unsqueeze(-1) * F.one_hot(pos.sum(-1).clamp(max=1), 2).to(x.dtype).unsqueeze(1)
    e = torch.einsum("sec,sm->ecm", d, x)
    e = torch.bmm(e, self.w)
    return torch.einsum("ecm,sec->sm", e, d * p1[:, None, None])


def hyper_conv(self: Any, x: Tensor, z: Tensor) -> Any:
    b = x.size(0)
    w = self.h(z).view(b * 5, 4, 3, 3)
    y = F.conv2d(x.reshape(1, b * 4, x.shape[2], x.shape[3]), w, padding=1, groups=b)
    return y.view(b, 5, x.shape[2], x.shape[3])


def demod(self: Any, x: Tensor, z: Tensor) -> Any:
    b, c, h, w = x.shape
    k = self.w[None] * (self.style(z) + 1)[:, None, :, None, None]
    k = k * torch.rsqrt(k.pow(2).sum([2, 3, 4], keepdim=True) + 1e-08)
    x = x.reshape(1, -1, h, w)
    k = k.reshape(b * 5, c, 3, 3)
    return F.conv2d(x, k, padding=1, groups=b).reshape(b, 5, h, w)


def hyper_mlp(self: Any, x: Tensor, z: Tensor) -> Any:
    p = self.h(z)
    w1, b1, w2 = p.split([6 * 4, 4, 4 * 3], dim=-1)
    y = torch.baddbmm(b1.view(-1, 1, 4), x.unsqueeze(1), w1.view(-1, 6, 4)).tanh()
    return torch.matmul(y, w2.reshape(-1, 4, 3)).squeeze(1)


def capsule(self: Any, x: Tensor) -> Any:
    u = torch.einsum("bnd,nmde->bnme", x, self.w)
    logits = torch.zeros(x.shape[0], 4, 3)
    for _ in range(3):
        c = logits.softmax(-1)
        s = (c.unsqueeze(-1) * u).sum(1)
        n = s.norm(dim=-1, keepdim=True)
        v = n**2 / (1 + n**2) * s / (n + 1e-08)
        logits = logits + (u * v.unsqueeze(1)).sum(-1)
    return v.norm(dim=-1)


def ssm_log(self: Any, x: Tensor) -> Any:
    a = -F.softplus(self.a(x))
    la = a.cumsum(1)
    y = self.b(x).exp()
    return (
        torch.exp(la + torch.logcumsumexp(self.b(x) - la, 1)) / (1 + y.cumsum(1)),
        a.flip(1).cumsum(1).flip(1),
    )


def vq(self: Any, x: Tensor) -> Any:
    z = self.enc(x)
    d = torch.cdist(z, self.book.weight[None])
    i = d.argmin(-1)
    q = self.book(i)
    q = z + (q - z).detach()
    return (self.dec(q), i, F.mse_loss(q, z))


def product_q(self: Any, x: Tensor) -> Any:
    z = self.enc(x).view(x.shape[0], 2, 1, 3)
    d = (z - self.books[None]).square().sum(-1)
    i = d.argmin(-1)
    g = torch.gather(
        self.books[None].expand(x.shape[0], -1, -1, -1), 2, i[..., None, None].expand(-1, -1, 1, 3)
    ).squeeze(2)
    return (g.flatten(1), i)


def soft_tree(self: Any, x: Tensor) -> Any:
    p = torch.sigmoid(self.fc(x))
    probs = torch.ones(x.shape[0], 1)
    for level in range(2):
        start = 2**level - 1
        q = p[:, start : start + 2**level]
        probs = torch.stack([probs * q, probs * (1 - q)], 2).reshape(x.shape[0], -1)
    return probs @ self.leaves.softmax(-1)


def pool_masked(self: Any, x: Tensor, mask: Tensor) -> Any:
    s = self.score(x).squeeze(-1).masked_fill((mask.cumprod(1) * (mask.shape[1] - 1)).bool(), float("-inf"))
    w = s.softmax(1).nan_to_num(0.0)
    return torch.einsum("bt,btd->bd", w, x)


def crf(self: Any, x: Tensor, mask: Tensor) -> Any:
    e = self.fc(x)
    a = self.start + e[:, 0]
    for t in range(1, e.shape[1]):
        nxt = torch.logsumexp(a.unsqueeze(2) + self.trans.unsqueeze(0) + e[:, t].unsqueeze(1), dim=1)
        a = torch.where(mask[:, t].unsqueeze(1), nxt, a)
    return torch.logsumexp(a + self.end, dim=1)


def viterbi(self: Any, x: Tensor) -> Any:
    e = self.fc(x)
    s, hist = (self.start + e[:, 0], [])
    for t in range(1, e.shape[1]):
        best, i = (s.unsqueeze(2) + self.trans).max(1)
        s = best + e[:, t]
        hist.append(i)
    tag = s.argmax(1)
    path = [tag]
    for i in reversed(hist):
        tag = i.gather(1, tag.unsqueeze(1)).squeeze(1)
        path.append(tag)
    return torch.stack(path[::-1], 1)


def glow(self: Any, x: Tensor) -> Any:
    w = (
        self.p
        @ (torch.tril(self.l, -1) + torch.eye(6))
        @ (torch.triu(self.u, 1) + torch.diag(self.sgn * self.logs.exp()))
    )
    _, ld = torch.slogdet(w)
    y = x @ w.T
    back = torch.linalg.solve_triangular(
        torch.tril(self.l, -1) * 0.3 + torch.eye(6), y.T, upper=False, unitriangular=True
    ).T
    return (y, ld, back, torch.linalg.det(w), torch.logdet(w @ w.T + torch.eye(6)))


def kalman(self: Any, z: Tensor) -> Any:
    b = z.shape[0]
    m, P = (torch.zeros(b, 3), torch.eye(3).expand(b, 3, 3))
    for t in range(z.shape[1]):
        m, P = (m @ self.A.T, self.A @ P @ self.A.T + torch.diag(self.q.exp()))
        S = self.H @ P @ self.H.T + torch.diag_embed(self.r.exp())
        K = torch.linalg.solve(S, self.H @ P).mT
        m = m + torch.einsum("bij,bj->bi", K, z[:, t] - m @ self.H.T)
        P = (torch.eye(3) - K @ self.H) @ P
    return (m, P, torch.linalg.inv(S), torch.linalg.cholesky(S))


def gp(self: Any, x: Tensor) -> Any:

    def k(a: Tensor, b: Tensor) -> Any:
        return self.var.exp() * torch.exp(-0.5 * torch.cdist(a / self.ls.exp(), b / self.ls.exp()).pow(2))

    Kzz = k(self.z, self.z) + 0.01 * torch.eye(4)
    L = torch.linalg.cholesky(Kzz)
    Kzx = k(self.z, x)
    A = torch.linalg.solve_triangular(L, Kzx, upper=False)
    mean = Kzx.T @ torch.cholesky_solve(self.u[:, None], L)
    return (mean.squeeze(-1), self.var.exp() - (A**2).sum(0))


def shuffle_block(self: Any, x: Tensor) -> Any:
    b, c, h, w = x.shape
    x = x.view(b, 2, c // 2, h, w).transpose(1, 2).contiguous().view(b, -1, h, w)
    a, y = x.chunk(2, 1)
    return torch.cat((a, F.relu(self.bn(self.conv(y)), inplace=True)), 1)


def involution(self: Any, x: Tensor) -> Any:
    b, c, h, w = x.shape
    k = self.span(self.reduce(x).relu()).view(b, 2, 9, h, w).unsqueeze(2)
    p = F.unfold(x, 3, padding=1).view(b, 2, c // 2, 9, h, w)
    return (k * p).sum(3).view(b, c, h, w)


def coord(self: Any, x: Tensor) -> Any:
    b, _, h, w = x.shape
    yy = torch.linspace(-1, 1, h).view(1, 1, h, 1).expand(b, 1, h, w)
    xx = torch.linspace(-1, 1, w).view(1, 1, 1, w).expand(b, 1, h, w)
    return self.conv(torch.cat([x, xx, yy, torch.sqrt(xx**2 + yy**2)], 1))


def dyn_conv(self: Any, x: Tensor) -> Any:
    a = self.att(x.mean((2, 3))).div(30).softmax(-1)
    b, c, h, w = x.shape
    k = torch.mm(a, self.w.view(3, -1)).view(-1, c, 3, 3)
    y = F.conv2d(x.contiguous().view(1, -1, h, w), k, None, 1, 1, groups=b)
    return y.view(b, 5, h, w) + torch.mm(a, self.bias)[:, :, None, None]


def sinkhorn(self: Any, x: Tensor) -> Any:
    s = self.q(x) @ self.k(x).mT
    u, v = (torch.zeros_like(s[..., 0]), torch.zeros_like(s[..., 0, :]))
    for _ in range(4):
        u = -torch.logsumexp(s + v.unsqueeze(-2), -1)
        v = -torch.logsumexp(s + u.unsqueeze(-1), -2)
    return (s + u.unsqueeze(-1) + v.unsqueeze(-2)).exp()


def shifted_window(self: Any, x: Tensor) -> Any:
    b, h, w, c = x.shape
    y = torch.roll(x, (-1, -1), (1, 2))
    m = torch.zeros(1, h, w, 1)
    cnt = 0
    for hs in (slice(0, -2), slice(-2, -1), slice(-1, None)):
        for ws in (slice(0, -2), slice(-2, -1), slice(-1, None)):
            m[:, hs, ws, :] = cnt
            cnt += 1

    def part(t: Tensor) -> Any:
        return (
            t.view(t.shape[0], h // 2, 2, w // 2, 2, -1).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, t.shape[-1])
        )

    mw = part(m).squeeze(-1)
    am = mw.unsqueeze(1) - mw.unsqueeze(2)
    am = am.masked_fill(am != 0, -100.0).masked_fill(am == 0, 0.0)
    win = part(y)
    q, k, v = self.qkv(win).reshape(-1, 4, 3, 2, c // 2).permute(2, 0, 3, 1, 4).unbind(0)
    a = q @ k.transpose(-2, -1)
    a = a + self.table[self.index.view(-1)].view(4, 4, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
    a = a.view(-1, h // 2 * (w // 2), 2, 4, 4) + am.unsqueeze(1).unsqueeze(0)
    o = (a.view(-1, 2, 4, 4).softmax(-1) @ v).transpose(1, 2).reshape(-1, 4, c)
    o = o.view(b, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
    return torch.roll(o, (1, 1), (1, 2))


def swin_index() -> Any:
    c = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")).flatten(1)
    r = (c[:, :, None] - c[:, None, :]).permute(1, 2, 0) + 1
    return r[..., 0] * 3 + r[..., 1]


def message(self: Any, x: Tensor, edges: Tensor) -> Any:
    src, dst = edges
    n = x.shape[0]
    m = self.msg(torch.cat([x[src], x[dst]], -1)).relu()
    agg = torch.zeros(n, m.shape[-1]).index_add_(0, dst, m)
    deg = torch.zeros(n).scatter_add_(0, dst, torch.ones(dst.shape[0])).clamp(min=1)
    e = torch.full((n, m.shape[-1]), 0.0).scatter_reduce(
        0, dst[:, None].expand_as(m), m, "amax", include_self=False
    )
    f = torch.zeros_like(agg).index_reduce(0, dst, m, "mean")
    g = torch.ones_like(agg).scatter_reduce(0, dst[:, None].expand_as(m), m + 0.5, reduce="prod")
    return self.up(torch.cat([x, agg / deg[:, None], e, f, g], -1))


def gat(self: Any, x: Tensor, edges: Tensor) -> Any:
    src, dst = (edges[0], edges[1])
    h = self.w(x)
    e = F.leaky_relu((h * self.a1).sum(-1)[src] + (h * self.a2).sum(-1)[dst], 0.2)
    mx = torch.full((x.shape[0],), -torch.inf).scatter_reduce_(0, dst, e, reduce="amax")
    p = (e - mx[dst]).exp()
    z = torch.zeros(x.shape[0]).index_add(0, dst, p)
    return torch.zeros_like(h).index_add(0, dst, (p / (z[dst] + 1e-16)).unsqueeze(-1) * h[src])


def sparsemax(self: Any, x: Tensor) -> Any:
    z = self.fc(x)
    s, _ = torch.sort(z, dim=-1, descending=True)
    c = s.cumsum(-1) - 1
    r = torch.arange(1, z.size(-1) + 1, dtype=z.dtype)
    k = (r * s > c).sum(-1, keepdim=True)
    tau = c.gather(-1, k - 1) / k.to(z.dtype)
    return torch.clamp(z - tau, min=0)


def entmax15(self: Any, x: Tensor) -> Any:
    z = self.fc(x) / 2
    z = z - z.max(-1, keepdim=True).values
    s = z.sort(-1, descending=True).values
    rho = torch.arange(1, z.shape[-1] + 1, dtype=z.dtype).view(1, -1)
    mean = s.cumsum(-1) / rho
    msq = (s**2).cumsum(-1) / rho
    delta = (1 - rho * (msq - mean**2)) / rho
    tau = mean - torch.sqrt(torch.clamp(delta, 0))
    sup = (tau <= s).sum(-1, keepdim=True)
    return torch.clamp(z - tau.gather(-1, sup - 1), min=0) ** 2


def complex_net(self: Any, x: Tensor) -> Any:
    z = torch.complex(self.re(x), self.im(x))
    z = z @ self.w
    z = torch.polar(F.relu(z.abs() - self.b.abs()), z.angle())
    return (torch.cat([z.real, z.imag], -1), torch.view_as_real(z * z.conj()).sum(-1))


def fno(self: Any, x: Tensor) -> Any:
    b, _c, h, w = x.shape
    xf = torch.fft.rfft2(x)
    out = torch.zeros(b, 5, h, w // 2 + 1, dtype=torch.cfloat)
    out[:, :, :2, :2] = torch.einsum("bixy,ioxy->boxy", xf[:, :, :2, :2], self.w1)
    out[:, :, -2:, :2] = torch.einsum("bixy,ioxy->boxy", xf[:, :, -2:, :2], torch.view_as_complex(self.w2))
    return torch.fft.irfft2(out, s=(h, w)) + self.skip(x)


def mel(self: Any, x: Tensor) -> Any:
    s = torch.stft(x, 8, 4, 8, window=self.win, return_complex=True)
    m = self.fb @ s.abs().pow(2)
    return (self.conv(torch.log10(m.clamp(min=1e-05))), (m + 0.001).log().transpose(1, 2) @ self.dct)


def parametrized(*ps: Any) -> Any:

    def make() -> Any:
        m = nn.Linear(6, 6)
        for p in ps:
            P.register_parametrization(m, "weight", p())
        return m

    return make


class Skew(nn.Module):
    def forward(self, w: Tensor) -> Any:
        a = w.triu(1)
        return a - a.T


class Exp(nn.Module):
    def forward(self, a: Tensor) -> Any:
        return torch.matrix_exp(a)


def ortho(map_: Any) -> Any:
    return lambda: parametrizations.orthogonal(nn.Linear(6, 5), orthogonal_map=map_)


def columns(self: Any, x: Tensor) -> Any:
    w = self.w / self.w.norm(dim=0, keepdim=True).clamp_min(1e-06)
    s = torch.diag(F.softplus(self.s))
    h = torch.eye(6) - 2 * torch.outer(self.v, self.v) / self.v.dot(self.v)
    return x @ h @ w @ s


class Tracker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 5)
        self.ema: Tensor
        self.scratch: Tensor
        self.steps: Any
        self.register_buffer("ema", torch.zeros(5))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("scratch", torch.ones(5), persistent=False)

    def forward(self, x: Tensor) -> Any:
        y = self.fc(x)
        if self.training:
            self.ema.mul_(0.9).add_(y.mean(0), alpha=0.1)
            self.steps += 1
        return (y - self.ema) * self.scratch / (1 + self.steps)


def pdict(self: Any, x: Tensor) -> Any:
    return {k: x @ self.p[k] + self.p[f"{k[0]}b"] for k in ("aw", "cw")} | {"l": sum(q.sum() for q in self.l)}


def lazy() -> Any:
    m = nn.Sequential(nn.LazyConv1d(5, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))
    m(torch.zeros(1, 4, 6))
    return m


def fcall(self: Any, x: Tensor) -> Any:
    d = {"weight": self.w * self.m, "bias": self.b}
    return functional_call(self.fc, d, (x,))


def vm(self: Any, x: Tensor) -> Any:
    return vmap(lambda a: torch.outer(self.fc(a), a).sum(0) @ self.w)(x)


def double_mask(self: Any, x: Tensor) -> Any:
    y = self.fc(x)
    y[y > 0.5] *= 2
    y[y < self.t] = -1.0
    y[:, self.keep] += 1.5
    return y


def own_mask_rows(self: Any, x: Tensor) -> Any:
    y = self.fc(x)
    m = self.w.abs().sum(1) > 2.0
    y[:, m] *= 3
    return y


def mask_two(self: Any, x: Tensor) -> Any:
    y = self.fc(x)
    m = y.sum(-1) > 0
    y[m] = y[m].relu() + self.b
    return y


def mask_values(self: Any, x: Tensor) -> Any:
    y = self.fc(x)
    m = y > 0
    y[m] = x[:, :5][m] * 0.5
    return y


def strided(self: Any, x: Tensor) -> Any:
    h = self.fc(x)
    b, t, d = h.shape
    w = h.as_strided((b, t - 2, 3 * d), (t * d, d, 1))
    return self.out(w)


def strided1(self: Any, x: Tensor) -> Any:
    b, t = x.shape
    h = x * self.w
    return h.as_strided((b, t - 3, 4), (t, 1, 1)) @ self.v


def chunk_windows(self: Any, x: Tensor) -> Any:
    b, t, _d = x.shape
    x = self.fc(x).view(b, torch.div(t, 4, rounding_mode="trunc"), 4, 5)
    size = list(x.size())
    size[1] = size[1] * 2 - 1
    stride = list(x.stride())
    stride[1] = stride[1] // 2
    return x.as_strided(size=size, stride=stride)


def skew(self: Any, x: Tensor) -> Any:
    q = self.q(x) @ self.r.T
    b, t, n = q.shape
    p = F.pad(q, (1, 0)).view(b, n + 1, t)[:, 1:].view(b, t, n)
    return p.softmax(-1)


def adain(self: Any, x: Tensor, y: Tensor) -> Any:
    c = self.conv(x)
    s = self.conv(y)
    m, v = (c.mean((2, 3), keepdim=True), c.var((2, 3), keepdim=True))
    return (c - m) / (v + 1e-05).sqrt() * s.std((2, 3), keepdim=True) + s.mean((2, 3), keepdim=True)


def mdn(self: Any, x: Tensor) -> Any:
    p, m, s = self.fc(x).split([2, 4, 4], 1)
    mix = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(logits=p),
        torch.distributions.Independent(
            torch.distributions.Normal(m.view(-1, 2, 2), s.view(-1, 2, 2).exp()), 1
        ),
    )
    return (mix.mean, mix.log_prob(x[:, :2]))  # type: ignore[no-untyped-call]


def mvn(self: Any, x: Tensor) -> Any:
    L = torch.zeros(x.shape[0], 3, 3)
    i = torch.tril_indices(3, 3)
    L[:, i[0], i[1]] = self.fc(x)
    L = L.tril(-1) + torch.diag_embed(F.softplus(L.diagonal(dim1=-2, dim2=-1)))
    d = torch.distributions.MultivariateNormal(torch.zeros(3), scale_tril=L)
    return (d.log_prob(x[:, :3]), d.entropy(), L @ L.mT)  # type: ignore[no-untyped-call]


def eig(self: Any, x: Tensor) -> Any:
    a = self.fc(x).view(-1, 3, 3)
    s = a @ a.mT + torch.eye(3)
    w, _v = torch.linalg.eigh(s)
    return (
        w,
        torch.linalg.svdvals(a),
        torch.linalg.pinv(s),
        torch.linalg.matrix_power(s, 2),
        torch.linalg.matrix_exp(a),
    )


def masked_losses(self: Any, x: Tensor, y: Tensor, labels: Tensor, mask: Tensor) -> Any:
    p = self.fc(x)
    m = mask & (p.sum(-1) < 3.0)
    return {
        "mse": F.mse_loss(p[m], y[m]),
        "sum": F.l1_loss(p[m], y[m], reduction="sum"),
        "mean": p[m].mean(),
        "rows": p[m].mean(0),
        "keep": p[m].sum(0, keepdim=True),
        "both": p[m].square().mean((0, 1), keepdim=True),
        "select": torch.masked_select(p, p > 0).sum(),
        "nll": -p.log_softmax(-1)[m].amax(-1).mean(),
        "huber": F.smooth_l1_loss(p[m], y[m], beta=0.5),
        "acc": (p[m].argmax(-1) == labels[m]).float().mean(),
    }


def in_masked_loss(self: Any, x: Tensor, labels: Tensor, mask: Tensor) -> Any:
    p = self.fc(x)
    return (
        (p[mask].log_softmax(-1) * F.one_hot(labels, 5)[mask]).sum(-1).mean(),
        F.layer_norm(p[mask], (5,)).abs().mean(0),
        (p[mask] - self.c).square().sum(-1).mean(),
        p[mask].softmax(-1).mean(0),
    )


def experts(self: Any, x: Tensor) -> Any:
    i = self.gate(x).argmax(-1)
    y = torch.zeros_like(x)
    for k, e in enumerate(self.experts):
        m = i == k
        y[m] += e(x[m]) * self.s[k]
    return y


def by_columns(self: Any, x: Tensor) -> Any:
    y = self.fc(x)
    m = y.mean((0, 2)) > 0
    z = y[:, m]
    y[:, m] = z * z.softmax(-1) + y.mean(1, keepdim=True)
    return (y, z.sum(1), z.exp().sum((0, 1)))


def scattered(self: Any, x: Tensor) -> Any:
    y = self.fc(x)
    m = y > self.t
    return (
        y.masked_scatter(m, torch.tanh(y[m]) * 2),
        torch.where(m, y, torch.zeros(())).sum() + torch.masked_select(y, m).tanh().sum(),
    )


def mixtral(self: Any, x: Tensor) -> Any:
    b, t, d = x.shape
    h = x.view(-1, d)
    w, sel = torch.topk(self.gate(h).softmax(-1), 2, dim=-1)
    w = w / w.sum(-1, keepdim=True)
    out = torch.zeros_like(h)
    mask = F.one_hot(sel, 3).permute(2, 1, 0)
    for e in range(3):
        idx, top = torch.where(mask[e])
        cur = h[None, top].reshape(-1, d)
        out.index_add_(0, top, self.experts[e](cur) * w[top, idx, None])
    return out.view(b, t, d)


def nonzero_rows(self: Any, x: Tensor) -> Any:
    y = self.fc(x)
    i = (y.sum(-1) > 0).nonzero().squeeze(-1)
    y[i] = y[i] * 2 + self.b
    z = torch.zeros_like(y)
    k = (y.sum(-1) > 0).nonzero(as_tuple=True)[0]
    z[k] = y[k].relu()
    return (y.index_add(0, i, self.fc(x)[i].tanh()), z)


class Attn(nn.Module):
    def __init__(s, dt: torch.dtype) -> None:
        super().__init__()
        s.qkv = nn.Linear(8, 24)
        s.o = nn.Linear(8, 8)
        s.dt = dt

    def forward(s, x: Tensor) -> Any:
        q, k, v = s.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        return s.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Island(nn.Module):
    def __init__(s, dt: torch.dtype) -> None:
        super().__init__()
        s.a = nn.Linear(8, 8)
        s.attn = Attn(dt).to(dt)
        s.n = nn.LayerNorm(8)
        s.out = nn.Linear(8, 5)
        s.dt = dt

    def forward(s, x: Tensor) -> Any:
        x = s.n(s.a(x))
        x = x + s.attn(x.to(s.dt)).float()
        return s.out(x)


def island(dt: torch.dtype) -> Any:
    return lambda: Island(dt)


class Whole(nn.Module):
    def __init__(s, dt: torch.dtype) -> None:
        super().__init__()
        s.net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 5)).to(dt)
        s.dt = dt

    def forward(s, x: Tensor) -> Any:
        return s.net(x.to(s.dt))


class Conv(nn.Module):
    def __init__(s, dt: torch.dtype) -> None:
        super().__init__()
        s.c = nn.Conv2d(4, 6, 3, padding=1)
        s.b = nn.BatchNorm2d(6)
        s.d = nn.Conv2d(6, 5, 3).to(dt)
        s.dt = dt

    def forward(s, x: Tensor) -> Any:
        return s.d(F.relu(s.b(s.c(x))).to(s.dt)).float().mean((2, 3))


CASES: dict[str, Case] = {
    "t5_buckets": case(net(t5_bias, q=linear(8, 8), table=of(nn.Embedding, 8, 2)), TEXT),
    "kv_groups": case(net(kv_groups, q=linear(8, 8), k=linear(8, 4), v=linear(8, 4)), TEXT, "mask=bool[B,T]"),
    "experts_scattered_gates": case(
        net(moe_scatter, gate=linear(6, 3), w1=param(3, 6, 4), w2=param(3, 4, 6)), ROWS
    ),
    "experts_gathered": case(net(moe_gather, gate=linear(6, 3), w1=param(3, 5, 6), b=param(3, 5)), ROWS),
    "experts_capacity": case(net(moe_dispatch, gate=linear(6, 3), w=param(3, 6, 5)), ROWS),
    "hyper_conv": case(net(hyper_conv, h=linear(6, 180)), IMAGE, "z=float32[B,6]"),
    "modulated_conv": case(net(demod, w=param(5, 4, 3, 3), style=linear(6, 4)), IMAGE, "z=float32[B,6]"),
    "hyper_mlp": case(net(hyper_mlp, h=linear(5, 40)), ROWS, "z=float32[B,5]"),
    "capsules": case(net(capsule, w=param(4, 3, 6, 5)), FLAT),
    "ssm_log_scan": case(net(ssm_log, a=linear(8, 5), b=linear(8, 5)), TEXT),
    "vq": case(net(vq, enc=linear(8, 4), book=of(nn.Embedding, 6, 4), dec=linear(4, 5)), TEXT),
    "product_quantisation": case(net(product_q, enc=linear(6, 6), books=param(2, 5, 3)), ROWS),
    "soft_tree": case(net(soft_tree, fc=linear(6, 3), leaves=param(4, 5)), ROWS),
    "pool_all_masked": case(net(pool_masked, score=linear(8, 1)), TEXT, "mask=int64[B,T]:0..1"),
    "crf": case(
        net(crf, fc=linear(6, 5), start=param(5), trans=param(5, 5), end=param(5)), FLAT, "mask=bool[B,4]"
    ),
    "viterbi": case(net(viterbi, fc=linear(6, 5), start=param(5), trans=param(5, 5)), FLAT),
    "glow": case(
        net(
            glow,
            p=lambda: torch.eye(6)[torch.randperm(6)],
            l=param(6, 6),
            u=param(6, 6),
            sgn=lambda: torch.randn(6).sign(),
            logs=param(6),
        ),
        ROWS,
    ),
    "kalman": case(net(kalman, A=param(3, 3), H=param(2, 3), q=param(3), r=param(2)), "z=float32[B,3,2]"),
    "gp": case(net(gp, z=param(4, 6), ls=param(6), var=param(), u=param(4)), ROWS),
    "shuffle_block": case(
        net(shuffle_block, conv=of(nn.Conv2d, 2, 2, 3, padding=1, groups=2), bn=of(nn.BatchNorm2d, 2)), IMAGE
    ),
    "involution": case(net(involution, reduce=of(nn.Conv2d, 4, 3, 1), span=of(nn.Conv2d, 3, 18, 1)), IMAGE),
    "coord_conv": case(net(coord, conv=of(nn.Conv2d, 7, 5, 3)), "x=float32[B,4,H,W]"),
    "dynamic_conv": case(net(dyn_conv, att=linear(4, 3), w=param(3, 5, 4, 3, 3), bias=param(3, 5)), IMAGE),
    "sinkhorn": case(net(sinkhorn, q=linear(8, 4), k=linear(8, 4)), TEXT),
    "shifted_window": case(
        net(shifted_window, qkv=linear(4, 12), table=param(9, 2), index=swin_index), "x=float32[B,4,6,4]"
    ),
    "messages": case(
        net(message, msg=linear(12, 4), up=linear(6 + 16, 5)),
        "x=float32[V,6]",
        "edges=int64[2,E]:0..3",
        V=(7, 12, 4),
        E=(9, 3, 20),
    ),
    "gat": case(
        net(gat, w=linear(6, 4), a1=param(4), a2=param(4)),
        "x=float32[V,6]",
        "edges=int64[2,E]:0..3",
        V=(7, 12, 4),
        E=(9, 3, 20),
    ),
    "sparsemax": case(net(sparsemax, fc=linear(6, 5)), ROWS),
    "entmax15": case(net(entmax15, fc=linear(6, 5)), ROWS),
    "complex_net": case(
        net(complex_net, re=linear(6, 4), im=linear(6, 4), w=param(4, 3, dtype=torch.complex64), b=param(3)),
        ROWS,
    ),
    "fno": case(
        net(
            fno,
            w1=param(4, 5, 2, 2, dtype=torch.complex64),
            w2=param(4, 5, 2, 2, 2),
            skip=of(nn.Conv2d, 4, 5, 1),
        ),
        IMAGE,
    ),
    "mel": case(
        net(
            mel,
            win=lambda: torch.hann_window(8),
            fb=lambda: torch.rand(3, 5),
            dct=lambda: torch.randn(3, 2),
            conv=of(nn.Conv1d, 3, 4, 3, padding=1),
        ),
        "x=float32[B,32]",
    ),
    "exp_weights": case(chain(parametrized(Skew, Exp)), "input=float32[B,6]"),
    "orthogonal_householder": case(chain(ortho("householder")), "input=float32[B,6]"),
    "weight_columns": case(net(columns, w=param(6, 4), s=param(4), v=param(6)), ROWS),
    "train_buffers": case(Tracker, ROWS),
    "parameter_dict": case(
        net(
            pdict,
            p=lambda: nn.ParameterDict(
                {
                    k: torch.randn(6, 3) if k.endswith("w") else torch.randn(3)
                    for k in ("aw", "ab", "cw", "cb")
                }
            ),
            l=lambda: nn.ParameterList(torch.randn(2) for _ in range(2)),
        ),
        ROWS,
    ),
    "lazy": case(lazy, "input=float32[B,4,6]"),
    "functional_call": case(
        net(fcall, fc=linear(6, 5), w=param(5, 6), m=lambda: (torch.randn(5, 6) > 0).float(), b=param(5)),
        ROWS,
    ),
    "vmap": case(net(vm, fc=linear(6, 4), w=param(6, 5)), ROWS),
    "own_masks_times": case(
        net(double_mask, fc=linear(6, 5), t=param(5), keep=lambda: torch.randn(5) > 0), ROWS
    ),
    "weight_mask_times": case(net(own_mask_rows, fc=linear(6, 5), w=param(5, 6)), ROWS),
    "mask_rows_read": case(net(mask_two, fc=linear(8, 5), b=param(5)), TEXT),
    "mask_values_read": case(net(mask_values, fc=linear(6, 5)), ROWS),
    "as_strided_windows": case(net(strided, fc=linear(8, 4), out=linear(12, 5)), TEXT, "T=3..40"),
    "as_strided_1d": case(net(strided1, w=param(), v=param(4, 5)), "x=float32[B,T]", "T=4..40"),
    "overlapping_chunks": case(net(chunk_windows, fc=linear(8, 5)), "x=float32[B,4*C,8]"),
    "relative_shift": case(net(skew, q=linear(8, 4), r=param(7, 4)), "x=float32[B,7,8]"),
    "adain": case(net(adain, conv=of(nn.Conv2d, 4, 5, 3)), IMAGE, "y=float32[B,4,8,6]"),
    "mixture_density": case(net(mdn, fc=linear(6, 10)), ROWS),
    "multivariate_normal": case(net(mvn, fc=linear(6, 6)), ROWS),
    "spectra": case(net(eig, fc=linear(6, 9)), ROWS),
    "masked_losses": case(
        net(
            lambda self, x, y, labels: masked_losses(self, x, y, labels, x[:, 0] < 9),
            fc=linear(6, 5),
            by=lambda: torch.linspace(0.5, 1.5, 5),
        ),
        ROWS,
        "y=float32[B,5]",
        "labels=int64[B]:0..4",
    ),
    "losses_of_masked_input": case(
        net(in_masked_loss, fc=linear(8, 5), c=param(5)), TEXT, "labels=int64[B,T]:0..4", "mask=bool[B,T]"
    ),
    "experts_by_masks": case(
        net(
            experts,
            gate=linear(6, 3),
            experts=lambda: nn.ModuleList(nn.Linear(6, 6) for _ in range(3)),
            s=param(3),
        ),
        ROWS,
    ),
    "masked_columns": case(net(by_columns, fc=linear(6, 5)), FLAT, B=(20, 5, 1)),
    "masked_scatter_back": case(net(scattered, fc=linear(8, 5), t=param(5)), TEXT),
    "mixtral": case(
        net(mixtral, gate=linear(8, 3), experts=lambda: nn.ModuleList(nn.Linear(8, 8) for _ in range(3))),
        TEXT,
    ),
    "nonzero_rows": case(net(nonzero_rows, fc=linear(6, 5), b=param(5)), ROWS),
    "bf16_island": case(island(torch.bfloat16), TEXT),
    "fp16_island": case(island(torch.float16), TEXT),
    "fp16_whole": case(lambda: Whole(torch.float16), TEXT),
    "bf16_conv": case(lambda: Conv(torch.bfloat16), IMAGE),
}

QUICK = {
    "mixtral",
    "sinkhorn",
    "vq",
    "nonzero_rows",
    "bf16_island",
    "gat",
}  # the default suite has one case of each sort


@pytest.mark.extended(keep=2)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in CASES]
)
def test_every_member_answers_as_alone(name: str, tmp_path: Path) -> None:
    check_case(CASES[name], tmp_path, set())


def slope(self: Any, x: Tensor) -> Any:
    with torch.enable_grad():
        x = x.detach().requires_grad_(True)
        return torch.autograd.grad(torch.tanh(self.fc(x)).sum(), x)[0]


@pytest.mark.extended
def test_a_derivative_inside_forward_is_captured(tmp_path: Path) -> None:
    check_case(case(net(slope, fc=linear(6, 5)), ROWS), tmp_path, set())


REFUSED: dict[str, tuple[Case, type[Exception], str]] = {
    "bits_of_floats": (
        case(net(lambda self, x: self.conv(x).view(torch.int32), conv=of(nn.Conv2d, 4, 5, 3)), IMAGE),
        VerificationError,
        "Integers are computed from the bits of floats (",
    ),
    "strides_of_a_view": (
        case(net(lambda self, x: self.fc(x).t().as_strided((2, 2), (1, 1)), fc=linear(6, 5)), ROWS),
        CaptureError,
        "as_strided of a view reads memory that the view does not show; call .contiguous() before it",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_patterns_are_refused_with_a_message(name: str, tmp_path: Path) -> None:
    refused, error, words = REFUSED[name]
    with pytest.raises(error) as caught:
        build_case(refused, tmp_path)
    assert words in str(caught.value)
    assert not (tmp_path / "e.wide").exists()
