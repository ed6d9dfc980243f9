"""Runs contestants in their own process: cold starts, private memory, a clean allocator.

| in | out | start reading |
|---|---|---|
| a function of this package by name, JSON arguments | its JSON result | `fresh.py` |

| file | what it does |
|---|---|
| `child.py` | Runs one contestant in its own process |
| `contestant.py` | Measures peak memory and start-up: each contestant runs in its own process |
| `fresh.py` | Runs a function of this package in its own process |
| `row_runner.py` | Runs the rows of a suite into one JSON document, which a later run continues |
"""
