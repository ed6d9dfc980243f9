"""Reduces the answers of N members to figures of the ensemble: mean, spread, votes, entropies.

| in | out | start reading |
|---|---|---|
| answers `[N, ...]` and the names of figures | a tensor for each figure | `reduce.py`, `figures.py` |

| file | what it does |
|---|---|
| `calibration.py` | Calibrates figures by one fitted number: a temperature, or a factor of the variance |
| `figures.py` | Defines the figures, reads which of them a caller requests, and checks the options |
| `reduce.py` | Computes the requested figures: of all answers at one time, or while members answer |
| `sums.py` | Holds what figures read of the members' answers: of all at some positions, or summed up |
"""
