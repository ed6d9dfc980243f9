"""`widepack.export`: writes a program of an artifact as an ONNX file or a `torch.export` program.

| in | out | start reading |
|---|---|---|
| an artifact, an entry, `to="onnx"` or `"pt2"` | a file, compared with the artifact; a report | `export.py` |

| file | what it does |
|---|---|
| `export.py` | Defines `widepack.export`, which writes a program |
| `subject.py` | Defines `ExportSubject`: a program to export, its trial inputs, and the comparison |
| `onnx_file.py` | Writes a program as an ONNX file with metadata, and checks it in ONNX Runtime |
| `pt2_file.py` | Writes a program of an artifact as a `torch.export` program |
"""
