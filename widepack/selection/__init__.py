"""Chooses members of an ensemble on validation data, with weights, and fits a cascade of them.

| in | out | start reading |
|---|---|---|
| an artifact, a file with inputs and targets | weights, a cascade, a record in the artifact | `select.py` |

| file | what it does |
|---|---|
| `select.py` | Defines `widepack.select`, its report, and the record that it writes into the artifact |
| `validation.py` | Runs the members on a validation file, and reads and checks the targets |
| `greedy.py` | Selects members greedily, with replacement |
| `cascade_fit.py` | Fits the threshold of a cascade, and measures what it costs and saves |
| `losses.py` | Computes the loss of an ensemble's predictions: error of classes, log loss, squared error |
"""
