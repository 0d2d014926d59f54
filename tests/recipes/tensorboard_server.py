"""The real TensorBoard server on a folder, and what its HTTP interface answers."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ADDRESS = re.compile(r"(http://[0-9.]+:[0-9]+)/")
MOST_SECONDS = 120.0


@dataclass(frozen=True)
class Server:
    """One server that is running."""

    address: str

    def get(self, path: str, **query: str | int) -> bytes:
        """What is at a path below ``data/plugin/``."""
        url = f"{self.address}/data/plugin/{path}{'?' if query else ''}{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            content: bytes = answer.read()
            return content

    def json(self, path: str, **query: str | int) -> Any:
        """The JSON at a path below ``data/plugin/``."""
        return json.loads(self.get(path, **query))

    def tags(self, plugin: str) -> set[str]:
        """The tags of a plugin in the only run; empty as long as there is none."""
        runs = self.json(f"{plugin}/tags")
        return {tag for tags in runs.values() for tag in tags}

    def wait_for(self, plugin: str, tag: str) -> None:
        """Until the server has read so far: it loads the files while it answers already.

        Raises:
            TimeoutError: the tag did not come.
        """
        until = time.monotonic() + MOST_SECONDS
        while tag not in self.tags(plugin):
            if time.monotonic() > until:
                raise TimeoutError(f"no {tag!r} in {plugin}, which has {sorted(self.tags(plugin))}")
            threading.Event().wait(0.2)


@contextlib.contextmanager
def tensorboard(folder: Path) -> Iterator[Server]:
    """A server on a port that the system chose; it has ended when the block is left.

    Raises:
        RuntimeError: it did not start.
    """
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder)]
    options = ["--host", "127.0.0.1", "--port", "0", "--load_fast", "false", "--reload_interval", "1"]
    process = subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    # Whatever hangs, the pipe ends with the process.
    limit = threading.Timer(MOST_SECONDS, process.kill)
    limit.start()
    try:
        yield Server(_address(process))
    finally:
        limit.cancel()
        process.kill()
        process.communicate()


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if found := ADDRESS.search(line):
            return found[1]
    raise RuntimeError(f"tensorboard did not start: {''.join(said)[-2000:]}")
