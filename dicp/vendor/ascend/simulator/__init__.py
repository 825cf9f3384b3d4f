"""A stand-in for GE and ACL: checks what generated C++ builds, and runs it on the CPU.

Its headers and library have CANN's names; the same generated source compiles against either.
"""
