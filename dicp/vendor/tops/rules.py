"""The rules of all graph vendors, with what HLIR has for them."""

from __future__ import annotations

from dicp.graphop.composed import COMPOSED
from dicp.graphop.rules import RULES
from dicp.vendor.tops.forms import FORMS
from dicp.vendor.tops.hlir import Hlir
from dicp.vendor.tops.images import IMAGES


class Tops(Hlir):
    """Builds HLIR operators for the vocabulary of the rules."""

    forms = COMPOSED | FORMS | IMAGES


__all__ = ["RULES", "Tops"]
