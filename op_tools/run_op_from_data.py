"""Replays captured operators: `python -m dicp.op_tools.run_op_from_data` under its public path."""

from dicp.op_tools.run_op_from_data import main

if __name__ == "__main__":
    raise SystemExit(main())
