"""Cases with stored reference data: `gen_data`, `run_test`, `coverage` and `list`."""
