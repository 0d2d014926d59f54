"""One JSON file of results that is gone on with: other settings are refused, and no write is half done."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_hotcompile.errors import HotCompileError

FORMAT = 1


class OtherResults(HotCompileError):
    """The folder holds results that cannot be compared with new ones."""


class CannotWrite(HotCompileError):
    """The output folder does not take files."""


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Say of an error of the system which folder was meant, and what to do.

    Raises:
        CannotWrite: the folder or a file in it cannot be made or replaced.
    """
    try:
        yield
    except OSError as error:
        why = error.strerror or repr(error)
        where = "" if error.filename is None else f" ({error.filename})"
        raise CannotWrite(f"{folder} cannot be written to: {why}{where}. Take another output_dir.") from None


class RecordFile:
    """What was measured into one folder.

    Args:
        file: its folder is made if it is not there.
        setting: what has to be equal for times to be compared: machine, versions, threads, options.

    Raises:
        CannotWrite: the folder cannot be made.
    """

    def __init__(self, file: Path, setting: Mapping[str, Any]) -> None:
        with writing(file.parent):
            file.parent.mkdir(parents=True, exist_ok=True)
        self.file = file
        self.setting: dict[str, Any] = json.loads(json.dumps(setting))

    def read(self) -> dict[str, Any]:
        """What is there; empty if there is no file yet.

        Raises:
            OtherResults: there are results of another setting, or the file cannot be read.
        """
        if not self.file.exists():
            return {}
        try:
            content: dict[str, Any] = json.loads(self.file.read_text(encoding="utf-8"))
            is_known = content.get("format") == FORMAT and isinstance(content.get("setting"), dict)
        except (OSError, ValueError, AttributeError) as error:
            raise OtherResults(f"{self.file} cannot be read ({error!r}): take another output_dir.") from None
        if not is_known:
            raise OtherResults(
                f"{self.file} does not say how its results were measured, or in a format of another version: "
                "take another output_dir."
            )
        refuse_others(self.file, content["setting"], self.setting)
        return content

    def write(self, content: Mapping[str, Any]) -> None:
        """Replace the file in one step.

        Raises:
            CannotWrite: the folder does not take it; what was there before is still there.
        """
        whole = {"format": FORMAT, "setting": self.setting, **content}
        unfinished = self.file.with_suffix(".tmp")
        with writing(self.file.parent):
            unfinished.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
            os.replace(unfinished, self.file)


def refuse_others(file: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Go on only where nothing differs.

    Raises:
        OtherResults: something does; the message has both values.
    """
    if old != new:
        raise OtherResults(
            f"{file} has results of another setting: {_difference(old, new)}. "
            "Take another output_dir, or the same setting."
        )


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return "; ".join(f"{name} is {old.get(name)!r} there and {new.get(name)!r} now" for name in changed)
