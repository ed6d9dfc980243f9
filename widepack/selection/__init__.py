"""Chooses members of an ensemble on validation data, with weights, and fits a cascade of them.

| in | out | start reading |
|---|---|---|
| an artifact, a file with inputs and targets | weights, a cascade, a record in the artifact | `select.py` |

| file | what it does |
|---|---|
| `cascade_fit.py` | Fits the threshold of a cascade, and measures what it costs and saves |
| `greedy.py` | Selects members greedily, with replacement |
| `losses.py` | Computes the loss of an ensemble's predictions: error of classes, log loss, squared error |
| `record.py` | Writes what was selected into the artifact |
| `report.py` | Defines the report of a selection |
| `select.py` | Defines `widepack.select` |
| `validation.py` | Runs the members on a validation file, and reads the targets |
"""
