"""Changes the members of an existing artifact: `widepack.update`, `append` and `drop`.

All three run one transaction (`transaction.py`). It reads the artifact, checks the new members, writes the
new files, verifies the programs again, and publishes by one rename of the manifest.

| in | out | start reading |
|---|---|---|
| an artifact; checkpoints or members to drop | new artifact; `ReviseReport` | `revise.py`, `transaction.py` |

| file | what it does |
|---|---|
| `record.py` | Publishes a record in the provenance of an artifact, and changes nothing else |
| `request.py` | Defines the arguments of one revision, its members, and `ReviseReport` |
| `revise.py` | Defines `widepack.update`, `append` and `drop`, which change the members of an artifact |
| `revised_entry.py` | Rewrites one entry of an artifact for other members: lowers, verifies and writes it |
| `revised_weights.py` | Makes the weights table of a revised artifact and writes its weights files |
| `transaction.py` | Runs one revision of an artifact: reads it, checks the new members, writes |
"""
