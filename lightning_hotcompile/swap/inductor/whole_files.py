"""What the C++ compiler makes for Inductor gets its name when it is whole.

Torch lets the compiler write under the final name and later only asks whether a file of that name is there.
A compile that is killed so leaves half a file in the cache: half a library is a compile error in each later
run, half a precompiled header makes each later compile two to four times as long, and nothing says so.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_hotcompile.swap.replaced import Replacement, Replaces, put_in_place

UNFINISHED = ".part"

_ELF_HEADER = struct.Struct("<16s HHI QQQ I HHHHHH")  # of 64 bits, little-endian
_ELF_64_LITTLE = b"\x7fELF\x02\x01"


def _replace() -> Callable[[], None]:
    # Not at the top: a run without a flip does not owe the compiler's import.
    from torch._inductor.cpp_builder import CppBuilder

    builder: Any = CppBuilder
    before = builder.build

    def build(self: Any) -> None:
        target, output = getattr(self, "_target_file", ""), getattr(self, "_output", "")
        if not target or not output.endswith(f" {target}") or getattr(self, "_use_relative_path", False):
            before(self)
            return
        part = f"{target}.{os.getpid()}-{threading.get_ident()}{UNFINISHED}"
        self._target_file, self._output = part, f"{output.removesuffix(target)}{part}"
        try:
            before(self)
            os.replace(part, target)
        finally:
            self._target_file, self._output = target, output
            with contextlib.suppress(OSError):
                os.unlink(part)

    return put_in_place({(builder, "build"): build})


class WholeFiles(Replaces):
    """While any is entered, each build of this process writes to a file that is renamed when it is whole.

    That file ends with ``.part`` and is its thread's own: torch's locks do not cover every file, and a
    compiler may outlive the process that held one. Nothing happens where this torch does it in another way.
    """

    replacement = Replacement(_replace)


def is_cut_short(library: Path) -> bool:
    """Whether a shared library has no header yet or is shorter than it says.

    Other kinds than ELF of 64 bits have to be empty, or nearly so, to count.

    Raises:
        OSError: it cannot be read.
    """
    with library.open("rb") as file:
        header = file.read(_ELF_HEADER.size)
    if len(header) < _ELF_HEADER.size:
        return True
    if not header.startswith(_ELF_64_LITTLE):
        return not any(header)
    fields: tuple[int, ...] = _ELF_HEADER.unpack(header)
    sections_at, section_size, sections = fields[6], fields[11], fields[12]
    return library.stat().st_size < sections_at + section_size * sections
