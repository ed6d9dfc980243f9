"""Reads `.pt2` files, which `torch.export.save` wrote, as data. No code of a file runs.

| in | out | start reading |
|---|---|---|
| the JSON of a `.pt2` archive | a captured program, and an `nn.Module` that runs it | `factory.py` |

| file | what it does |
|---|---|
| `arguments.py` | Reads the arguments of a node in a `.pt2` file: values of the program become `Ref`s |
| `captured.py` | Turns the program of a `.pt2` file (`ReadProgram`) into a captured member (`Captured`) |
| `factory.py` | Makes members of `.pt2` files, which `torch.export.save` wrote |
| `fields.py` | Reads typed fields of a `.pt2` file's JSON. Each function refuses a value |
| `module.py` | Runs the program of a `.pt2` file as an `nn.Module`, and reads how it is called |
| `nodes.py` | Reads the nodes of a `.pt2` file's program as nodes of a member program |
| `reader.py` | Reads the program of a `.pt2` file, which `torch.export.save` wrote |
"""
