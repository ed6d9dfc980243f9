"""`widepack.fuse`: fuses N live modules into one `nn.Module` that trains.

Parameters have the members' own names and the shape `[N, *shape]`. Each forward runs a wide program that was
captured from one member, and that autograd can differentiate.

| in | out | start reading |
|---|---|---|
| N modules and one sample input | `Fused`: N modules again, or an artifact | `fuse.py`, then `module.py` |

| file | what it does |
|---|---|
| `best_members.py` | Keeps the weights that each member had at its best score: `BestMembers` |
| `captures.py` | Captures the programs of a fused module: of one member, and of those that may have another |
| `channel_packing.py` | Converts between N values `[B, C, *]` and the channel-packed form |
| `check.py` | Compares a fused module with its members, for `validate=`: each program when it is made |
| `check_gradients.py` | Compares gradients of a wide program with the members' own; explains a wrong one |
| `fresh_copies.py` | Makes N members out of one module or out of a factory, for `fuse(..., n=N)` |
| `fuse.py` | Makes one nn.Module of N live modules: `widepack.fuse` |
| `gradients.py` | Computes gradients of a weighted sum of outputs, and compares them up to rounding |
| `losses.py` | Computes each member's loss of the answers of a fused module |
| `member_runs.py` | Runs single members of a fused module, as modules and as programs, for comparisons |
| `members.py` | Defines the part of `Fused` about single members: `unfuse`, frozen and removed ones |
| `module.py` | Defines `Fused`: N live members as one nn.Module that trains |
| `module_copy.py` | Copies a module with the functions and the classes that hold parts of it |
| `own_modes.py` | Follows members whose own `train()` or `eval()` does more than set the mode |
| `own_modules.py` | Compares the copies that a fused module works on with the user's own modules |
| `parts.py` | Defines the parts of a fused module: one for each submodule of the members |
| `programs.py` | Holds and runs the programs of a fused module for one mode, dtype and device: one capture |
| `recipe.py` | Keeps what a fused module was made of, apart from weights |
| `same_members.py` | Checks that live modules can be members of one fused module |
| `save.py` | Builds an artifact of live members: an ordinary build of their state dicts, verified |
| `skeleton.py` | Keeps a live module without its weights, to capture it and to fill it |
| `stacked_parameters.py` | Stacks the weights of N live modules into one module: `[N, *shape]` each |
| `torch_module.py` | Returns the dicts of an `nn.Module` that have no public name: submodules |
| `unchanged.py` | Leaves all that can be reached from the user's modules as it was, after they ran |
"""
