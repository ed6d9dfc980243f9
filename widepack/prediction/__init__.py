"""Runs an artifact over the rows of a file: `widepack.predict`.

| in | out | start reading |
|---|---|---|
| an artifact, a file of rows | a file with the outputs, `PredictReport` | `predict.py`, `run.py` |

| file | what it does |
|---|---|
| `predict.py` | Defines `widepack.predict`: checks the arguments, runs the rows, writes the outputs |
| `run.py` | Runs the rows of a file block by block and batch by batch, and finds the row of an error |
| `outputs.py` | Runs a batch, and gives the outputs as columns |
| `column_choice.py` | Chooses the columns of inputs, of the members' names, and those that pass through |
| `input_columns.py` | Reads an input from its columns, and converts the numbers to its dtype |
| `table.py` | Defines what every input file looks like: columns, and blocks of rows |
| `endings.py` | Says by the ending of a name which format a file has |
| `formats.py` | Opens files to read and to write, by the ending of their names |
| `tensor_files.py` | Reads and writes .npy and .safetensors files |
| `arrow_files.py` | Reads and writes Parquet and Arrow files; the only module that imports pyarrow |
| `csv_files.py` | Reads and writes CSV files |
| `json_files.py` | Reads files with one JSON object in each line |
| `folder_files.py` | Reads a folder of Parquet files as one table |
"""
