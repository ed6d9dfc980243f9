"""Patterns of everyday code: shapes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from networks.patterns.case import Case, case, chain, linear, net, of, param

FLAT = "x=float32[B,4,6]"
ROWS = "x=float32[B,6]"
IMAGE = "x=float32[B,4,8,6]"
TEXT = "x=float32[B,T,8]"


CASES: dict[str, Case] = {
    "view_batch": case(net(lambda self, x: self.fc(x.view(x.size(0), -1)), fc=linear(24, 5)), FLAT),
    "view_heads": case(
        net(lambda self, x: self.fc(x).view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2), fc=linear(8, 8)),
        TEXT,
    ),
    "flatten": case(net(lambda self, x: self.fc(x.flatten(1)), fc=linear(24, 5)), FLAT),
    "flatten_module": case(
        chain(of(nn.Conv1d, 4, 6, 3), of(nn.Flatten), linear(24, 5)), "input=float32[B,4,6]"
    ),
    "unflatten": case(chain(linear(6, 12), of(nn.Unflatten, 1, (4, 3)), linear(3, 5)), "input=float32[B,6]"),
    "mean": case(net(lambda self, x: self.fc(x).mean(1), fc=linear(8, 5)), TEXT),
    "softmax": case(net(lambda self, x: self.fc(x).softmax(1), fc=linear(6, 5)), ROWS),
    "log_softmax_middle": case(net(lambda self, x: F.log_softmax(self.fc(x), dim=1), fc=linear(8, 5)), TEXT),
    "cat": case(
        net(lambda self, x: torch.cat([x, self.a(x), self.b(x).relu()], 1), a=linear(6, 4), b=linear(6, 5)),
        ROWS,
    ),
    "cat_last_with_shared": case(
        net(lambda self, x: self.fc(torch.cat([x, self.a(x)], dim=-1)), a=linear(8, 4), fc=linear(12, 5)),
        TEXT,
    ),
    "stack_heads": case(
        net(
            lambda self, x: torch.stack([h(x) for h in self.heads], dim=1),
            heads=lambda: nn.ModuleList(nn.Linear(6, 4) for _ in range(2)),
        ),
        ROWS,
    ),
    "first_token": case(
        net(lambda self, x: self.fc(self.mix(x)[:, 0]), mix=linear(8, 8), fc=linear(8, 5)), TEXT
    ),
    "last_token": case(
        net(lambda self, x: self.fc(torch.tanh(self.mix(x))[:, -1, :]), mix=linear(8, 8), fc=linear(8, 5)),
        TEXT,
    ),
    "strided_slice": case(
        net(lambda self, x: self.fc(x)[..., ::2] - self.fc(x)[..., 1::2], fc=linear(6, 8)), ROWS
    ),
    "slices": case(net(lambda self, x: self.fc(x)[:, 1:] - self.fc(x)[:, :-1], fc=linear(8, 5)), TEXT),
    "none_index": case(
        net(lambda self, x: self.fc(x)[:, None] * self.w[None, :, None], fc=linear(6, 5), w=param(4)), ROWS
    ),
    "list_index": case(net(lambda self, x: self.fc(x)[:, [3, 0, 2]], fc=linear(6, 5)), ROWS),
    "two_lists_index": case(net(lambda self, x: self.fc(x)[:, [1, 0, 2], [3, 0, 1]], fc=linear(6, 5)), FLAT),
    "parted_index": case(
        net(lambda self, x: self.conv(x)[:, [0, 2, 1], :, [3, 0, 1]], conv=of(nn.Conv2d, 4, 5, 3)), IMAGE
    ),
    "index_by_input": case(
        net(lambda self, x, rows: self.fc(x)[torch.arange(x.shape[0]), rows], fc=linear(6, 5)),
        FLAT,
        "rows=int64[B]:0..3",
    ),
    "table_by_input": case(
        net(lambda self, ids: self.table[ids] @ self.table.t(), table=param(7, 4)), "ids=int64[B,T]:0..6"
    ),
    "chunk": case(
        net(lambda self, x: (lambda a, b: a * b.sigmoid())(*self.fc(x).chunk(2, dim=-1)), fc=linear(6, 8)),
        ROWS,
    ),
    "split": case(
        net(lambda self, x: [p.exp() for p in self.fc(x).split([2, 3, 4], dim=1)], fc=linear(6, 9)), ROWS
    ),
    "unbind": case(net(lambda self, x: sum(self.fc(x).unbind(1)), fc=linear(6, 5)), FLAT),
    "narrow": case(net(lambda self, x: self.fc(x).narrow(1, 1, 2), fc=linear(6, 5)), FLAT),
    "permute_reshape": case(
        net(
            lambda self, x: self.fc(self.conv(x).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 5)),
            conv=of(nn.Conv2d, 4, 5, 3),
            fc=linear(5, 2),
        ),
        IMAGE,
    ),
    "reshape_minus_one": case(
        net(lambda self, x: self.fc(x.reshape(-1, 8)).reshape(x.shape[0], -1, 5), fc=linear(8, 5)), TEXT
    ),
    "squeeze_unsqueeze": case(
        net(lambda self, x: self.conv(x.unsqueeze(1)).squeeze(1), conv=of(nn.Conv1d, 1, 1, 3)), ROWS
    ),
    "squeeze_everything": case(net(lambda self, x: self.fc(x).squeeze(), fc=linear(6, 1)), ROWS, B=(5, 4, 2)),
    "expand_token": case(
        net(
            lambda self, x: self.fc(torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1)),
            cls=param(1, 1, 8),
            fc=linear(8, 5),
        ),
        TEXT,
    ),
    "expand_as": case(
        net(lambda self, x: self.fc(x).mean(1, keepdim=True).expand_as(x) * x, fc=linear(8, 1)), TEXT
    ),
    "repeat": case(
        net(
            lambda self, x: self.fc(x).repeat(1, 2, 1) + self.w.repeat(x.shape[0], 8, 1),
            fc=linear(6, 5),
            w=param(1, 5),
        ),
        FLAT,
    ),
    "repeat_interleave": case(
        net(lambda self, x: self.fc(x).repeat_interleave(2, dim=1), fc=linear(6, 5)), FLAT
    ),
    "tile": case(
        net(lambda self, x: torch.tile(self.fc(x), (2, 1)) + self.w.tile(8, 1), fc=linear(6, 5), w=param(5)),
        FLAT,
    ),
    "roll_flip": case(
        net(lambda self, x: self.conv(x).roll((1, -2), (2, 3)).flip(-1, 1), conv=of(nn.Conv2d, 4, 5, 3)),
        IMAGE,
    ),
    "rot90": case(
        net(lambda self, x: torch.rot90(self.conv(x), 1, [2, 3]), conv=of(nn.Conv2d, 4, 5, 3)), IMAGE
    ),
    "swapaxes": case(
        net(lambda self, x: self.fc(x).swapaxes(1, 2).swapdims(-1, -2).mT, fc=linear(6, 5)), FLAT
    ),
    "unfold_windows": case(net(lambda self, x: self.fc(x).unfold(1, 2, 1).mean(-1), fc=linear(8, 5)), TEXT),
    "diagonal": case(
        net(
            lambda self, x: torch.diagonal(self.fc(x), dim1=1, dim2=2) + self.fc(x).diagonal(0, -2, -1),
            fc=linear(6, 4),
        ),
        FLAT,
    ),
    "diag_embed": case(
        net(lambda self, x: torch.diag_embed(self.fc(x)) @ self.w, fc=linear(6, 5), w=param(5, 4)), ROWS
    ),
    "tril": case(
        net(lambda self, x: torch.tril(self.fc(x) @ x.transpose(1, 2)).triu(-1), fc=linear(8, 8)), TEXT
    ),
    "stacks": case(
        net(
            lambda self, x: torch.hstack(
                [torch.vstack([self.fc(x), x]), torch.dstack([x, self.fc(x)]).sum(-1).repeat(2, 1)]
            ),
            fc=linear(6, 6),
        ),
        ROWS,
    ),
    "column_stack": case(
        net(lambda self, x: torch.column_stack([self.fc(x).sum(1), self.fc(x)]), fc=linear(6, 5)), ROWS
    ),
    "meshgrid": case(
        net(
            lambda self, x: (
                self.conv(x)
                + self.w
                * torch.stack(torch.meshgrid(torch.arange(8.0), torch.arange(6.0), indexing="ij")).sum(0)
            ),
            conv=of(nn.Conv2d, 4, 1, 1),
            w=param(),
        ),
        IMAGE,
    ),
    "meshgrid_of_weights": case(
        net(
            lambda self, x: x + torch.stack(torch.meshgrid(self.a, self.b, indexing="xy")).sum(0),
            a=param(6),
            b=param(4),
        ),
        FLAT,
    ),
}
