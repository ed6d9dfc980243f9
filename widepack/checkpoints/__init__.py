"""Reads N checkpoints and aligns their weights. No code of a file runs unless the user trusts it.

| in | out | start reading |
|---|---|---|
| files, folders, shards | `Checkpoint` for each member; aligned weights | `loading.py`, `alignment.py` |

| file | what it does |
|---|---|
| `alignment.py` | Aligns N checkpoints in one table of weights |
| `checkpoint.py` | Defines `Checkpoint`, an open checkpoint: its names, tensors, dtype and hash |
| `differences.py` | Finds the differences between checkpoints, or between checkpoints and the model |
| `discovery.py` | Opens the checkpoints that a user names, and derives the members' names |
| `extra_state.py` | Stores the extra state of members as data |
| `other_extra_state.py` | Makes a new member with the extra state of another member |
| `factory.py` | Finds the factory that a user names, and makes fresh modules with it |
| `hugging_face.py` | Makes the members of `--model hf`: with transformers |
| `hugging_face_config.py` | Reads the config.json of a Hugging Face folder, which may be untrusted |
| `kept.py` | Keeps tensors that no file has, without memory for large ones |
| `loading.py` | Loads checkpoints into members of a factory, as `load_state_dict` does |
| `member_keys.py` | Finds several members in one file by a key with `*` |
| `member_state.py` | Reads what an artifact stores of a member's state dict beside its tensors |
| `memory_bound.py` | Bounds the memory that the code of a model may ask for while a member is made |
| `model_names.py` | Finds the names that a model has for the weights of a checkpoint |
| `named_factory.py` | Finds the factory that a user names, also `hf` |
| `newcomer.py` | Opens a checkpoint that becomes a member of an existing artifact |
| `no_network.py` | Refuses connections while a model is made, so that nothing is downloaded |
| `numpy_archive.py` | Reads archives of `numpy.savez` as data |
| `open_file.py` | Opens one checkpoint file lazily, by its content, without running code of the file |
| `pickled_modules.py` | Makes members that are pickled modules: each checkpoint contains its module |
| `plain_file.py` | Opens plain files of untrusted folders: once, and without waiting for a writer |
| `pt2_archive.py` | Reads files of `torch.export.save` as data: a zip of JSON and raw weights |
| `shards.py` | Opens checkpoints of several files: an index `{"weight_map": {tensor name |
| `state_dict.py` | Finds the state dict in the content of a file, and removes what wrappers left |
| `stored_states.py` | Checks versions and extra state of a new member against the artifact's |
| `torch_file.py` | Reads files of torch.save: as data, with placeholders for objects of other classes |
| `unused_names.py` | Finds the names in checkpoint files that no member uses, such as an average |
| `zip_records.py` | Reads a zip file's directory; refuses records far larger than the file |
"""
