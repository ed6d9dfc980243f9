"""Reads N checkpoints and aligns their weights. No code of a file runs unless the user trusts it.

| in | out | start reading |
|---|---|---|
| files, folders, shards | `Checkpoint` for each member; aligned weights | `open_file.py`, `alignment.py` |

Each reader of a format (`open_file.py`, `torch_file.py`, `pt2_archive.py`, `shards.py`) returns a `Content`;
`Content.checkpoint` finds the state dict in it, by the same rules for all formats.

| file | what it does |
|---|---|
| `alignment.py` | Aligns N checkpoints in one table of weights |
| `checkpoint.py` | Defines `Content`, what a file has, and `Checkpoint`, its state dict |
| `differences.py` | Finds the differences between checkpoints, or between checkpoints and the model |
| `discovery.py` | Opens the checkpoints that a user names, and derives the members' names |
| `eval_mode.py` | Puts loaded members in eval mode, and refuses an `eval()` that changes weights |
| `extra_state.py` | Stores the extra state of members as data, and reads it from an artifact |
| `factory.py` | Finds the factory that a user names, and makes fresh modules with it |
| `hugging_face.py` | Makes the members of `--model hf`: with transformers, from untrusted folders |
| `hugging_face_weights.py` | Converts the weights of a Hugging Face folder as `from_pretrained` does |
| `literals.py` | Checks what the code of a model reads from its weights |
| `loading.py` | Loads checkpoints into members of a factory, as `load_state_dict` does |
| `mapped_memory.py` | Copies tensors out of mapped files, also while another process shortens them |
| `member_keys.py` | Finds several members in one file by a key with `*` |
| `model_names.py` | Finds the names that a model has for the weights of a checkpoint |
| `named_factory.py` | Finds the factory that a user names, also `hf` |
| `new_member.py` | Opens a checkpoint that becomes a member of an existing artifact |
| `open_file.py` | Opens one checkpoint file lazily, by its content, without running code of the file |
| `plain_file.py` | Opens plain files of untrusted folders: once, and without waiting for a writer |
| `pt2_archive.py` | Reads files of `torch.export.save` as data: a zip of JSON and raw weights |
| `shards.py` | Reads checkpoints of several files: an index of shards, or a folder |
| `state_dict.py` | Finds the state dict in the content of a file, and removes what wrappers left |
| `torch_file.py` | Reads files of torch.save: as data, with placeholders for objects of other classes |
| `unused_names.py` | Finds the names in checkpoint files that no member uses, such as an average |
| `zip_records.py` | Reads a zip file's directory; refuses records far larger than the file |
"""
