"""Captures one member: it becomes a functional program of ATen ops, with its guards and its state.

torch.export follows the member's code. `patches/` changes torch meanwhile, so that torch.export accepts more
code. `pt2/` reads programs from `.pt2` files, which need no capture.

| in | out | start reading |
|---|---|---|
| one module and an example call | `Captured`: program, inputs, guards, states | `capture.py` |

| file | what it does |
|---|---|
| `attributes.py` | Lists the attributes of a member that are not tensors, as text by path |
| `call.py` | Describes one call of a member: its arguments, tensor by tensor, with named dims |
| `capture.py` | Captures one member: its program, guards, constants and calling convention |
| `derivatives.py` | Captures members whose forward takes derivatives |
| `effects.py` | Finds the side effects of a member in its export by torch.export |
| `example.py` | Makes the example call of a build, and reads a user's sample with its dynamic axes |
| `explain.py` | Explains why a member could not be captured: the user's source line, what to write instead |
| `export.py` | Exports one member with torch.export, as a functional program of ATen ops |
| `exported.py` | Provides edits of exported graphs, and what they read |
| `guards.py` | Reads the guards of an exported program |
| `named_fields.py` | Reads the named fields of inputs and results |
| `program.py` | Writes a member's export by torch.export as a member program |
| `reachable.py` | Walks over all that can be reached from a module, and finds its tensors |
| `state.py` | Holds an exported member, and matches its states with their new values |
| `trial.py` | Runs a member outside of an export: at other sizes, or where masks select no rows |
"""
