"""Reads `.pt2` files, which `torch.export.save` wrote, as data. No code of a file runs.

| in | out | start reading |
|---|---|---|
| the JSON of a `.pt2` archive | a captured program, and an `nn.Module` that runs it | `factory.py` |

| file | what it does |
|---|---|
| `factory.py` | Makes members of `.pt2` files, which `torch.export.save` wrote |
| `fields.py` | Reads typed fields of a `.pt2` file's JSON, and the arguments of its nodes |
| `module.py` | Runs the program of a `.pt2` file as an `nn.Module`, and reads its call and its result |
| `reader.py` | Reads the program of a `.pt2` file, which `torch.export.save` wrote |
"""
