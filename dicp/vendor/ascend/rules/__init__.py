"""From ATen to GE: the rules of all graph vendors, and attention's."""

from dicp.graphop import rules
from dicp.vendor.ascend.rules import attention

RULES = rules.RULES.merged(attention.RULES)
