"""The parts of `scripts/on_device.py`.

| file | what it has |
|---|---|
| `steps.py` | the steps in order of worth: what each runs, its part of the time, what it decides |
| `running.py` | runs steps within a time, and keeps what was finished |
| `record_tests.py` | a plugin of pytest: writes each test's outcome, leaves out tests that passed before |
| `verdict.py` | the lines that a device must decide, each with its figure |
"""
