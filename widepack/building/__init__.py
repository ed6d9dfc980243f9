"""Builds an artifact: N checkpoints in, one verified artifact out (`widepack.build`).

`build.py` parses the arguments. `stages.py` runs the stages in order. The work of a stage is
done in `read.py`, `captures.py`, `prove.py` and `write.py`, and in the packages below: `checkpoints`,
`capture`, `simplify`, `planning`, `lowering`, `verification`.

| in | out | start reading |
|---|---|---|
| checkpoints, a factory, input specs | the folder `ens.wide/`; `BuildReport` | `build.py`, `stages.py` |

| file | what it does |
|---|---|
| `build.py` | Defines `widepack.build`, which fuses checkpoints into an artifact |
| `build_weights.py` | Makes the weights of a build, and its entries: captures, inputs, dims |
| `captures.py` | Makes the example call of an entry and captures its members, one for each shape signature |
| `costs.py` | Derives the costs of a build, of an artifact, and of a model that has no checkpoints |
| `features.py` | Reads the feature names that a user gives to a build |
| `hyper_parameters.py` | Compares hyperparameters in Lightning's checkpoints with the factory's arguments |
| `preview.py` | Previews a build without checkpoints: the member program, and for N members the kinds |
| `prove.py` | Verifies one entry of a build: both comparisons of every program, small sizes |
| `read.py` | Reads the checkpoints of a build, finds the factory, and aligns the members' weights |
| `report.py` | Defines `BuildReport` and `EntryReport`, and computes reports of entries and fleets |
| `request.py` | Holds the parsed and checked arguments of one build |
| `stages.py` | Runs the stages of a build: read, capture, lower, write, verify, export, publish |
| `write.py` | Writes the files of a build: weights, programs, state dicts, and the manifest's rows |
"""
