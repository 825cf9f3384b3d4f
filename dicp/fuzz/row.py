"""A row of the tables of operators: how to write one, with the lowering rules that it reaches.

A template is Python source. A slot `{kind}` or `{kind_anything}` is drawn by the function of that
kind in `dicp.fuzz.slots`; the first tensor slot is the subject that shapes of the others follow:

    x any dtype, f float, k integer, b bool, o special floats, r2 float of rank 2     the subject
    y as the subject, broadcastable; z exactly its shape and dtype
    g float, j integer, m bool, broadcastable; w bool of exactly its shape
    d dimension, dd dimensions, s scalar, q positive scalar, n small integer, p positive one, c bool
    e exponent, low fill of hidden scores, mask and bias of the scores of the subject's rows
    count, average, stat: buffers, which have no gradient
    lone64, lone16, lonek: new inputs of no dimension, float64, bfloat16 and int64
    t another dtype (a cast), t_float a floating point one, a dtype to accumulate in
    i indices of the first dimension, il of the last, h of the subject's shape, along d

A row that is not valid for the values drawn raises in eager and is drawn anew.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One way to write an operator.

    rules: names of ATen operators that it may reach, forward and backward. exact: its result jumps,
    so that operands with rounding errors would make any difference right. outs: how many results;
    0 for a change in place.
    """

    template: str
    rules: tuple[str, ...]
    exact: bool = False
    outs: int = 1

    @property
    def slots(self) -> tuple[str, ...]:
        """In the order in which they are drawn: the subject first."""
        found = dict.fromkeys(re.findall(r"{(\w+)}", self.template))
        return tuple(sorted(found, key=lambda slot: not re.match(r"([xfkbo]|f32|r\d)(_|$)", slot)))


def rows(text: str, exact: bool = False, outs: int = 1) -> list[Row]:
    """Rows from lines `template | rule rule`; without rules, the operator of the template's name"""
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        template, _, rules = line.partition(" | ")
        called = re.findall(r"(?:torch|F|\})\.(\w+)\(", template)
        names = rules.split() if rules else [called[0].removesuffix("_")]
        found.append(Row(template.strip(), tuple(names), exact, outs))
    return found
