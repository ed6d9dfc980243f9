"""The command line, `widepack`: one command a file, each loaded when it is used.

| module | what is in it |
|---|---|
| `main` | the group: the table of commands, errors as one paragraph |
| `common` | options that several commands have, JSON on standard output, files that appear whole or not at all |
| `progress` | a bar on a terminal, a line a stage on a pipe |
| `build`, `bench`, ... | a command each, `command` in it |

`main`, `inspect_artifact` and `trace` import no torch.
"""
