"""Uses the machine: memory, threads, clocks, files and caches.

No module here depends on programs or weights.

| file | what it does |
|---|---|
| `atomic_file.py` | Writes a single file that appears complete or not at all: an export |
| `autocast.py` | Switches modes of torch off that would change programs: autocast, and the default device |
| `compiled_cache.py` | Stores compiled programs in a folder |
| `control_groups.py` | Finds the control groups of this process, which limit cores and memory |
| `cores.py` | Finds the cores that this process may use, and whether other processes use them |
| `deadline.py` | Limits the CPU time that reading an untrusted program may take |
| `devices.py` | Lists what devices can do at most: FLOP and bytes for each second, of data sheets |
| `gate.py` | Lets calls run in parallel, and a swap wait for all of them, with a `Gate` |
| `machine.py` | Names this machine, for measured plans, and lists the backends that it can run |
| `memory.py` | Returns freed memory to the system |
| `pinned_copy.py` | Copies tensors of mapped files to a GPU through one buffer of pinned memory |
| `private_files.py` | Opens files and folders that no other user could have written |
| `progress.py` | Reports the stages of long work to a callback: `progress(stage, done, total)` |
| `readahead.py` | Reads ahead only the parts of weights files that some members need |
| `threads.py` | Runs the body of a loop for several members at once, each on its own thread |
| `time_limit.py` | Limits the wall time of long work, such as a measurement, and of its parts |
| `timing.py` | Times several functions in turns, so that a slow phase of the machine slows all of them |
| `user_cache.py` | Remembers in the user's cache folder which probes and walks passed on this machine |
"""
