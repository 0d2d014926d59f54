"""A compile that is killed leaves nothing in the cache that a later one would take for whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch._inductor.codecache as codecache
import torch._inductor.cpp_builder as cpp_builder
from torch._inductor.cpp_builder import CppBuilder

from lightning_hotcompile.swap.inductor.paths import use_headers
from lightning_hotcompile.swap.inductor.whole_files import WholeFiles, is_cut_short
from lightning_hotcompile.swap.prewarm.parent import Prewarm
from tests.swap.test_prewarm import group, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ELF files and /proc")

SOURCE = 'extern "C" int answer() { return 42; }\n'


def builder(folder: Path, source: str = SOURCE) -> CppBuilder:
    (folder / "lib.cpp").write_text(source)
    options = cpp_builder.CppOptions()
    return CppBuilder(
        name="lib", sources=str(folder / "lib.cpp"), BuildOption=options, output_dir=str(folder)
    )


def test_what_is_built_is_the_same_under_its_name(tmp_path: Path) -> None:
    library = builder(tmp_path)
    command = library.get_command_line()
    with WholeFiles():
        library.build()
    assert library.get_target_file_path() == str(tmp_path / "lib.so")
    assert library.get_command_line() == command
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lib.cpp", "lib.so"]
    assert not is_cut_short(tmp_path / "lib.so")
    code = f"import ctypes; print(ctypes.CDLL({str(tmp_path / 'lib.so')!r}).answer())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "42"


def test_a_build_that_breaks_off_leaves_no_file_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(command: str, cwd: str) -> None:
        target = command.split(" -o ")[1].split()[0]
        Path(target).write_bytes(b"half")
        raise KeyboardInterrupt

    library = builder(tmp_path)
    with WholeFiles():
        with monkeypatch.context() as patched:
            patched.setattr(cpp_builder, "run_compile_cmd", cut_off)
            with pytest.raises(KeyboardInterrupt):
                library.build()
        assert not (tmp_path / "lib.so").exists()
        library.build()
    assert sorted(p.name for p in tmp_path.glob("lib.so*")) == ["lib.so"]


def test_an_error_of_the_compiler_is_torchs_own(tmp_path: Path) -> None:
    with WholeFiles(), pytest.raises(Exception, match="no code at all"):
        builder(tmp_path, "#error no code at all\n").build()
    assert not list(tmp_path.glob("lib.so*"))


def test_torch_has_its_own_way_back() -> None:
    before = CppBuilder.build
    outer, inner = WholeFiles(), WholeFiles()
    for _ in range(2):
        with outer:
            ours = CppBuilder.build
            assert ours is not before
            with inner:
                assert CppBuilder.build is ours
            assert CppBuilder.build is ours
        assert CppBuilder.build is before


def test_this_torch_has_what_is_replaced(tmp_path: Path) -> None:
    library = builder(tmp_path)
    assert library._output.endswith(f" {library._target_file}")
    assert library._use_relative_path is False


def test_torch_takes_whatever_lies_there_for_whole(tmp_path: Path) -> None:
    library = builder(tmp_path)
    (tmp_path / "lib.so").write_bytes(b"half")
    codecache._worker_compile_cpp(str(tmp_path / "lock"), (library,))
    assert (tmp_path / "lib.so").read_bytes() == b"half", "else there is nothing to keep from it"


@pytest.mark.parametrize("left", [0, 16, 64, 0.5, 0.99])
def test_a_library_that_was_cut_short_is_told(tmp_path: Path, left: float) -> None:
    library = builder(tmp_path)
    library.build()
    whole = (tmp_path / "lib.so").read_bytes()
    cut = tmp_path / "cut.so"
    cut.write_bytes(whole[: left if isinstance(left, int) else int(left * len(whole))])
    assert is_cut_short(cut)
    cut.write_bytes(whole)
    assert not is_cut_short(cut)


def test_a_file_of_holes_is_cut_short_and_another_kind_is_not(tmp_path: Path) -> None:
    file = tmp_path / "lib.so"
    file.write_bytes(bytes(4096))  # the linker was killed before it wrote the header
    assert is_cut_short(file)
    file.write_bytes(b"\xcf\xfa\xed\xfe" + bytes(4096))  # Mach-O: not ours to judge
    assert not is_cut_short(file)


@pytest.mark.slow
def test_a_killed_child_leaves_no_half_header(tmp_path: Path) -> None:
    headers = tmp_path / "headers"
    undo = use_headers(headers)
    try:
        with Prewarm(cache_dir=tmp_path / "cache", toolchain=["cpu"]) as child:
            until(lambda: list(headers.glob("*.gch*")))
            os.killpg(child.pid or 0, signal.SIGKILL)
            until(lambda: not group(child.pid))
            assert child.poll().state == "crashed"  # SIGKILL is what a want of memory looks like
    finally:
        undo()
    assert [p.suffix for p in headers.glob("*.gch*")] == [".part"]
