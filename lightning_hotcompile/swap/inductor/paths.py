"""Where Inductor keeps what it compiles, and how to point it elsewhere for a while.

``TORCHINDUCTOR_CACHE_DIR`` is read at each use, so it
may be set after torch was imported; torch itself sets it to its own default when the compiler is
imported, which must not be taken for the user's choice. The precompiled C++ header (150 MB and most
of a cold start) ignores the variable: its folder is fixed at import, below the system's temporary one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_hotcompile.swap.replaced import Replacement

FOLDER = "TORCHINDUCTOR_CACHE_DIR"
TRITON_FOLDER = "TRITON_CACHE_DIR"
HEADERS = "precompiled_headers"
GRAPHS = "fxgraph"


def _codecache() -> Any:
    # Not at the top: the compiler's import costs a third of a second that a run without flip does not owe.
    import torch._inductor.codecache as codecache

    return codecache


def default_folder() -> str:
    """Torch's own folder, below the system's temporary one.

    Raises:
        OSError: there is no temporary folder, or (before torch 2.13) this user has no name.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    try:
        return default_cache_dir()
    except KeyError as error:
        raise OSError(f"this user has no name (set USER): {error.args[0]}") from error


def why_no_folder() -> str | None:
    """Why Inductor cannot be imported: it asks for its own folder, even where another one is set."""
    try:
        default_folder()
    except OSError as error:
        return f"Inductor has no folder of its own: {error}"
    return None


def folder_in_use() -> str:
    """The folder that Inductor reads and writes now.

    Raises:
        OSError: none is set, and there is no default.
    """
    return os.environ.get(FOLDER) or default_folder()


def fits_commands(folder: str | Path) -> bool:
    """Whether the C++ compiler can be told of files in it: torch writes their paths without quotes."""
    path = Path(folder).as_posix()
    with contextlib.suppress(ValueError):  # a quote that is never closed
        return shlex.split(path) == [path]
    return False


def holds_graphs(folder: str | Path) -> bool:
    """Whether there is any compiled graph in the compiler's folder."""
    with contextlib.suppress(OSError):
        return any(Path(folder, GRAPHS).glob("*/*"))  # an emptied cache still has its folders
    return False


def headers_in_use() -> str | None:
    """The folder of the precompiled C++ headers; ``None`` if this torch does not say."""
    found: str | None = getattr(_codecache(), "_HEADER_DIR", None)
    return found


def holds_headers(folder: str | Path | None) -> bool:
    """Whether a header was precompiled in that folder: the toolchain's own start is then over for good."""
    with contextlib.suppress(OSError):
        return folder is not None and any(name.endswith((".gch", ".pch")) for name in os.listdir(folder))
    return False


def default_headers() -> str:
    """The folder of the precompiled C++ headers below torch's own one.

    Raises:
        OSError: torch has none.
    """
    return os.path.join(default_folder(), HEADERS)


_pointed: dict[Path, Replacement] = {}
"""By folder: trainings in several threads of a process may use one at the same time."""


def chosen_by_user(ours: Path | None = None) -> str | None:
    """The folder that somebody else has set, or ``None`` for torch's default.

    Args:
        ours: a folder that is no choice either where :func:`point_at` has set it.
    """
    given = os.environ.get(FOLDER)
    with contextlib.suppress(OSError):  # there is no default that it could be
        if given and os.path.abspath(given) == os.path.abspath(default_folder()):
            return None
    if ours is not None and given == str(ours) and ours in _pointed and _pointed[ours].is_made:
        return None
    return given or None


def point_at(folder: Path) -> Callable[[], None]:
    """Let Inductor read and write below ``folder``; call the result, once, to undo it."""
    replacement = _pointed.setdefault(folder, Replacement(functools.partial(_point_at, folder)))
    replacement.enter()
    return replacement.leave


def _point_at(folder: Path) -> Callable[[], None]:
    undo = [_set_folder(folder), _set_triton_folder(), use_headers(folder / HEADERS)]

    def undo_all() -> None:
        for one in reversed(undo):
            one()

    return undo_all


def _set_folder(folder: Path) -> Callable[[], None]:
    before, ours = os.environ.get(FOLDER), str(folder)
    os.environ[FOLDER] = ours

    def undo() -> None:
        if os.environ.get(FOLDER) == ours:
            _restore(FOLDER, before)

    return undo


def _set_triton_folder() -> Callable[[], None]:
    """Triton's folder follows Inductor's, but torch writes it down at the first kernel."""
    before = os.environ.get(TRITON_FOLDER)
    if before is not None and not Path(before).is_relative_to(default_folder()):
        return lambda: None
    os.environ.pop(TRITON_FOLDER, None)
    return lambda: _restore(TRITON_FOLDER, before)


def _restore(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def use_headers(folder: Path) -> Callable[[], None]:
    """Let Inductor keep its precompiled C++ headers here; call the result to undo it."""
    codecache = _codecache()
    if not hasattr(codecache, "_HEADER_DIR") or not hasattr(codecache, "_HEADER_LOCK_DIR"):
        return lambda: None  # another torch: headers stay in the temporary folder
    before = codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR
    ours = str(folder), str(folder / "locks")
    codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR = ours
    _forget_paths(codecache)

    def undo() -> None:
        if ours == (codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR):
            codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR = before
            _forget_paths(codecache)

    return undo


def _forget_paths(codecache: Any) -> None:
    """Paths that torch has remembered in this process would outlive the change."""
    for remembered in (
        getattr(codecache, "_precompile_header", None),
        getattr(getattr(codecache, "CacheBase", None), "get_local_cache_path", None),
    ):
        clear: Callable[[], None] | None = getattr(remembered, "cache_clear", None)
        if clear is not None:
            clear()
