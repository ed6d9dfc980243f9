"""The commands of `widepack`, one in each file, imported when it is called.

`main.py` has the table of the commands.

| file | what it does |
|---|---|
| `advise.py` | `widepack advise`: finds what would make calls of an artifact faster, and tries it |
| `analyze.py` | `widepack analyze`: shows what a call of a model costs, as formulas and as numbers |
| `analyze_model.py` | Derives the costs of a model, or of an artifact that does not have them |
| `append.py` | `widepack append`: adds members to an artifact |
| `bench.py` | `widepack bench`: times an artifact beside its members without widepack |
| `bench_layers.py` | `widepack bench-layers`: layers of torch.nn and reference blocks |
| `bench_suite.py` | `widepack bench-suite`: the reference networks with random weights, wide |
| `build.py` | `widepack build`: turns checkpoints into an artifact |
| `calibrate.py` | `widepack calibrate`: measures what kernels take on this machine |
| `compile.py` | `widepack compile`: compiles the programs of an artifact |
| `demo.py` | `widepack demo`: eight classifiers from training to an answer, by the commands |
| `demo_model.py` | A small classifier of handwritten digits (8 x 8 pixels, from scikit-learn) |
| `drop.py` | `widepack drop`: removes members from an artifact |
| `evaluate.py` | `widepack evaluate`: measures the members and the ensemble on data with targets |
| `export.py` | `widepack export`: writes an artifact as ONNX or torch.export program |
| `extract.py` | `widepack extract`: writes the weights of one member to a checkpoint |
| `info.py` | `widepack info`: shows versions and devices, for example for a bug report |
| `inspect.py` | `widepack inspect`: shows what an artifact contains, from its manifest |
| `predict.py` | `widepack predict`: runs an artifact over the rows of a file |
| `primitives.py` | `widepack primitives`: lists the ops that run wide and their strategies |
| `select.py` | `widepack select`: chooses members and a cascade on validation data |
| `selftest.py` | `widepack selftest`: checks widepack's answers on this machine |
| `serve.py` | `widepack serve`: answers inference requests over HTTP and gRPC |
| `trace.py` | `widepack trace`: shows how each op of the member runs for all members |
| `trace_model.py` | Traces a model before any build: `widepack trace --model M --input S` |
| `tune.py` | `widepack tune`: measures plans on this machine and keeps the fastest |
| `update.py` | `widepack update`: replaces members of an artifact by other checkpoints |
| `verify.py` | `widepack verify`: checks the files and the answers of an artifact |
"""
