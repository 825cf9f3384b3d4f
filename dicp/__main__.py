"""`python -m dicp`."""

from dicp.cli import main

main()
