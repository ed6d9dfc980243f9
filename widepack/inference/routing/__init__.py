"""Runs each row of a batch by the member that it is for: `ens.route`.

| in | out | start reading |
|---|---|---|
| the tensors of a call, and the member of each row | an answer for each row | `router.py`, `row_groups.py` |

| file | what it does |
|---|---|
| `gathered_rows.py` | Runs rows of a fleet in one call, each with the factors of its own member |
| `member_numbers.py` | Reads which member each row of a call is for |
| `padded_rows.py` | Runs rows of several members in one call of all members, each with as many |
| `per_row.py` | Makes a function that reads the weights of each row's own member |
| `routed_members.py` | Binds members for routing: functions of their own rows over views of weights |
| `router.py` | Chooses the form of a routed call, and runs it |
| `row_groups.py` | Groups the rows of a call by member, and puts answers back in order |
| `row_independence.py` | Finds out whether the rows of an entry's batch are independent |
| `trunk.py` | Splits a member program into the part that all members share, and the rest |
"""
