"""Export and import: what goes round, and what is refused before anything is placed."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_hotcompile.store import archive, importing
from lightning_hotcompile.store.archive import Content, Manifest, is_known_name
from lightning_hotcompile.store.folder import StoreError
from lightning_hotcompile.store.store import Store
from tests.store.examples import LATER, MACHINE, key, path_of, profile, sample, store_in

PROFILE = f"profiles/{key().digest}.json"


def filled(tmp_path: Path, **options: Any) -> Store:
    store = store_in(tmp_path / "from", **options)
    store.remember(profile())
    store.add_compile_sample(sample())
    for name, content in (("ab/cabx.so", b"code"), ("fxgraph/cd/fcd/one", b"graph"), ("locks/x.lock", b"")):
        path = store.compiler_cache_dir / name
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    return store


def tree(store: Store) -> dict[str, bytes]:
    """All that is in a store, by name; locks left out."""
    files = (p for p in store.folder.rglob("*") if p.is_file() and p.suffix != ".lock")
    return {p.relative_to(store.folder).as_posix(): p.read_bytes() for p in files}


class TestRoundTrip:
    @pytest.mark.parametrize("name", ["store.tar", "store.tar.gz", "store.tgz"])
    def test_everything_arrives(self, tmp_path: Path, name: str) -> None:
        one, other = filled(tmp_path), store_in(tmp_path / "to")
        written = one.export(tmp_path / name)
        data = (tmp_path / name).read_bytes()
        assert data.startswith(b"\x1f\x8b") is (name != "store.tar")
        assert (written.files, written.size) == (4, len(data))
        assert written.sha256 == hashlib.sha256(data).hexdigest()
        taken = other.import_(tmp_path / name, sha256=written.sha256)
        assert (taken.profiles, taken.samples, taken.compiler_files, taken.left_out) == (1, 1, 2, ())
        assert tree(other) == tree(one)
        assert (other.compiler_cache_dir / "ab").stat().st_mode & 0o077 == 0

    def test_a_second_time_changes_nothing(self, tmp_path: Path) -> None:
        one, other = filled(tmp_path), store_in(tmp_path / "to")
        one.export(tmp_path / "store.tar")
        other.import_(tmp_path / "store.tar")
        before = tree(other)
        again = other.import_(tmp_path / "store.tar")
        assert (again.profiles, again.compiler_files) == (0, 0)
        assert tree(other) == before

    def test_newer_knowledge_stays(self, tmp_path: Path) -> None:
        one, other = filled(tmp_path), store_in(tmp_path / "to")
        other.remember(profile(verdict="bad", when=LATER))
        one.export(tmp_path / "store.tar")
        other.import_(tmp_path / "store.tar")
        found = other.find(key())
        assert found is not None
        assert (found.verdict, found.when, found.runs) == ("bad", LATER, 2)

    def test_files_of_the_compiler_that_are_there_stay(self, tmp_path: Path) -> None:
        one, other = filled(tmp_path), store_in(tmp_path / "to")
        (other.compiler_cache_dir / "ab").mkdir()
        (other.compiler_cache_dir / "ab" / "cabx.so").write_bytes(b"loaded")
        one.export(tmp_path / "store.tar")
        assert other.import_(tmp_path / "store.tar").compiler_files == 1
        assert (other.compiler_cache_dir / "ab" / "cabx.so").read_bytes() == b"loaded"

    def test_of_profiles_alone(self, tmp_path: Path) -> None:
        one, other, third = filled(tmp_path), store_in(tmp_path / "to"), store_in(tmp_path / "third")
        assert one.export(tmp_path / "small.tar", compiler_cache=False).files == 2
        one.export(tmp_path / "all.tar")
        assert other.import_(tmp_path / "small.tar").compiler_files == 0
        assert third.import_(tmp_path / "all.tar", compiler_cache=False).compiler_files == 0
        assert tree(other) == tree(third)

    def test_damaged_profiles_stop_an_import_before_it_places_anything(self, tmp_path: Path) -> None:
        one, other = filled(tmp_path), store_in(tmp_path / "to")
        path_of(one, key("p2")).write_text("{}")
        one.export(tmp_path / "store.tar")
        with pytest.raises(StoreError, match="not taken in"):
            other.import_(tmp_path / "store.tar")
        assert tree(other) == {}

    def test_links_and_odd_names_are_not_exported(self, tmp_path: Path) -> None:
        one = filled(tmp_path)
        (tmp_path / "secret").write_text("secret")
        (one.folder / "profiles" / f"{'0' * 32}.json").symlink_to(tmp_path / "secret")
        (one.compiler_cache_dir / "ab" / "odd name.so").write_text("x")
        with pytest.raises(StoreError, match="cannot be read or changed"):
            one.export(tmp_path / "store.tar")
        (one.folder / "profiles" / f"{'0' * 32}.json").unlink()
        assert one.export(tmp_path / "store.tar").files == 4

    def test_what_a_killed_run_has_left_of_its_child_is_not_exported(self, tmp_path: Path) -> None:
        one = filled(tmp_path)
        left = one.compiler_cache_dir / "prewarm-ab_c1234"
        left.mkdir()
        (left / "settings.json").write_text("{}")
        one.export(tmp_path / "store.tar")
        with tarfile.open(tmp_path / "store.tar") as tar:
            assert not [name for name in tar.getnames() if "prewarm" in name]

    def test_an_archive_that_cannot_be_written_leaves_nothing(self, tmp_path: Path) -> None:
        one = filled(tmp_path)
        (tmp_path / "store.tar").mkdir()
        with pytest.raises(StoreError, match="cannot be read or changed"):
            one.export(tmp_path / "store.tar")
        assert {p.name for p in tmp_path.iterdir()} == {"from", "store.tar"}


class TestCodeOfOtherRunsHere:
    """Runs have other threads than the shell of the export, and none of them need be that of the import."""

    @pytest.mark.parametrize("change", [{"threads": 1}, {"devices": ()}, {"cores": 8, "threads": 4}])
    def test_it_goes_there_and_back(self, tmp_path: Path, change: dict[str, Any]) -> None:
        of_the_run = dataclasses.replace(MACHINE, **change)
        run = filled(tmp_path, machine=of_the_run)
        run.remember(profile(key=key(machine=of_the_run, torch=torch.__version__)))
        other = store_in(tmp_path / "to")
        written = store_in(tmp_path / "from").export(tmp_path / "store.tar")
        taken = other.import_(tmp_path / "store.tar", sha256=written.sha256)
        assert (written.left_out, taken.compiler_files, taken.left_out) == (0, 2, ())
        assert tree(other) == tree(run)
        there = store_in(tmp_path / "to", machine=of_the_run).compiler_cache_dir
        assert (there / "ab" / "cabx.so").read_bytes() == b"code"
        assert {row.text for row in other.ls() if row.kind == "compiler"} == {
            "2 entries of this machine and PyTorch"
        }

    def test_without_a_verdict_nothing_tells_that_it_is_of_this_machine(self, tmp_path: Path) -> None:
        filled(tmp_path, machine=dataclasses.replace(MACHINE, threads=1))
        (tmp_path / "from" / "store" / PROFILE).write_text("{}")
        assert store_in(tmp_path / "from").export(tmp_path / "store.tar").left_out == 9

    def test_a_verdict_of_another_torch_tells_nothing(self, tmp_path: Path) -> None:
        of_the_run = dataclasses.replace(MACHINE, threads=1)
        filled(tmp_path, machine=of_the_run).remember(profile(key=key(machine=of_the_run, torch="2.0.0")))
        assert store_in(tmp_path / "from").export(tmp_path / "store.tar").left_out == 9

    def test_a_folder_that_others_can_write_to_is_refused(self, tmp_path: Path) -> None:
        one = filled(tmp_path)
        one.compiler_cache_dir.chmod(0o777)
        with pytest.raises(StoreError, match="others can write to it"):
            one.export(tmp_path / "store.tar")


class TestCodeOfAnotherPlace:
    @pytest.mark.parametrize("change", [{"cpu": "Other 1"}, {"vector": "AVX512"}, {"system": "Other"}])
    def test_another_machine(self, tmp_path: Path, change: dict[str, Any]) -> None:
        one = filled(tmp_path, machine=dataclasses.replace(MACHINE, **change))
        other = store_in(tmp_path / "to")
        one.export(tmp_path / "store.tar")
        taken = other.import_(tmp_path / "store.tar")
        assert (taken.profiles, taken.compiler_files) == (1, 0)
        assert taken.left_out[0].startswith("2 files of compiled code of another machine, PyTorch or Python")
        assert not list(other.folder.glob("compiler/*/*"))

    def test_another_torch(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        one, other = filled(tmp_path), store_in(tmp_path / "to")
        one.export(tmp_path / "store.tar")
        monkeypatch.setattr(torch, "__version__", "2.99.0")
        taken = other.import_(tmp_path / "store.tar")
        assert (taken.profiles, taken.compiler_files) == (1, 0)
        assert "here is torch 2.99.0" in taken.left_out[0]

    def test_it_is_not_exported_either_and_its_size_is_told(self, tmp_path: Path) -> None:
        filled(tmp_path, machine=dataclasses.replace(MACHINE, cpu="Other 1"))
        written = store_in(tmp_path / "from").export(tmp_path / "store.tar")
        assert (written.files, written.left_out) == (2, len(b"code") + len(b"graph"))
        assert store_in(tmp_path / "from").export(tmp_path / "b.tar", compiler_cache=False).left_out == 0

    def test_a_tag_that_does_not_fit_its_manifest(self, tmp_path: Path) -> None:
        other = store_in(tmp_path / "to")
        name = f"compiler/{'0' * 16}/ab/c.so"
        forge(tmp_path / "store.tar", {name: b"code"}, manifest=manifest({name: b"code"}))
        assert other.import_(tmp_path / "store.tar").compiler_files == 0


def manifest(content: dict[str, bytes], /, **changes: Any) -> bytes:
    contents = {
        n: dataclasses.asdict(Content(size=len(d), sha256=hashlib.sha256(d).hexdigest()))
        for n, d in content.items()
    }
    head = Manifest(package="0.1.0", torch=torch.__version__, machine=MACHINE, files={})
    document = json.loads(head.to_bytes())
    document["record"]["files"] = contents
    document["record"].update(changes)
    return json.dumps(document).encode()


def forge(
    path: Path, files: dict[str, bytes], manifest: bytes | None, change: Callable[[Any], Any] = lambda m: m
) -> None:
    """An archive as somebody with bad intentions would write it."""
    with tarfile.open(path, "w") as tar:
        for name, data in ({**files, "manifest.json": manifest} if manifest else files).items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            member = change(member) if name != "manifest.json" else member
            tar.addfile(member, io.BytesIO(data) if member.isreg() else None)


def refused(tmp_path: Path, match: str, sha256: str | None = None) -> None:
    store = store_in(tmp_path / "to")
    with pytest.raises(StoreError, match=match):
        store.import_(tmp_path / "store.tar", sha256=sha256)
    assert tree(store) == {}, "nothing was placed, and nothing is left over"
    assert not (tmp_path / "evil").exists()


GOOD = {PROFILE: profile().to_bytes()}


def test_the_forged_archive_without_a_flaw_is_taken(tmp_path: Path) -> None:
    forge(tmp_path / "store.tar", GOOD, manifest(GOOD))
    assert store_in(tmp_path / "to").import_(tmp_path / "store.tar").profiles == 1


@pytest.mark.parametrize(
    "name",
    [
        "../evil",
        "../../evil",
        "/evil",
        "profiles/../../evil",
        "profiles/../evil.json",
        "profiles/evil.json",
        "profiles/sub/" + "0" * 32 + ".json",
        "samples/" + "0" * 15 + "/.json",
        "compiler/evil",
        f"compiler/{'0' * 16}",
        f"compiler/{'0' * 16}/../../evil",
        f"compiler/{'0' * 16}/.hidden",
        f"compiler/{'0' * 16}/a//b",
        f"compiler/{'0' * 16}/a\\b",
        f"compiler/{'0' * 16}/a:b",
        f"compiler/{'0' * 16}/a\nb",
        f"compiler/{'0' * 16}/" + "a/" * 6 + "b",
        f"compiler/{'0' * 16}/" + "a" * 201,
        f"compiler/{'0' * 16}/prewarm-abc/settings.json",
        "records.lock",
        "users/1-1-aa.lock",
        "C:/evil",
        "",
    ],
)
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    assert not is_known_name(name)
    files = {name: b"x"}
    forge(tmp_path / "store.tar", files, manifest({}))
    refused(tmp_path, "does not belong into a store")
    forge(tmp_path / "store.tar", {}, manifest(files))
    refused(tmp_path, "does not belong into a store")


@pytest.mark.parametrize(
    "kind",
    [
        tarfile.SYMTYPE,
        tarfile.LNKTYPE,
        tarfile.DIRTYPE,
        tarfile.FIFOTYPE,
        tarfile.CHRTYPE,
        tarfile.BLKTYPE,
        tarfile.CONTTYPE,
    ],
)
def test_members_that_are_no_plain_files_are_refused(tmp_path: Path, kind: bytes) -> None:
    def change(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.type, member.linkname = kind, "../../evil"
        return member

    forge(tmp_path / "store.tar", GOOD, manifest(GOOD), change)
    refused(tmp_path, "is no plain file")


class TestTampered:
    def test_a_bit_in_a_file(self, tmp_path: Path) -> None:
        changed = {PROFILE: GOOD[PROFILE].replace(b'"good"', b'"bad" ')}
        forge(tmp_path / "store.tar", changed, manifest(GOOD))
        refused(tmp_path, "damaged or tampered with")

    def test_a_file_more_than_the_manifest_has(self, tmp_path: Path) -> None:
        name = f"compiler/{'0' * 16}/ab/c.so"
        forge(tmp_path / "store.tar", {**GOOD, name: b"code"}, manifest(GOOD))
        refused(tmp_path, "c.so.*damaged or tampered with")

    def test_a_file_less(self, tmp_path: Path) -> None:
        forge(tmp_path / "store.tar", {}, manifest(GOOD))
        refused(tmp_path, "damaged or tampered with")

    def test_a_file_twice(self, tmp_path: Path) -> None:
        forge(tmp_path / "store.tar", GOOD, manifest(GOOD))
        with tarfile.open(tmp_path / "store.tar", "a") as tar:
            member = tarfile.TarInfo(PROFILE)
            member.size = 1
            tar.addfile(member, io.BytesIO(b"x"))
        refused(tmp_path, "is in it twice")

    def test_a_profile_under_the_name_of_another(self, tmp_path: Path) -> None:
        files = {PROFILE: profile("p2").to_bytes()}
        forge(tmp_path / "store.tar", files, manifest(files))
        refused(tmp_path, "profile of another key")

    def test_everything_with_its_hashes_but_not_the_hash_that_was_told(self, tmp_path: Path) -> None:
        forge(tmp_path / "store.tar", GOOD, manifest(GOOD))
        refused(tmp_path, "its SHA-256 is", sha256="0" * 64)

    @pytest.mark.parametrize(
        ("content", "match"),
        [
            (None, "no manifest"),
            (b"{}", "no file of the kind"),
            (b"\x80", "cannot be read as JSON"),
            (manifest(GOOD).replace(b'"format": 1', b'"format": 2'), "format 2"),
            (manifest(GOOD, files=[]), "no mapping"),
            (manifest(GOOD, machine={}), "missing or unknown fields"),
            (manifest(GOOD, files={PROFILE: {"size": -1, "sha256": "0" * 64}}), "size is -1"),
            (manifest(GOOD, files={PROFILE: {"size": 1, "sha256": "0"}}), "64 hexadecimal digits"),
        ],
    )
    def test_manifest(self, tmp_path: Path, content: bytes | None, match: str) -> None:
        forge(tmp_path / "store.tar", GOOD, content)
        refused(tmp_path, match)


class TestBombs:
    def test_too_many_bytes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        forge(tmp_path / "store.tar", GOOD, manifest(GOOD))
        monkeypatch.setattr(archive, "MOST_BYTES", 1000)
        refused(tmp_path, "unpacks to more than 1,000 bytes")

    def test_too_many_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        forge(tmp_path / "store.tar", GOOD, manifest(GOOD))
        monkeypatch.setattr(archive, "MOST_FILES", 1)
        refused(tmp_path, "or 1 files")

    def test_a_profile_of_many_bytes(self, tmp_path: Path) -> None:
        files = {PROFILE: profile().to_bytes() + b" " * 100_000}
        forge(tmp_path / "store.tar", files, manifest(files))
        refused(tmp_path, "more than 65,536 bytes")

    def test_a_large_manifest(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        forge(tmp_path / "store.tar", GOOD, manifest(GOOD))
        monkeypatch.setattr(archive, "MOST_MANIFEST_BYTES", 100)
        monkeypatch.setattr(importing, "MOST_MANIFEST_BYTES", 100, raising=False)
        refused(tmp_path, "its manifest has")

    @pytest.mark.parametrize("size", [1 << 40, 100 << 20])
    def test_a_header_that_claims_to_be_large_is_not_read_into_memory(
        self, tmp_path: Path, size: int
    ) -> None:
        header = tarfile.TarInfo("x")
        header.type, header.size = tarfile.XHDTYPE, size
        data = header.tobuf(tarfile.GNU_FORMAT)
        with gzip.open(tmp_path / "store.tar", "wb", compresslevel=1) as file:
            file.write(data + b"\0" * (1 << 20))
        refused(tmp_path, f"a header of {size:,} bytes is no header")

    def test_a_sparse_file(self, tmp_path: Path) -> None:
        def change(member: tarfile.TarInfo) -> tarfile.TarInfo:
            member.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.size": str(1 << 50)}
            return member

        forge(tmp_path / "store.tar", GOOD, manifest(GOOD), change)
        refused(tmp_path, "not taken in")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: b"not an archive" * 100,
        lambda data: data[: data.index(b"manifest.json") + 700],
        lambda data: data[: data.index(b"manifest.json")],
        lambda data: data[:512],
        lambda data: os.urandom(4096),
        lambda data: gzip.compress(data)[:-200],
        lambda data: gzip.compress(data)[:40] + b"\xff" * 200,
        lambda data: data[:400] + b"\xff" * 40 + data[440:],
    ],
)
def test_damaged_archives_are_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    forge(tmp_path / "store.tar", GOOD, manifest(GOOD))
    path = tmp_path / "store.tar"
    path.write_bytes(damage(path.read_bytes()))
    refused(tmp_path, "not taken in")


def test_a_missing_archive_is_an_error(tmp_path: Path) -> None:
    refused(tmp_path, "No such file")


def test_the_lock_is_respected(tmp_path: Path) -> None:
    one, other = filled(tmp_path), store_in(tmp_path / "to", lock_timeout=0)
    one.export(tmp_path / "store.tar")
    holder = store_in(tmp_path / "to")
    with holder._folder.locked("compiler"), pytest.raises(StoreError, match="is locked"):
        other.import_(tmp_path / "store.tar")
    with holder._folder.locked("records"):
        taken = other.import_(tmp_path / "store.tar")
    assert taken.left_out == ("1 profiles or compile costs that could not be written",)
