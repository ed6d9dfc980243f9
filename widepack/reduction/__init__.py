"""Reduces the answers of N members to figures of the ensemble: mean, spread, votes, entropies.

| in | out | start reading |
|---|---|---|
| answers `[N, ...]` and the names of figures | a tensor for each figure | `reduce.py`, `figures.py` |

| file | what it does |
|---|---|
| `block.py` | Holds what figures read of the members' answers: at some positions for all members |
| `figures.py` | Defines the figures: how they are computed, and what they need |
| `partial.py` | Sums up the answers of some of the members, for figures of all of them |
| `positions.py` | Divides the positions of answers into blocks that fit the cache |
| `precision.py` | Decides in which precision figures are computed |
| `reduce.py` | Computes the requested figures of answers, block after block |
| `request.py` | Reads which figures a caller requests, and checks the options |
| `stream.py` | Computes figures while members answer one after the other |
"""
