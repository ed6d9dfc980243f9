"""Finds what a fleet of fine-tunes has in common: one base and a thin difference for each member.

| in | out | start reading |
|---|---|---|
| one weight of N members, with or without its base | `Factors`, or `KeptStacked` | `unmerge.py` |
| the folder of a LoRA adapter, as PEFT writes it | `Adapter` | `adapter.py`, `adapter_members.py` |

| file | what it does |
|---|---|
| `adapter.py` | Reads the folder of a LoRA adapter as PEFT writes it, without PEFT: `Adapter` |
| `adapter_members.py` | Makes members of LoRA adapters and the checkpoint of their base |
| `factors.py` | Defines `Factors`, `KeptStacked` and `Residual`, the results of `unmerge` |
| `fleet.py` | Defines `Fleet`: the factors of each weight of a build's members, exact or within a tolerance |
| `low_rank.py` | Finds the rank and the factors of a matrix above the noise of rounding |
| `name_patterns.py` | Matches names of modules against the patterns of an adapter, in linear time |
| `open_member.py` | Opens a checkpoint or an adapter for an artifact, and factors its weights |
| `unmerge.py` | Splits one weight of N members into a base, which it finds, and low-rank factors |
"""
