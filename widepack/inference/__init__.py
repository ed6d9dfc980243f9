"""Loads artifacts on one device: `widepack.load` returns a model that a service calls.

A call binds the caller's inputs, checks the guards, chooses the plan of the batch class and runs the program.
The first load on a machine runs the artifact's probe. `ens.swap` replaces a member while calls go on.

| in | out | start reading |
|---|---|---|
| the path of an artifact | `WideModel` with its entries | `load.py`, `model.py`, `entry.py`, `programs.py` |

| file | what it does |
|---|---|
| `answer_rows.py` | Compares the sizes of answers with what an entry says of them |
| `answer_stream.py` | Reduces the answers of a loop over members while the loop runs |
| `arrays.py` | Takes NumPy arrays and scalars as inputs of a call. NumPy is not imported for it |
| `binder.py` | Binds the arguments of a call to the tensors of an entry's programs |
| `bound_program.py` | Defines wide programs before and after they are bound to weights |
| `call_check.py` | Checks the tensors of a call before anything runs |
| `call_graphs.py` | Runs the calls of a bound program by graphs: captured at first, then replayed |
| `cascade.py` | Runs few members on all rows, and more members only on rows of which these are not sure |
| `cast.py` | Casts an artifact to another dtype when it is loaded: `load(dtype=...)` |
| `cast_bounds.py` | Computes bounds for a model that is loaded in another dtype: `load(dtype=...)` |
| `compiled_choice.py` | Chooses a compiled program that is in the cache, where it was faster |
| `each.py` | Marks inputs of a call that have one value for each member |
| `entry.py` | Defines an entry of a model on one device: calls, `each`, `route`, `reduce`, states |
| `entry_access.py` | Defines the part of a loaded model that calls its entries |
| `entry_inputs.py` | Makes the inputs of an entry's wide calls: from the probe, drawn at other sizes |
| `entry_rows.py` | Finds out whether the rows of an entry's batch are independent |
| `failed_call.py` | Explains a call that an op refused: which node, which inputs |
| `gathered_rows.py` | Runs rows of a fleet in one call, each with the factors of its own member |
| `graph_limits.py` | Finds the programs that no graph can run, or makes no faster |
| `graph_pool.py` | Defines what the graphs of one loaded model share: one memory and one lock |
| `graph_rows.py` | Finds the batches that graphs run, and how a smaller batch is padded to one |
| `graph_use.py` | Defines what a loaded model says of its graphs: `ens.graph_use()` |
| `int8_programs.py` | Makes the programs of a load with int8 weights: `load(weights="int8")` |
| `int8_request.py` | Checks the options of a load with int8 weights |
| `load.py` | Loads an artifact on one device and returns a `WideModel` |
| `load_limits.py` | Limits the memory and the work |
| `loaded_entry.py` | Defines what every entry of a loaded model can do, wherever its members are |
| `loaded_weights.py` | Reads the weights of an open artifact for programs: mapped on the CPU |
| `member.py` | Defines one member of an artifact as a plain module |
| `member_access.py` | Defines the part of a loaded model that is about single members |
| `member_numbers.py` | Reads which member each row of a call is for |
| `member_runs.py` | Runs single members of a loaded model on the probe's inputs: their own programs |
| `merged_weights.py` | Tells which wide programs merge the factors of weights, and whether there is memory |
| `model.py` | Defines a loaded artifact: N members that run as one, with an entry for each method |
| `new_member.py` | Checks a checkpoint that replaces a member: its weights against the artifact |
| `open_artifact.py` | Defines an open artifact with its weights and the options of its load |
| `output.py` | Builds the results of a wide call: the member's own structure, with a member axis |
| `own_extra_state.py` | Finds out whether a new member's answers depend on its extra state |
| `padded_rows.py` | Runs rows of several members in one call of all members, each with as many |
| `padding.py` | Counts rows that are computed and are of no call |
| `part_reduction.py` | Sums up the answers of some of the members, for figures of all of them |
| `prepared_call.py` | Defines calls of an entry that are checked and have not passed the gate |
| `probe_check.py` | Checks the programs of one entry against the artifact's probe |
| `program_admission.py` | Checks programs of an artifact against the budget of the load |
| `program_binder.py` | Binds wide programs to weights and to a backend |
| `program_source.py` | Finds the wide programs of an entry: in the user's cache, in the artifact |
| `programs.py` | Keeps the wide programs of one entry of a loaded artifact: found, bound |
| `recorded_call.py` | Defines a captured graph with the memory of its inputs and answers |
| `reduced_answer.py` | Reduces the answer of a call to the requested figures |
| `reductions.py` | Defines the reductions over members that a loaded model has, and each of its entries |
| `routed_members.py` | Binds members for routing: functions of their own rows over views of weights |
| `router.py` | Runs each row of a batch by the member that it is for |
| `routes.py` | Defines the routing of rows to members that a loaded model has, and each of its entries |
| `row_groups.py` | Groups the rows of a call by member, and puts answers back in order |
| `row_prices.py` | Predicts what rows of several members cost, from the times that `tune` measured |
| `row_weights.py` | Keeps the weights of all members stacked, for calls that read each row's own member |
| `selection_record.py` | Reads and writes what a selection recorded in an artifact |
| `swap.py` | Replaces one member of a loaded model by another checkpoint while calls go on: `ens.swap` |
| `tensor_calls.py` | Defines calls of an entry by a flat list of tensors, for servers and tools |
| `weight_exchange.py` | Changes one member's weights in bound programs |
"""
