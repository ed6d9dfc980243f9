"""What a user would run without widepack: loop, compiled member, `vmap`, CUDA graph, ONNX Runtime sessions.

| in | out | start reading |
|---|---|---|
| N modules and inputs | a callable for each baseline | `table.py` |

| file | what it does |
|---|---|
| `compiled.py` | Makes baselines with `torch.compile`, each specialized to the shapes of its calls |
| `cuda_graph.py` | Records the eager loop as one CUDA graph |
| `derivatives.py` | Runs modules whose forward takes derivatives inside of inference mode |
| `member_programs.py` | Runs the artifact's member programs as modules |
| `members.py` | Makes the user's own modules, loads a member's weights into them; the eager loop |
| `onnxruntime_sessions.py` | Runs N sessions of ONNX Runtime: one exported member |
| `routes.py` | Calls of rows for several members, as a service without widepack would write them |
| `table.py` | Lists the baselines: the members without widepack |
| `vmap.py` | Makes one member a function of its weights, and runs `torch.func.vmap` of it |
"""
