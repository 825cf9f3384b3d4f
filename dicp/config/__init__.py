"""The settings of dicp: frozen, documented values, passed explicitly.

This package alone reads the process environment. `OPTIONS` is the one table behind
`Config.from_env`, `torch.compile(options=...)`, `python -m dicp config` and docs/environment.md.
An environment variable that is set but empty counts as unset.
"""

from dicp.config.device import (
    DEVICE_VARIABLES,
    SWITCH_VARIABLES,
    DeviceSettings,
    SwitchSettings,
    dump_level,
)
from dicp.config.kinds import (
    BOOLEAN,
    COMMAND,
    COUNT,
    NAME,
    OPERATORS,
    OPTIONAL_PATH,
    PATH,
    SIZES,
    WORDS,
    Kind,
)
from dicp.config.process import (
    environment,
    environment_with,
    is_set,
    tool_variable,
    tools_environment,
    vendor_variable,
)
from dicp.config.settings import (
    OPTIONS,
    PREFERRED_NATIVE,
    TARGET_GROUP,
    Config,
    asked,
    default_cache_dir,
)
from dicp.config.table import Option, vendor_option

__all__ = [
    "BOOLEAN",
    "COMMAND",
    "COUNT",
    "DEVICE_VARIABLES",
    "NAME",
    "OPERATORS",
    "OPTIONAL_PATH",
    "OPTIONS",
    "PATH",
    "PREFERRED_NATIVE",
    "SIZES",
    "TARGET_GROUP",
    "SWITCH_VARIABLES",
    "WORDS",
    "Config",
    "DeviceSettings",
    "Kind",
    "Option",
    "SwitchSettings",
    "asked",
    "default_cache_dir",
    "dump_level",
    "environment",
    "environment_with",
    "tools_environment",
    "is_set",
    "tool_variable",
    "vendor_option",
    "vendor_variable",
]
