"""A C interface of operators, for the libraries of chip vendors.

One table, `functions.txt`, says which function serves which ATen operator, with which parameters.
From it come the C header, the page of documentation, the calls of the eager device, and a
reference library whose functions are one-operator graphs, compiled.
"""
