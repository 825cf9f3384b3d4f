"""Enflame Tops: graphs of HLIR operators, built by generated C++ and compiled by TopsRider."""

from dicp.vendor.tops.target import TopsTarget

__all__ = ["TopsTarget"]
