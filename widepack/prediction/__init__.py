"""Runs an artifact over the rows of a file: `widepack.predict`.

| in | out | start reading |
|---|---|---|
| an artifact, a file of rows | a file with the answers, `PredictReport` | `predict.py` |

| file | what it does |
|---|---|
| `predict.py` | Defines `widepack.predict`: reads blocks, runs them, writes the answers |
| `request.py` | Checks the paths and the figures |
| `report.py` | Defines `PredictReport` |
| `formats.py` | Chooses how a file is read or written, by the ending of its name |
| `table.py` | Defines what every input file looks like: columns, and blocks of rows |
| `tensor_table.py`, `npy.py` | Read .npy and .safetensors files, with torch alone |
| `arrow_table.py`, `csv_table.py` | Read Parquet, Arrow and CSV files |
| `arrow_package.py` | Imports pyarrow, which no other module does |
| `arrow_columns.py` | Moves numbers between Arrow arrays and tensors |
| `column_choice.py` | Chooses the columns that each input is read from |
| `input_columns.py` | Reads an input from its columns |
| `conversion.py` | Converts numbers to the dtype of an input |
| `member_column.py` | Reads the member of each row |
| `passed_columns.py` | Chooses the columns that pass through |
| `entry_rows.py` | Finds out what a row is, and whether a file may be split into batches |
| `batches.py` | Runs the rows of a block in batches, and finds the row of an error |
| `answers.py` | Runs a batch, and gives the answers as columns |
| `output_file.py` | Writes the output whole or not at all |
| `tensor_sink.py`, `arrow_sink.py` | Write the formats |
"""
