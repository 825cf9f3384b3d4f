"""Conformance: whether operators on a device, or compiled by a backend, do what PyTorch's do.

Its rooms: `suite`, cases with stored reference data; `torch_tests`, PyTorch's own tests;
`per_operator`, scripts and files of one operator; `families`, tiny models; `device_checks`, what a
device does beside operators. They share the processes that tests run in, rows of results and the
device configuration.
"""
