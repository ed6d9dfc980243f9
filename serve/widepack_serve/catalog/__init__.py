"""Names on the wire, and what runs for each.

| in | out | start reading |
|---|---|---|
| loaded models | a `Catalog` of models on the wire | `catalog.py`, `served.py` |
| a request | the tensors and outputs of a call | `call.py` |

| file | what it does |
|---|---|
| `call.py` | Checks a request against its model, and makes the call |
| `catalog.py` | Finds the model that a name on the wire means |
| `layout.py` | Describes an entry for the wire: inputs, outputs, where the rows are |
| `metadata.py` | Describes models to clients |
| `outputs.py` | Reads which outputs a client requests |
| `served.py` | Defines a model on the wire |
| `texts.py` | Makes the inputs of a model of texts, with a tokenizer that the user names |
"""
