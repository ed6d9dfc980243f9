"""Loads an artifact on one device and calls it. `widepack.load` is in `distributed/`, and calls `load.py`.

A call binds the caller's inputs, checks the guards, chooses the plan of the batch class and runs the program.
The first load on a machine runs the artifact's probe. `ens.swap` replaces a member while calls go on.

| in | out | start reading |
|---|---|---|
| the path of an artifact | `WideModel` with its entries | `load.py`, `model.py`, `entry.py` |

| folder | what it does |
|---|---|
| `programs/` | Finds the wide programs of an entry, binds them to weights, and checks them with the probe |
| `graphs/` | Runs the calls of bound programs by graphs: captured at first, then replayed |
| `routing/` | Runs each row of a batch by the member that it is for |
| `members/` | Single members as plain modules, and their replacement by other checkpoints |

| file | what it does |
|---|---|
| `binder.py` | Binds the arguments of a call to the tensors of an entry's programs |
| `calibration_record.py` | Reads and writes the calibration that an artifact records: `calibrated=True` |
| `call_check.py` | Checks shapes and dtypes of the tensors of a call before anything runs |
| `cascade.py` | Runs few members on all rows, and more members only on rows of which these are not sure |
| `cast.py` | Casts an artifact to another dtype when it is loaded: `load(dtype=...)` |
| `entry.py` | Defines an entry of a model on one device: calls, `each`, `route`, `reduce`, states |
| `entry_programs.py` | Keeps the wide programs of an entry: found, bound and checked when they are needed |
| `feature_record.py` | Reads and checks the feature names that an artifact records |
| `graph_pool.py` | Defines what the graphs of a model share, and which calls use graphs: `ens.graph_use()` |
| `input_names.py` | Compares the names of inputs with those of an entry, and drops unused ones: `ens.only` |
| `input_values.py` | Takes what a caller gives as an input: tensors, NumPy arrays, `widepack.each` |
| `load.py` | Loads an artifact on one device and returns a `WideModel` |
| `loaded_entry.py` | Defines what every entry of a loaded model can do, wherever its members are |
| `loaded_model.py` | Defines what every loaded model can do: entries, calls, single members |
| `loaded_weights.py` | Reads the weights of an open artifact for programs: mapped on the CPU |
| `model.py` | Defines a loaded artifact: N members that run as one, with an entry for each method |
| `no_rows.py` | Answers calls without rows, which programs do not take |
| `open_artifact.py` | Defines an open artifact: its files, and the options and limits of its load |
| `output.py` | Builds the results of a wide call: the member's own structure, with a member axis |
| `reduced_answer.py` | Reduces the answers of a call to the requested figures, while or after members run |
| `single_members.py` | Chooses what runs the rows of single members: a session, or their own programs |
"""
