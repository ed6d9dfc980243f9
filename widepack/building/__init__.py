"""Builds an artifact: N checkpoints in, one verified artifact out (`widepack.build`).

`build.py` parses the arguments. `stages.py` runs the stages in order. The work of a stage is
done in `read.py`, `captures.py`, `prove.py` and `write.py`, and in the packages below: `checkpoints`,
`capture`, `simplify`, `planning`, `lowering`, `verification`.

| in | out | start reading |
|---|---|---|
| checkpoints, a factory, input specs | the folder `ens.wide/`; `BuildReport` | `build.py`, `stages.py` |

| file | what it does |
|---|---|
| `artifact_costs.py` | Derives the costs of an entry of an artifact: of one member, or of all |
| `build.py` | Defines `widepack.build`, which fuses checkpoints into an artifact |
| `build_weights.py` | Makes the weights of a build: a row for each weight, and factors of fine-tunes |
| `call_source.py` | Makes the example call of an entry and captures one member with it |
| `captures.py` | Captures the members of one entry, one for each shape signature |
| `costs_file.py` | Derives the costs of the entries of a build, and writes them to the file |
| `entry.py` | Holds what the stages of a build know of one entry: its captures, inputs, dims |
| `members.py` | Makes the members of a build as modules with their weights |
| `model_costs.py` | Derives the costs of a model that has no checkpoints |
| `preview.py` | Previews a build without checkpoints: the member program, and for N members the kinds |
| `prove.py` | Verifies one entry of a build: both comparisons of every program, small sizes |
| `provenance.py` | Records where an artifact comes from: versions, system, date, command, git commit |
| `read.py` | Reads the checkpoints of a build, finds the factory, and aligns the members' weights |
| `report.py` | Defines `BuildReport` and `EntryReport`, and computes reports of entries and fleets |
| `request.py` | Holds the parsed and checked arguments of one build |
| `stages.py` | Runs the stages of a build: read, capture, lower, write, verify, export, publish |
| `state_dicts.py` | Collects and writes what the members' state dicts have beside their tensors |
| `write.py` | Writes the files of a build: stacked weights, programs, and the manifest's rows for them |
"""
