"""What several commands use: options, progress bars, tables.

| file | what it does |
|---|---|
| `build_report.py` | Prints the report of a build as lines of text |
| `cost_document.py` | Makes the JSON document of `widepack analyze`: formulas, and numbers |
| `cost_groups.py` | Groups the rows of costs by layer, class, op or line, and folds layers that repeat |
| `cost_lines.py` | Writes costs as lines of text: totals as formulas and numbers, then a table |
| `cost_page.py` | Writes costs as one HTML page: totals, a treemap of the layers and a roofline plot |
| `cost_times.py` | Computes the least time of costs on a device: for each kernel the larger of both |
| `evaluation_page.py` | Writes an evaluation as one HTML page: tables and SVG plots |
| `failures.py` | How a command ends when it fails: a paragraph on standard error and an exit code |
| `given_members.py` | Compares the weights of an artifact with checkpoints and adapters that the user gives |
| `member_paths.py` | Finds the checkpoints that a command line names, in the order of the members |
| `measuring.py` | Options and output that the benchmark commands have in common: `bench` |
| `option_groups.py` | Shows the options of a command by purpose in --help |
| `options.py` | Options that several commands have, and the JSON document of a command |
| `plan_lines.py` | Says in words which plan runs at which batch |
| `progress_bar.py` | Progress of long work on standard error: a bar on a terminal, one line |
| `report_lines.py` | Lines that several commands print about a report |
| `revision.py` | Options and report of the commands that change members: `update`, `append`, `drop` |
| `row_options.py` | Options of the commands that run an artifact over the rows of a file |
| `threads.py` | Sets the threads of commands that run many small ops |
| `trace_rows.py` | Rows of a trace: each node of the member program, its strategy |
| `treemap.py` | Divides a rectangle into boxes with given areas, as square as is simple |
| `verified_lines.py` | Says what a build verified, from its record in the manifest |
"""
