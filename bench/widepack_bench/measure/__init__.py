"""Measures calls: interleaved races, intervals, profiles, rooflines, inputs.

| in | out | start reading |
|---|---|---|
| callables | times, ratios with intervals, a profile | `race.py` |

| file | what it does |
|---|---|
| `answers.py` | Defines the output form of all contestants, and compares two outputs |
| `devices.py` | Measures what this machine can do at most, as a device |
| `figures.py` | Defines the numbers of a row beside times: memory, start-up, the roofline |
| `inputs.py` | Makes inputs for an artifact from its manifest: types, named dims, bounds and guards |
| `levels.py` | Loads the steps from one op after the other to the artifact's plan, each as a model |
| `loading.py` | Loads an artifact on one backend, and returns the wide program that a call runs |
| `processors.py` | Sets the threads and processors of a measurement, and restores them after it |
| `profile.py` | Measures the time of each node: of the wide program, and of the member programs |
| `race.py` | Times contestants on a machine that also does other work, and gives ratios with intervals |
| `roofline.py` | Computes the roofline: counts the work of a wide program's nodes |
"""
