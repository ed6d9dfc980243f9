"""Defines single members of a loaded model, and replaces them while calls go on: `ens[i]`, `ens.swap`.

| in | out | start reading |
|---|---|---|
| a member's program and weights | `Member`, a plain module | `member.py` |
| a checkpoint | `SwapReport`: the member was replaced | `swap.py`, `new_weights.py`, `weight_exchange.py` |

| file | what it does |
|---|---|
| `member.py` | Defines one member of an artifact as a plain module |
| `new_weights.py` | Checks a checkpoint that replaces a member: its weights, its answers, its extra state |
| `swap.py` | Replaces one member of a loaded model by another checkpoint while calls go on |
| `weight_exchange.py` | Changes one member's weights in bound programs |
"""
