"""A stand-in for TopsRider: checks what generated C++ builds, and runs it on the CPU.

Its headers and library have TopsRider's names; the same generated source compiles against either.
"""
