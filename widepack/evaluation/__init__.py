"""Measures how good the members of an ensemble and their mean are, on data with targets.

| in | out | start reading |
|---|---|---|
| an artifact, a file with inputs and targets | a report: each member and the ensemble | `evaluate.py` |

| file | what it does |
|---|---|
| `evaluate.py` | Defines `widepack.evaluate` and its report |
| `calibration_fit.py` | Fits a temperature, or a factor of the variance, and measures it on other rows |
| `class_metrics.py` | Computes accuracy, NLL, Brier score, calibration error, and the AUROC of uncertainty |
| `number_metrics.py` | Computes RMSE, NLL, and the coverage and width of intervals |
| `ranks.py` | Computes ranks with ties: AUROC, and rank correlation |
"""
