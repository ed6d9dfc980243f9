"""Patterns of everyday code: arithmetic, reductions, products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from networks.patterns.case import Case, case, linear, net, of, param
from networks.patterns.shapes import FLAT, ROWS, TEXT

CASES: dict[str, Case] = {
    "einsum": case(net(lambda self, x: torch.einsum("bti,oi->bto", x, self.w), w=param(5, 8)), TEXT),
    "division_by_a_number": case(
        net(
            lambda self, x: (
                torch.div(self.fc(x), 0.5, rounding_mode="trunc")
                + torch.div((x[:, :5] * 10).long(), 4, rounding_mode="floor")
                + torch.div((x[:, :5] * 10).long(), x.shape[1], rounding_mode="trunc")
            ),
            fc=linear(6, 5),
        ),
        ROWS,
    ),
    "einsum_attention": case(
        net(
            lambda self, x: torch.einsum("b i d, b j d -> b i j", self.q(x), self.k(x)).softmax(-1),
            q=linear(8, 4),
            k=linear(8, 4),
        ),
        TEXT,
    ),
    "einsum_ellipsis": case(
        net(lambda self, x: torch.einsum("...i,ij,j->...", x, self.w, self.v), w=param(8, 4), v=param(4)),
        TEXT,
    ),
    "bmm": case(net(lambda self, x: torch.bmm(self.fc(x), x.transpose(1, 2)), fc=linear(8, 8)), TEXT),
    "matmul_parameter": case(
        net(lambda self, x: (x @ self.w + self.b) @ self.v, w=param(6, 5), b=param(5), v=param(5)), ROWS
    ),
    "matmul_batched_parameter": case(net(lambda self, x: x[:, None] @ self.w, w=param(2, 6, 5)), FLAT),
    "baddbmm": case(
        net(
            lambda self, x: torch.baddbmm(self.b, self.fc(x), x.transpose(1, 2), beta=0.5, alpha=2.0),
            fc=linear(6, 6),
            b=param(1, 4, 4),
        ),
        FLAT,
    ),
    "addmm": case(net(lambda self, x: torch.addmm(self.b, x, self.w), b=param(5), w=param(6, 5)), ROWS),
    "outer": case(
        net(
            lambda self, x: x @ torch.outer(self.a, self.b) + torch.ger(self.a, self.b).sum(),
            a=param(6),
            b=param(5),
        ),
        ROWS,
    ),
    "kron": case(net(lambda self, x: x @ torch.kron(self.a, self.b), a=param(3, 2), b=param(2, 4)), ROWS),
    "tensordot": case(
        net(
            lambda self, x: torch.tensordot(self.fc(x), self.w, dims=([1, 2], [0, 1])),
            fc=linear(6, 5),
            w=param(4, 5, 2),
        ),
        FLAT,
    ),
    "bilinear": case(
        net(lambda self, x, y: self.mix(self.fc(x), y), mix=of(nn.Bilinear, 5, 4, 7), fc=linear(6, 5)),
        ROWS,
        "y=float32[B,4]",
    ),
    "cdist": case(
        net(lambda self, x: torch.cdist(self.fc(x), self.centres), fc=linear(8, 5), centres=param(4, 5)), TEXT
    ),
    "cdist_p1": case(net(lambda self, x: -torch.cdist(x, self.centres, p=1.0), centres=param(4, 8)), TEXT),
    "cosine_similarity": case(
        net(
            lambda self, x: F.cosine_similarity(self.fc(x)[:, None], self.w[None], dim=2),
            fc=linear(6, 5),
            w=param(4, 5),
        ),
        ROWS,
    ),
    "cosine_module": case(
        net(
            lambda self, x, y: self.cos(self.fc(x), self.fc(y)), cos=of(nn.CosineSimilarity), fc=linear(6, 5)
        ),
        ROWS,
        "y=float32[B,6]",
    ),
    "pairwise_distance": case(
        net(lambda self, x, y: F.pairwise_distance(self.fc(x), self.fc(y), keepdim=True), fc=linear(6, 5)),
        ROWS,
        "y=float32[B,6]",
    ),
    "normalize": case(
        net(
            lambda self, x: F.linear(F.normalize(x), F.normalize(self.w)) * self.s.exp(),
            w=param(5, 6),
            s=param(),
        ),
        ROWS,
    ),
    "sums": case(
        net(
            lambda self, x: (self.fc(x).sum(), self.fc(x).mean(), self.fc(x).max(), self.fc(x).prod(1)),
            fc=linear(6, 5),
        ),
        ROWS,
    ),
    "statistics": case(
        net(
            lambda self, x: torch.stack(
                [
                    self.fc(x).std(1),
                    self.fc(x).var(1, unbiased=False),
                    self.fc(x).norm(dim=1),
                    torch.logsumexp(self.fc(x), 1),
                ]
            ),
            fc=linear(8, 5),
        ),
        TEXT,
    ),
    "std_of_all": case(
        net(lambda self, x: (self.fc(x) - self.fc(x).mean()) / (self.fc(x).std() + 1e-3), fc=linear(6, 5)),
        ROWS,
    ),
    "norms_of_matrices": case(
        net(
            lambda self, x: (
                torch.linalg.norm(self.fc(x), dim=(1, 2)),
                torch.linalg.matrix_norm(self.fc(x)),
                self.fc(x).norm(),
            ),
            fc=linear(6, 5),
        ),
        FLAT,
    ),
    "cumulative": case(
        net(lambda self, x: self.fc(x).cumsum(1) + self.fc(x).sigmoid().cumprod(-1), fc=linear(8, 5)), TEXT
    ),
    "topk": case(net(lambda self, x: self.fc(x).topk(2, dim=1), fc=linear(6, 5)), ROWS),
    "sort": case(
        net(
            lambda self, x: torch.sort(self.fc(x), dim=1, descending=True)[0] + self.fc(x).argsort(1),
            fc=linear(8, 5),
        ),
        TEXT,
    ),
    "max_argmax": case(
        net(
            lambda self, x: (
                self.fc(x).max(1).values,
                self.fc(x).argmax(-1),
                self.fc(x).amin((1, 2)),
                self.fc(x).max(dim=-1)[1],
            ),
            fc=linear(8, 5),
        ),
        TEXT,
    ),
    "median_mode": case(
        net(
            lambda self, x: (
                self.fc(x).median(1)[0] + self.fc(x).round().mode(1)[0] + self.fc(x).kthvalue(2, 1)[0]
            ),
            fc=linear(6, 5),
        ),
        ROWS,
    ),
    "truth_values": case(
        net(
            lambda self, x: (
                (self.fc(x) > 0).any(1),
                (self.fc(x) > 0).all(),
                self.fc(x) > self.t,
                torch.isfinite(self.fc(x)),
            ),
            fc=linear(6, 5),
            t=param(5),
        ),
        ROWS,
    ),
    "gather": case(
        net(lambda self, x, ids: self.fc(x).gather(1, ids), fc=linear(6, 5)), ROWS, "ids=int64[B,2]:0..4"
    ),
    "take_along_dim": case(
        net(lambda self, x, ids: torch.take_along_dim(self.fc(x), ids, dim=1), fc=linear(6, 5)),
        ROWS,
        "ids=int64[B,2]:0..4",
    ),
    "take_sorted": case(
        net(lambda self, x: torch.take_along_dim(x, self.fc(x).argsort(1), 1), fc=linear(6, 6)), ROWS
    ),
    "index_select": case(
        net(lambda self, x, ids: torch.index_select(self.fc(x), 1, ids), fc=linear(6, 5)),
        ROWS,
        "ids=int64[2]:0..4",
    ),
    "scatter": case(
        net(lambda self, x, ids: torch.zeros(x.shape[0], 5).scatter(1, ids, self.fc(x)), fc=linear(6, 1)),
        ROWS,
        "ids=int64[B,1]:0..4",
    ),
    "scatter_add": case(
        net(lambda self, x, ids: torch.zeros_like(x).scatter_add_(1, ids, self.fc(x)), fc=linear(6, 4)),
        ROWS,
        "ids=int64[B,4]:0..5",
    ),
    "graph_layer": case(
        net(
            lambda self, x, edges: (
                torch.zeros(x.shape[0], 5).index_add_(0, edges[1], self.fc(x)[edges[0]]).relu()
            ),
            fc=linear(6, 5),
        ),
        "x=float32[9,6]",
        "edges=int64[2,E]:0..8",
        E=(5, 20, 1),
    ),
    "one_hot": case(
        net(lambda self, ids: F.one_hot(ids, 7).float() @ self.w, w=param(7, 4)), "ids=int64[B,T]:0..6"
    ),
    "bucketize": case(
        net(
            lambda self, x: self.table(torch.bucketize(x, self.edges)),
            edges=lambda: torch.linspace(-1, 1, 6),
            table=of(nn.Embedding, 7, 4),
        ),
        ROWS,
    ),
    "searchsorted": case(
        net(
            lambda self, x: torch.searchsorted(self.edges.cumsum(0), self.fc(x).sigmoid()),
            edges=lambda: torch.rand(6) / 4,
            fc=linear(6, 4),
        ),
        ROWS,
    ),
    "where": case(
        net(
            lambda self, x: torch.where(self.fc(x) > 0, self.fc(x), self.slope * x),
            fc=linear(6, 6),
            slope=param(),
        ),
        ROWS,
    ),
    "clamp": case(
        net(
            lambda self, x: self.fc(x).clamp(-0.5, 0.5).clamp_min(self.low).minimum(self.high),
            fc=linear(6, 5),
            low=param(5),
            high=param(),
        ),
        ROWS,
    ),
    "casts": case(
        net(
            lambda self, x: (
                self.fc(x).double().add(self.w).to(x.dtype).type_as(self.w)
                + self.fc(x).int()
                + self.fc(x).bool().float()
            ),
            fc=linear(6, 5),
            w=param(5),
        ),
        ROWS,
    ),
    "bytes_to_floats": case(
        net(
            lambda self, x: self.fc(x.float().div(255).sub(self.mean)),
            fc=linear(6, 5),
            mean=lambda: torch.rand(6),
        ),
        "x=uint8[B,6]:0..255",
    ),
    "powers": case(
        net(
            lambda self, x: self.fc(x).abs().pow(self.p.abs()) + self.fc(x) ** 2 + 2 ** self.fc(x),
            fc=linear(6, 5),
            p=param(),
        ),
        ROWS,
    ),
    "remainders": case(
        net(
            lambda self, x: (
                torch.remainder(self.fc(x), 0.7) + torch.fmod(self.fc(x), self.w) + self.fc(x) // 0.5
            ),
            fc=linear(6, 5),
            w=param(5),
        ),
        ROWS,
    ),
    "lerp_addcmul": case(
        net(
            lambda self, x: (
                torch.lerp(self.fc(x), x, self.t).addcmul(self.a, x, value=0.5).addcdiv(x, self.b.exp())
            ),
            fc=linear(6, 6),
            t=param(),
            a=param(6),
            b=param(6),
        ),
        ROWS,
    ),
    "solve": case(
        net(
            lambda self, x: (
                torch.linalg.solve(self.w @ self.w.mT + 2 * torch.eye(6), x.mT).mT
                + x @ torch.linalg.inv(self.w + 4 * torch.eye(6))
            ),
            w=param(6, 6),
        ),
        ROWS,
    ),
    "cholesky": case(
        net(
            lambda self, x: (
                x @ torch.linalg.cholesky(self.w @ self.w.t() + torch.eye(6)) + torch.linalg.det(self.w)
            ),
            w=param(6, 6),
        ),
        ROWS,
    ),
    "trace": case(
        net(lambda self, x: self.fc(x) * torch.trace(self.w), fc=linear(6, 5), w=param(6, 6)), ROWS
    ),
    "gaussian_log_prob": case(
        net(
            lambda self, x: torch.distributions.Normal(self.fc(x), self.s.exp()).log_prob(x).sum(-1),
            fc=linear(6, 6),
            s=param(6),
        ),
        ROWS,
    ),
    "gumbel_free_sample": case(
        net(lambda self, x: torch.distributions.Categorical(logits=self.fc(x)).entropy(), fc=linear(6, 5)),
        ROWS,
    ),
}
