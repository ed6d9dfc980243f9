"""Writes the results of a comparison: a JSON document, a table, an HTML page. Only `environment` imports
torch.

| in | out | start reading |
|---|---|---|
| rows of measurements | `Report`, text, HTML | `document.py` |

| file | what it does |
|---|---|
| `document.py` | Holds the report of a benchmark, as a table and as a JSON document (described |
| `environment.py` | Describes where a benchmark ran: the device, versions, threads, commit and command |
| `html.py` | Writes a report as one HTML page: tables and SVG plots, without scripts or network |
| `json_file.py` | Writes a result document as one JSON file, and reads it |
| `result_rows.py` | Writes rows of results as text: a table in Markdown, and one line for each row |
| `row.py` | Describes one batch of a benchmark: times, ratios with intervals, and a verdict |
"""
