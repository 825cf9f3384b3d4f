"""Every error and warning of dicp: one class each; import them from here.

A message states the actual and the expected value, the place in the user's code, and what to do.
Fields stay on the exception, so that tools need not parse text. Impossible states are asserts, not
classes of this package.
"""

from dicp.errors.base import *
from dicp.errors.compilation import *
from dicp.errors.conformance import *
from dicp.errors.execution import *
from dicp.errors.setup import *
from dicp.errors.tools import *
from dicp.errors.warnings import *
