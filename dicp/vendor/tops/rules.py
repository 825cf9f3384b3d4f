"""The rules of all graph vendors, with what HLIR has for them."""

from __future__ import annotations

from dicp.graphop.rules import RULES
from dicp.vendor.tops.hlir import Hlir
from dicp.vendor.tops.images import FORMS


class Tops(Hlir):
    """Builds HLIR operators for the vocabulary of the rules."""

    forms = FORMS


__all__ = ["RULES", "Tops"]
