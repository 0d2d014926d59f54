"""The real compiler keeps everything in the store, and the next process finds it there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_hotcompile.store import bounding
from lightning_hotcompile.store.store import Store

COMPILE = """
import json, sys, time
from pathlib import Path
import torch
import torch._dynamo  # torch sets the variable to its own default here
from torch._dynamo.utils import counters
from lightning_hotcompile.store.store import Store

torch.set_num_threads(1)
store = Store(Path(sys.argv[1]))
with store.use_compiler_cache() as use:
    x = torch.linspace(-1, 1, 64, requires_grad=True)
    function = lambda x: (x.sin() * 2 + x).relu().sum()
    result = torch.compile(function)(x)
    result.backward()
    expected = torch.autograd.grad(function(x), x)[0]
    assert torch.allclose(x.grad, expected)
    active = use.active
print(json.dumps({
    "active": active,
    "hits": counters["inductor"]["fxgraph_cache_hit"],
    "misses": counters["inductor"]["fxgraph_cache_miss"],
    "autograd_hits": counters["aot_autograd"]["autograd_cache_hit"],
    "folder": str(store.compiler_cache_dir),
}))
"""


def compile_in_a_new_process(store: Path, temporary: Path) -> dict[str, Any]:
    temporary.mkdir(exist_ok=True)
    environment = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    environment["TMPDIR"] = str(temporary)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(store)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    first = compile_in_a_new_process(tmp_path / "a", tmp_path / "tmp")
    assert (first["active"], first["hits"], first["autograd_hits"]) == (True, 0, 0)
    assert first["misses"] > 0
    cache = Path(first["folder"])
    assert {"fxgraph", "aotautograd"} <= {p.name for p in cache.iterdir()}
    kernels = set(cache.glob("??/*.so"))
    assert kernels
    assert list((cache / "precompiled_headers").glob("*.gch")), "the header follows too"
    elsewhere = {p.suffix for p in (tmp_path / "tmp").rglob("*") if p.is_file()}
    assert not elsewhere & {".so", ".cpp", ".gch", ".h"}, "nothing is compiled into the temporary folder"

    # The same in another folder, by way of an archive.
    Store(tmp_path / "a").export(tmp_path / "store.tar")
    taken = Store(tmp_path / "b").import_(tmp_path / "store.tar")
    assert taken.compiler_files > 0
    again = compile_in_a_new_process(tmp_path / "b", tmp_path / "tmp")
    assert (again["hits"], again["misses"], again["autograd_hits"]) == (first["misses"], 0, 1)
    copies = {p.name for p in Path(again["folder"]).glob("??/*.so")}
    assert copies == {p.name for p in kernels}, "no kernel was compiled under another name"

    # A graph whose kernels went compiles them again.
    entries = bounding.entries_of(Path(again["folder"]))
    bounding.take_away(
        [e for e in entries if e.paths[0].parent.name in {k.parent.name for k in kernels}], tmp_path
    )
    assert not list(Path(again["folder"]).glob("??/*.so"))
    after = compile_in_a_new_process(tmp_path / "b", tmp_path / "tmp")
    assert (after["active"], after["misses"]) == (True, 0)
    assert list(Path(again["folder"]).glob("??/*.so"))
