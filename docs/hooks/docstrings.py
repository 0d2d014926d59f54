"""Extension of Griffe, which reads the docstrings: what it does not know is written as it knows it."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`~?(?:[\w.]+\.)?(\w+)`")
EXAMPLE = re.compile(r"^(\s*)Example:$", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Names in roles of Sphinx become code, and the section ``Example:`` one that holds doctests."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Each module, class, function and attribute, once it was read."""
        if obj.docstring is not None:
            text = ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = EXAMPLE.sub(r"\1Examples:", text)
