"""Whether the C++ compiler that Inductor would call does its work."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

COMPILE_TIMEOUT_S = 30.0

_PROGRAM = """
#include <omp.h>
extern "C" int threads() {
    int n = 0;
    #pragma omp parallel reduction(+ : n)
    n += 1;
    return n <= omp_get_max_threads();
}
"""


def cpp_compiler() -> str:
    """What Inductor calls: ``CXX``, else the system's usual one."""
    usual = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    return os.environ.get("CXX", usual)


def why_no_openmp(compiler: str, timeout: float) -> str | None:
    """Why a small library with OpenMP cannot be compiled and linked, ``None`` if it can."""
    with tempfile.TemporaryDirectory(prefix="hotcompile-doctor-", ignore_cleanup_errors=True) as folder:
        source, library = Path(folder, "program.cpp"), Path(folder, "program.so")
        source.write_text(_PROGRAM, encoding="utf-8")
        openmp = ["-Xclang", "-fopenmp", "-lomp"] if sys.platform == "darwin" else ["-fopenmp"]
        command = [compiler, str(source), "-shared", "-fPIC", "-std=c++20", *openmp, "-o", str(library)]
        error = why_failed(command, timeout)
        if error is None and not library.is_file():
            return "it wrote nothing"
        return error


def why_failed(command: list[str], timeout: float) -> str | None:
    """The first line that tells why a command did not end well in so many seconds, ``None`` if it did."""
    # Into a file: with a pipe, a process that the command has left behind would hold us after the time limit.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            return f"no end after {timeout:g} seconds"
        except OSError as error:
            return str(error)
        if done.returncode == 0:
            return None
        output.seek(0)
        lines = [line.strip() for line in output if line.strip()]
    telling = [line for line in lines if "error" in line.lower()]
    return (telling or lines[-1:] or [f"exit code {done.returncode}"])[0][:300]
