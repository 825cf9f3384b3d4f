"""The tuned constants of building MACA C++; those of its kernels stand in `dicp/gpu/thresholds.py`.

Found on 2 cores of an AMD EPYC with g++ and with NVRTC; mxcc was not at hand.
"""

from __future__ import annotations

SMALL_UNIT = 6_000
"""Characters of kernel text below which a second compiler run costs more than it saves: the headers
take as long to compile as about that much text."""
