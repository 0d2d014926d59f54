"""Every option is checked once, at construction, and refused by name."""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import itertools
import json
import math
import pickle
import re
from typing import Any

import pytest

from lightning_hotcompile.config import CUDA_GRAPH_MODES, MODES, SCOPES, HotCompileConfig
from lightning_hotcompile.errors import ConfigError


def refused(**options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        HotCompileConfig(**options)
    return str(caught.value)


def backend(gm: Any, example_inputs: Any) -> Any:
    return gm.forward


REFUSED: dict[str, tuple[list[Any], str]] = {
    "threshold": ([-1, 1.5, True, "10", None], "a whole number of 0 or more"),
    "scope": (["blocks", "", None, "STEP", 1], "'auto', 'step', 'regions', 'module', 'pattern'"),
    "targets": (["net.*", 3, None, {"a"}, [""], [" "], ["a", 3], b"net"], ""),
    "keep_eager": (["net.*", 3, None, [None]], ""),
    "compile_anyway": (["net.*", 3, None, ["", "a"]], ""),
    "backend": (["", None, 3, ["inductor"]], "backend"),
    "mode": (["fast", "", True, 1], "'default', 'reduce-overhead'"),
    "dynamic": (["yes", "True", 1, 0, ""], "'auto', True, False, None"),
    "fullgraph": ([1, 0, "true", None], "True, False"),
    "options": ([3, "a=1", [("a", 1)]], "a mapping of Inductor options"),
    "cost_gate": ([1, "auto", None], "True, False"),
    "fused_optimizer": ([1, "auto", None], "True, False"),
    "keep_freed_memory": ([1, "auto", None], "True, False"),
    "min_speedup": ([-0.1, 100, math.nan, math.inf, True, "1.02", None], "number|ratio"),
    "random": (["inductor", "", None, True], "'eager', 'backend'"),
    "stages": (["train", 3, None, (), ("fit",), ("train", "")], ""),
    "compile_timeout": ([0, -1.0, math.inf, math.nan, True, "10"], "seconds above 0"),
    "prewarm": ([1, 0, "yes", None], "'auto', True, False"),
    "store": (["", 3, True], "'auto', the path of a folder, or None"),
    "compile_optimizer": ([1, 0, "yes", None, "step"], "'auto', True, False"),
    "max_flips": ([0, -1, 2.0, True, "3"], "a whole number of 1 or more"),
    "max_signatures": ([0, -1, 2.0, False, None], "a whole number of 1 or more"),
    "parity": (["on", "", None, True], "'auto', 'off', 'warn', 'raise'"),
    "on_error": (["ignore", "", None, True], "'eager', 'raise'"),
    "log_prefix": (["", "/", "//", True, 3], "a non-empty name"),
    "verbose": ([1, "yes", None], "True, False"),
    "event_log": (["", 3, True], "the path of a file, or None"),
}
CASES = [(name, value, allowed) for name, (values, allowed) in REFUSED.items() for value in values]


@pytest.mark.parametrize(("name", "value", "allowed"), CASES, ids=lambda v: repr(v)[:30])
def test_a_wrong_value_is_refused_with_name_value_and_what_is_allowed(
    name: str, value: Any, allowed: str
) -> None:
    message = refused(**{name: value})
    assert message.startswith(f"{name}={value!r} is not allowed: ")
    remedy = message.split("is not allowed: ")[1]
    assert re.search(allowed if name == "min_speedup" else re.escape(allowed), remedy)
    assert len(remedy) > 10


def test_every_option_has_a_refusal_here() -> None:
    assert set(REFUSED) == set(HotCompileConfig.names())


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="treshold"):
        HotCompileConfig(treshold=3)  # type: ignore[call-arg]


def test_options_are_given_by_keyword_only() -> None:
    with pytest.raises(TypeError):
        HotCompileConfig(10)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("option", "value", "near"), [("scope", "region", "'regions'"), ("mode", "max-autotun", "'max-autotune'")]
)
def test_a_misspelt_value_gets_near_names(option: str, value: str, near: str) -> None:
    assert f"did you mean {near}" in refused(**{option: value})


@pytest.mark.parametrize(
    "options",
    [
        *({"scope": s, "targets": ["a"] if s == "pattern" else []} for s in SCOPES),
        *({"mode": m} for m in (None, *MODES)),
        *({"dynamic": d} for d in ("auto", True, False, None)),
        *({"compile_optimizer": c} for c in ("auto", True, False)),
        *({"on_error": e} for e in ("eager", "raise")),
        *({"parity": p} for p in ("auto", "off", "warn", "raise")),
        *({"random": r} for r in ("eager", "backend")),
        {"stages": ("train", "validate", "test", "predict")},
        {"compile_timeout": 30},
        {"compile_timeout": None},
        *({"prewarm": p} for p in ("auto", True, False)),
        {"store": None},
        {"store": "some/folder"},
        {"threshold": 0},
        {"min_speedup": 0},
        {"min_speedup": 99.9},
        {"max_flips": 1, "max_signatures": 1},
        {"backend": backend},
        {"options": {}},
        {"options": {"max_autotune": True}},
        {"event_log": "events.jsonl"},
        {"log_prefix": "a/b"},
        {"log_prefix": None},
        {"scope": "auto", "targets": ("net.*",)},
        {"scope": "module", "targets": ("net",)},
    ],
    ids=lambda options: ", ".join(f"{k}={getattr(v, '__name__', v)}" for k, v in options.items()),
)
def test_an_allowed_value_is_taken(options: dict[str, Any]) -> None:
    config = HotCompileConfig(**options)
    for name, value in options.items():
        assert getattr(config, name) == (tuple(value) if name == "targets" else value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "max-autotune", "options": {"max_autotune": True}}, ["mode='max-autotune'", "options={"]),
        ({"scope": "pattern"}, ["scope='pattern'", "targets"]),
        ({"scope": "step", "targets": ["head"]}, ["targets=['head']", "scope='step'"]),
        ({"scope": "regions", "targets": ["head"]}, ["targets=['head']", "scope='regions'"]),
    ],
    ids=str,
)
def test_options_that_contradict_each_other_are_refused_with_both(
    options: dict[str, Any], words: list[str]
) -> None:
    message = refused(**options)
    assert all(word in message for word in words)


def test_the_config_is_frozen_hashable_and_comparable() -> None:
    config = HotCompileConfig(options={"max_autotune": True})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.threshold = 3  # type: ignore[misc]
    assert hash(config) == hash(HotCompileConfig(options={"max_autotune": True}))
    assert HotCompileConfig() == HotCompileConfig()
    assert HotCompileConfig() != HotCompileConfig(threshold=11)


def test_a_changed_copy_is_checked_again() -> None:
    assert dataclasses.replace(HotCompileConfig(), threshold=3).threshold == 3
    with pytest.raises(ConfigError, match="threshold=-3"):
        dataclasses.replace(HotCompileConfig(), threshold=-3)


def test_names_from_yaml_become_tuples() -> None:
    config = HotCompileConfig(targets=["a", "b"], keep_eager=["c"], compile_anyway=[])  # type: ignore[arg-type]
    assert (config.targets, config.keep_eager, config.compile_anyway) == (("a", "b"), ("c",), ())


def test_names_from_hydra_are_taken() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    given = omegaconf.OmegaConf.create({"targets": ["a", "b"], "options": {"max_autotune": True}})
    config = HotCompileConfig(**given)
    assert config.targets == ("a", "b")
    assert config.options == {"max_autotune": True}


def test_all_defaults_are_plain_types() -> None:
    defaults = dataclasses.asdict(HotCompileConfig())
    assert json.loads(json.dumps(defaults)) == {
        name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()
    }


def test_a_config_survives_pickle_and_deepcopy() -> None:
    config = HotCompileConfig(targets=("a",), options={"max_autotune": True})
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config


@pytest.mark.parametrize("mode", MODES)
def test_cuda_graphs_by_mode(mode: str) -> None:
    assert HotCompileConfig(mode=mode).uses_cuda_graphs == (mode in CUDA_GRAPH_MODES)


@pytest.mark.parametrize(
    ("options", "expected"),
    [(None, False), ({}, False), ({"triton.cudagraphs": True}, True), ({"triton.cudagraphs": False}, False)],
)
def test_cuda_graphs_by_options(options: dict[str, Any] | None, expected: bool) -> None:
    assert HotCompileConfig(options=options).uses_cuda_graphs is expected


@pytest.mark.parametrize(("backend", "expected"), [("cudagraphs", True), ("aot_eager", False)])
def test_cuda_graphs_by_backend(backend: str, expected: bool) -> None:
    assert HotCompileConfig(backend=backend).uses_cuda_graphs is expected


def test_each_option_is_documented_in_place() -> None:
    body = ast.parse(inspect.getsource(HotCompileConfig)).body[0].body  # type: ignore[attr-defined]
    documented = {
        field.target.id
        for field, after in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
    }
    assert documented == set(HotCompileConfig.names())
