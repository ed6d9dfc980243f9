"""Finds what a fleet of fine-tunes has in common: one base and a thin difference for each member.

| in | out | start reading |
|---|---|---|
| one weight of N members, with or without its base | `Factors`, or `KeptStacked` | `unmerge.py` |
| the folder of a LoRA adapter, as PEFT writes it | `Adapter` | `adapter_files.py`, `adapter.py` |

| file | what it does |
|---|---|
| `adapter.py` | Defines `Adapter`, a LoRA fine-tune as its files have it, and merges it into a base |
| `adapter_config.py` | Reads the settings of a LoRA adapter: `adapter_config.json` as PEFT writes it |
| `adapter_files.py` | Reads the folder of a LoRA adapter as PEFT writes it, without PEFT |
| `adapter_members.py` | Makes members of LoRA adapters and the checkpoint of their base |
| `approximate.py` | Finds factors that represent a weight up to a declared part of its fine-tune |
| `base_record.py` | Records the base of a fleet, and warns of adapters that name another one |
| `base_search.py` | Finds the base of members from the members alone |
| `fleet.py` | Defines `Fleet`: the factors of each weight of a build's members |
| `factors.py` | Defines `Factors`, `KeptStacked` and `Residual`, the results of `unmerge` |
| `orientation.py` | Finds which weights of a model are stored transposed |
| `low_rank.py` | Finds the rank and the factors of a matrix above a noise floor |
| `name_patterns.py` | Matches names of modules against the patterns of an adapter, in linear time |
| `new_members.py` | Opens a checkpoint or an adapter for an artifact, and factors its weights |
| `rounding.py` | Computes ulps, and the noise that rounding adds to a matrix |
| `unmerge.py` | Splits one weight of N members into a base and low-rank factors |
"""
