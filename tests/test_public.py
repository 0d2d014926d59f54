"""What a user can import, and that every option reaches the callback."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.resources
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lightning_hotcompile
from lightning_hotcompile import HotCompile, HotCompileConfig, HotCompileError
from lightning_hotcompile.errors import ConfigError

PUBLIC = {
    "CompilePlan",
    "HotCompile",
    "HotCompileConfig",
    "HotCompileError",
    "Report",
    "StepDetector",
    "StepSignature",
    "plan_compile",
}


def arguments() -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(HotCompile).parameters)


def test_the_public_names_are_these() -> None:
    assert set(lightning_hotcompile.__all__) == PUBLIC
    assert len(lightning_hotcompile.__all__) == len(PUBLIC)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_each_public_name_is_there_with_a_docstring(name: str) -> None:
    found = getattr(lightning_hotcompile, name)
    assert found.__name__ == name
    assert (found.__doc__ or "").strip()
    assert not found.__doc__.startswith(f"{name}(")  # dataclasses write the signature if there is none


def test_the_package_offers_nothing_else() -> None:
    assert all(hasattr(lightning_hotcompile, name) for name in PUBLIC)  # each is imported when asked for
    rooms_and_modules = {
        name.split(".")[1] for name in sys.modules if name.startswith("lightning_hotcompile.")
    }
    offered = {n for n in vars(lightning_hotcompile) if not n.startswith("_")}
    assert offered - rooms_and_modules == PUBLIC


def test_the_public_names_are_listed_before_they_are_imported() -> None:
    code = "import lightning_hotcompile; print(*dir(lightning_hotcompile))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) >= PUBLIC


def test_another_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="'HotCompiler'"):
        _ = lightning_hotcompile.HotCompiler  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="HotCompiler"):
        exec("from lightning_hotcompile import HotCompiler")


@pytest.mark.parametrize(
    "error",
    [
        AttributeError("type object 'OutputGraph' has no attribute 'create_proxy'"),
        KeyError("create_proxy"),
        ImportError("cannot import name 'create_proxy'", name="torch._dynamo"),
    ],
)
def test_a_torch_without_a_private_name_is_told(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = importlib.import_module

    def import_module(name: str) -> Any:
        if name.startswith("lightning_hotcompile."):
            raise error
        return usual(name)

    monkeypatch.setattr(importlib, "import_module", import_module)
    monkeypatch.delitem(vars(lightning_hotcompile), "HotCompile")
    with pytest.raises(ImportError, match=r"does not know torch .*create_proxy.*install torch 2\.13"):
        exec("from lightning_hotcompile import HotCompile")


def test_every_option_is_an_argument_with_the_same_default_and_nothing_else_is() -> None:
    options = {name: p.default for name, p in inspect.signature(HotCompileConfig).parameters.items()}
    assert {name: p.default for name, p in arguments().items()} == options
    assert list(arguments()) == list(HotCompileConfig.names())


def test_each_argument_is_explained_where_an_editor_and_a_command_line_show_it() -> None:
    text = inspect.getdoc(HotCompile) or ""
    lines = text[text.index("Args:") : text.index("Raises:")].splitlines()[1:]
    told = [line.strip() for line in lines if line.strip()]
    assert [line.partition(":")[0] for line in told] == list(HotCompileConfig.names())
    assert all(len(line.partition(":")[2]) > 10 for line in told)


@pytest.mark.parametrize("name", ["store", "event_log"])
def test_a_path_is_a_path(name: str, tmp_path: Path) -> None:
    callback = HotCompile(**{name: tmp_path / "here"})  # type: ignore[arg-type]
    assert getattr(callback.config, name) == str(tmp_path / "here")


def test_the_defaults_make_the_default_config() -> None:
    assert HotCompile().config == HotCompileConfig()


OTHER_VALUES: dict[str, Any] = {
    "threshold": 3,
    "scope": "module",
    "targets": ("net",),
    "keep_eager": ("a",),
    "compile_anyway": ("b",),
    "backend": "eager",
    "mode": "default",
    "dynamic": True,
    "fullgraph": True,
    "options": {"max_autotune": True},
    "cost_gate": False,
    "min_speedup": 1.5,
    "random": "backend",
    "stages": ("validate",),
    "compile_timeout": 10.0,
    "prewarm": False,
    "fused_optimizer": False,
    "keep_freed_memory": False,
    "store": "a/folder",
    "compile_optimizer": True,
    "max_flips": 1,
    "max_signatures": 2,
    "parity": "warn",
    "on_error": "raise",
    "log_prefix": "hot",
    "verbose": True,
    "event_log": "events.jsonl",
}


@pytest.mark.parametrize("name", HotCompileConfig.names())
def test_each_argument_reaches_the_config(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    callback = HotCompile(**{name: OTHER_VALUES[name]})
    assert getattr(callback.config, name) == OTHER_VALUES[name]


@pytest.mark.parametrize("name", ["targets", "keep_eager", "compile_anyway"])
@pytest.mark.parametrize("value", ["net.*", 3, None])
def test_the_callback_refuses_what_the_config_refuses(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}="):
        HotCompile(**{name: value})


def test_all_arguments_have_types_that_yaml_and_the_command_line_can_give() -> None:
    for name, parameter in arguments().items():
        assert isinstance(parameter.annotation, str), name
        names = parameter.annotation.replace("|", " ").replace("[", " ").replace("]", " ").replace(",", " ")
        plain = {
            "int",
            "str",
            "float",
            "bool",
            "None",
            "Any",
            "Path",
            "Sequence",
            "Mapping",
            "Callable",
            "...",
        }
        assert set(names.split()) <= plain, name


def test_the_callback_comes_from_yaml_by_jsonargparse() -> None:
    jsonargparse = pytest.importorskip("jsonargparse")
    from lightning.pytorch import Callback

    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--callback", type=Callback)
    text = {
        "class_path": "lightning_hotcompile.HotCompile",
        "init_args": {"threshold": 3, "scope": "pattern", "targets": ["net.*"], "dynamic": "auto"},
    }
    instantiate = getattr(parser, "instantiate", parser.instantiate_classes)  # the newer name, or the older
    callback = instantiate(parser.parse_object({"callback": text})).callback
    assert callback.config == HotCompileConfig(threshold=3, scope="pattern", targets=("net.*",))


def test_errors_have_one_base() -> None:
    assert issubclass(ConfigError, HotCompileError)


def test_the_package_is_typed_and_has_its_version() -> None:
    assert importlib.resources.files(lightning_hotcompile).joinpath("py.typed").is_file()
    assert lightning_hotcompile.__version__ == importlib.metadata.version("lightning-hotcompile")


def test_watch_and_plan_import_no_lightning() -> None:
    # The package itself names the callback, so the rooms are imported as if they stood alone.
    code = (
        "import importlib.util, pathlib, sys, types\n"
        "spec = importlib.util.find_spec('lightning_hotcompile')\n"
        "package = types.ModuleType('lightning_hotcompile')\n"
        "package.__path__ = list(spec.submodule_search_locations)\n"
        "sys.modules['lightning_hotcompile'] = package\n"
        "import lightning_hotcompile.watch.detector, lightning_hotcompile.watch.signature\n"
        "import lightning_hotcompile.watch.opgraph, lightning_hotcompile.plan.planner\n"
        "import lightning_hotcompile.machine\n"
        "print([m for m in sys.modules if m.partition('.')[0] in ('lightning', 'pytorch_lightning')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
