"""Random programs, compiled and compared with eager by the fp64 rule: `python -m dicp.fuzz`."""
