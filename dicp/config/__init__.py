"""The settings of dicp: frozen, documented values, passed explicitly.

This package alone reads the process environment. `OPTIONS` is the one table behind
`Config.from_env`, `torch.compile(options=...)`, `python -m dicp config` and docs/environment.md.
An environment variable that is set but empty counts as unset.
"""

from dicp.config.device import *
from dicp.config.kinds import *
from dicp.config.process import *
from dicp.config.settings import *
from dicp.config.table import *
