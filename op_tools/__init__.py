"""The operator tools under their public name: the same objects as in `dicp.op_tools`."""

from dicp.op_tools import *  # noqa: F403
from dicp.op_tools import __all__ as __all__
