"""The command line `widepack`: one file for each command, imported when it is called.

| module | what is in it |
|---|---|
| `main` | the group: the commands by purpose, errors as one paragraph |
| `commands/` | one command a file; each file has a function `command` |
| `shared/` | options, progress bars, tables and reports of several commands |

`main`, `commands.inspect` and `commands.trace` import no torch.
"""
