"""Captures one member: it becomes a functional program of ATen ops, with its guards and its state.

torch.export follows the member's code. `patches/` changes torch meanwhile, so that torch.export accepts more
code. `pt2/` reads programs from `.pt2` files, which need no capture.

| in | out | start reading |
|---|---|---|
| one module and an example call | `Captured`: program, inputs, guards, states | `capture.py` |

| file | what it does |
|---|---|
| `attributes.py` | Lists what a member's modules have that is no tensor, as text by path |
| `call.py` | Describes one call of a member: its arguments, tensor by tensor, with a name |
| `capture.py` | Captures one member: its program, guards, constants and calling convention |
| `derivatives.py` | Captures members whose forward takes derivatives, and what stops gradients in them |
| `dynamic_dims.py` | Reads which axes of a sample are dynamic: `dynamic={input: {axis: letter}}` |
| `effects.py` | Finds the side effects of a member in its export by torch.export |
| `example.py` | Makes the example call of a build from input specs, and names the batch |
| `explain.py` | Explains why a member could not be captured: the user's source line, what it does |
| `export.py` | Exports one member with torch.export, as a functional program of ATen ops |
| `export_events.py` | Records what happens inside torch.export while it exports a member |
| `guards.py` | Reads the guards of an exported program: conditions on sizes, each |
| `larger_sample.py` | Repeats the rows of a sample that has one row |
| `literals.py` | Checks that members agree in the tensors whose values their code reads |
| `member_exporter.py` | Exports one member with torch.export, as often as it takes |
| `module_tensors.py` | Finds the tensors that a member holds outside its parameters and buffers |
| `named_fields.py` | Reads the named fields of an input: of a named tuple, or of a registered class |
| `program.py` | Writes a member's export by torch.export as a member program: weights, inputs |
| `reachable.py` | Walks over all that can be reached from a module: attributes, containers, closures |
| `results.py` | Turns what a member returns into forms that torch's pytrees know |
| `row_runs.py` | Checks a program that was captured as if masks select rows |
| `state.py` | Exports the states of a member: how new values leave the program, and |
| `trial.py` | Runs a member that cannot be exported as it is: whether it takes the example, and |
| `unseen_results.py` | Finds results of ops that an export did not see |
"""
