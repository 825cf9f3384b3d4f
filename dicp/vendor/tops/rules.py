"""The rules of all graph vendors, with what HLIR has for them."""

from __future__ import annotations

from dicp.graphop import rules
from dicp.vendor.tops import attention
from dicp.vendor.tops.hlir import Hlir
from dicp.vendor.tops.images import FORMS

RULES = rules.RULES.merged(attention.RULES)


class Tops(Hlir):
    """Builds HLIR operators for the vocabulary of the rules."""

    forms = FORMS


__all__ = ["RULES", "Tops"]
