"""Handlers of the user's around operations that fail on some data only."""

from __future__ import annotations

import contextlib
import importlib.util
import linecache
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hotcompile.swap.tracing.caught_errors import Raised, passed_on
from tests.hot import assert_same, hot
from tests.models import Net, fit, seeded

FAILING = 20
"""The step whose batch has no factor."""

SEVERAL = (20, 21, 22, 23)
"""Of which some are compiled, while compiled steps are timed against eager ones."""


class Falls(Net):
    """A step with a Cholesky factor, and another way where there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.ways: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        x, y = batch
        self.log("before", x.mean())
        matrix = torch.eye(3) * (1.0 - 2.0 * (x[0, 0] > 50))
        return self.guarded(matrix, F.cross_entropy(self(x), y))

    def before(self) -> None:
        pass

    def guarded(self, matrix: Tensor, loss: Tensor) -> Tensor | None:
        loss = loss * 2
        self.before()
        try:
            factor = torch.linalg.cholesky(matrix)
        except RuntimeError:
            self.ways.append("other")
            factor = torch.linalg.cholesky(matrix.abs() + 1e6 * torch.eye(3))
        else:
            self.ways.append("usual")
        return loss + 0.1 * factor.tanh().sum()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training and self.global_step == FAILING:
            batch[0][0, 0] = 100.0
        return batch


class BreaksBefore(Falls):
    """The graph breaks in the same function, before the handler."""

    def before(self) -> None:
        torch._dynamo.graph_break()


class Asserts(Falls):
    """An assertion on a tensor is an operation, too."""

    def guarded(self, matrix: Tensor, loss: Tensor) -> Tensor | None:
        try:
            assert matrix[0, 0] > 0
        except AssertionError:
            self.ways.append("other")
            return loss * 0.5
        self.ways.append("usual")
        return loss


class Skips(Falls):
    """The same handler around all of the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        try:
            loss = self.whole(batch)
            self.ways.append("usual")
            return loss
        except torch.linalg.LinAlgError:
            self.ways.append("other")
            return None

    def whole(self, batch: Any) -> Tensor:
        x, y = batch
        matrix = torch.eye(3) * (1.0 - 2.0 * (x[0, 0] > 50))
        return F.cross_entropy(self(x), y) + torch.linalg.cholesky(matrix).sum()


class Suppresses(Falls):
    """No ``try``, but the same."""

    def guarded(self, matrix: Tensor, loss: Tensor) -> Tensor | None:
        self.ways.append("other")
        with contextlib.suppress(ValueError, RuntimeError):
            loss = loss + torch.linalg.cholesky(matrix).sum()
            self.ways[-1] = "usual"
        return loss


class NoFactor(ValueError):
    """Of the user's own."""


def factor(matrix: Tensor) -> Tensor:
    try:
        return torch.linalg.cholesky(matrix)
    except RuntimeError as error:
        raise NoFactor("negative") from error


class Renames(Falls):
    """The error comes to the handler under another name, from a function below."""

    def guarded(self, matrix: Tensor, loss: Tensor) -> Tensor | None:
        try:
            loss = loss + factor(matrix).sum()
        except NoFactor:
            self.ways.append("other")
        else:
            self.ways.append("usual")
        return loss


class Looks(Falls):
    """An index that is out of range, in a module below."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table(self.ways)

    def guarded(self, matrix: Tensor, loss: Tensor) -> Tensor | None:
        return loss + self.table((matrix[0, 0] < 0).long() * 7)


class Table(nn.Module):
    def __init__(self, ways: list[str]) -> None:
        super().__init__()
        self.ways = ways
        self.rows = nn.Embedding(4, 1)

    def forward(self, row: Tensor) -> Tensor:
        try:
            return self.rows(row).sum()
        except IndexError:
            self.ways.append("other")
            return self.rows.weight.sum()


class OnlyNoFactor:
    """A context manager of the user's that goes on after an error of linear algebra."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, torch.linalg.LinAlgError)


class Counts(Falls):
    """Counts the batches with a factor, and has no ``try`` around the operation."""

    usual = 0

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training and self.global_step in SEVERAL:
            batch[0][0, 0] = 100.0
        return batch

    def guarded(self, matrix: Tensor, loss: Tensor) -> Tensor | None:
        quiet = self.manager()
        with quiet:
            loss = loss + torch.linalg.cholesky(matrix).sum()
            self.usual += 1
        return loss

    def manager(self) -> contextlib.AbstractContextManager[Any]:
        return OnlyNoFactor()


class CountsUnderSuppress(Counts):
    def manager(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.suppress(KeyError, RuntimeError)


class AsksAGenerator(Counts):
    """The operations are those of a generator, which is made outside of the ``try``."""

    def guarded(self, matrix: Tensor, loss: Tensor) -> Tensor | None:
        return loss + self.total(torch.linalg.cholesky(matrix * n) for n in (1, 2))

    def total(self, factors: Iterator[Tensor]) -> Any:
        try:
            found = sum(factor.sum() for factor in factors)
        except RuntimeError:
            return 0.0
        self.usual += 1
        return found


class RenamesUnderSuppress(Falls):
    """A manager that a method makes swallows the error under its other name."""

    def quiet(self) -> Any:
        return contextlib.suppress(NoFactor)

    def guarded(self, matrix: Tensor, loss: Tensor) -> Tensor | None:
        self.ways.append("other")
        with self.quiet():
            loss = loss + factor(matrix).sum()
            self.ways[-1] = "usual"
        return loss


class Translated(Counts):
    """The error has another name for who calls the function, which is compiled by itself."""

    def guarded(self, matrix: Tensor, loss: Tensor) -> Tensor | None:
        torch._dynamo.graph_break()
        try:
            loss = loss + factor(matrix).sum()
        except NoFactor:
            return loss
        self.usual += 1
        return loss


@pytest.mark.parametrize("model_class", [Counts, CountsUnderSuppress, AsksAGenerator, Translated])
def test_what_is_no_handler_by_its_looks_runs_as_well(model_class: type[Counts]) -> None:
    plain, model = seeded(model_class), seeded(model_class)
    callback = hot(scope="step", compile_optimizer=False, on_error="eager")
    fit(plain)
    fit(model, [callback])
    assert model.usual == plain.usual == 48 - len(SEVERAL)
    assert_same(plain, model, tolerance=1e-6)


@pytest.mark.parametrize("scope", ["step", "auto", "regions"])
@pytest.mark.parametrize(
    "model_class", [Falls, BreaksBefore, Asserts, Skips, Looks, Suppresses, Renames, RenamesUnderSuppress]
)
def test_a_handler_runs_as_without_the_callback(model_class: type[Falls], scope: str) -> None:
    plain, model = seeded(model_class), seeded(model_class)
    callback = hot(scope=scope, compile_optimizer=False, on_error="eager")
    fit(plain)
    fit(model, [callback])
    assert plain.ways.count("other") == 1
    assert model.ways == plain.ways
    assert_same(plain, model, tolerance=1e-6)
    assert [region for region in callback.report.regions if region.proven], callback.report.reason


class RenamesForNobody(Net):
    """As the aggregations of PyG: an error of another kind says more, and nobody waits for it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + factor(torch.eye(3) + batch[0].var()).mean()


def test_an_error_with_another_name_is_no_graph_break_where_nobody_catches_it() -> None:
    model, callback = seeded(RenamesForNobody), hot(scope="step", compile_optimizer=False)
    fit(model, [callback])
    (region,) = callback.report.regions
    assert (region.graphs, callback.report.graph_breaks) == (1, 0)


class AsksInTry(Net):
    """What libraries do to find out where they are: no operation stands in the ``try``."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        try:
            traced = torch.compiler.is_compiling()
        except Exception:
            traced = False
        return loss if traced else loss * 1.0


def test_no_operation_in_the_try_is_no_graph_break() -> None:
    model, callback = seeded(AsksInTry), hot(scope="step", compile_optimizer=False)
    fit(model, [callback])
    (region,) = callback.report.regions
    assert (region.graphs, callback.report.graph_breaks) == (1, 0)


class Timed:
    """A context manager that lets errors pass."""

    def __init__(self, times: list[int]) -> None:
        self.times = times

    def __enter__(self) -> None:
        self.times.append(0)

    def __exit__(self, *_: object) -> None:
        self.times[-1] += 1


@contextlib.contextmanager
def timed(times: list[int]) -> Iterator[None]:
    times.append(0)
    try:
        yield
    finally:
        times[-1] += 1


class InManagers(Net):
    """Whose steps stand in a manager that swallows nothing."""

    manager: Callable[[list[int]], contextlib.AbstractContextManager[None]]

    def __init__(self) -> None:
        super().__init__()
        self.times: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.times = []
        with self.manager(self.times):
            return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("manager", [Timed, timed])
def test_a_manager_that_lets_errors_pass_is_no_graph_break(manager: Any) -> None:
    kind = type("InOne", (InManagers,), {"manager": staticmethod(manager)})
    model, callback = seeded(kind), hot(scope="step", compile_optimizer=False)
    fit(model, [callback])
    (region,) = callback.report.regions
    assert (region.graphs, callback.report.graph_breaks) == (1, 0)
    assert model.times == [1]


def test_what_stands_around_is_compiled() -> None:
    model, callback = seeded(Skips), hot(scope="step", compile_optimizer=False)
    fit(model, [callback])
    (region,) = callback.report.regions
    assert region.proven
    assert callback.report.phase == "steady"
    assert region.runs >= model.ways.count("usual") // 2


def bare() -> Any:
    try:
        return torch.ones(1)
    except:  # noqa: E722
        return None


def everything() -> Any:
    try:
        return torch.ones(1)
    except Exception:
        return None


def commented() -> Any:
    text = """
at the margin"""
    # and a comment there
    try:
        return torch.ones(1), text
    except Exception:
        return None


def several() -> Any:
    try:
        return torch.ones(1)
    except (KeyError, torch.OutOfMemoryError):
        return None


def sometimes() -> Any:
    try:
        return torch.ones(1)
    except RuntimeError as error:
        if "memory" in str(error):
            return None
        raise


def by_a_variable(kind: type[BaseException] = RuntimeError) -> Any:
    try:
        return torch.ones(1)
    except kind:
        return None


ALL_OF_THEM = (KeyError, IndexError)


def by_a_tuple() -> Any:
    try:
        return torch.ones(1)
    except ALL_OF_THEM:
        return None


def make() -> Any:
    def inside() -> Any:
        try:
            return torch.ones(1)
        except RuntimeError:
            return None

    return inside


def suppresses() -> Any:
    with torch.no_grad(), contextlib.suppress(KeyError, RuntimeError):
        return torch.ones(1)


def suppresses_a_tuple() -> Any:
    with contextlib.suppress(*ALL_OF_THEM):
        return torch.ones(1)


def renamed_inside() -> Any:
    try:
        try:
            return torch.ones(1)
        except RuntimeError as error:
            raise ValueError("no factor") from error
    except ValueError:
        return None


class Own(RuntimeError):
    """No operation raises it."""


def of_its_own() -> Any:
    try:
        return torch.ones(1)
    except Own:
        return None


def of_python() -> Any:
    try:
        return torch.ones(1)
    except (AttributeError, KeyError, TypeError):
        return None


def raises_in_the_end() -> Any:
    try:
        return torch.ones(1)
    except RuntimeError as error:
        raise ValueError("no factor") from error


def raises_again() -> Any:
    try:
        try:
            return torch.ones(1)
        except RuntimeError:
            raise
    except KeyError:
        return None


def suppresses_of_python() -> Any:
    with contextlib.suppress(AttributeError), torch.no_grad():
        return torch.ones(1)


def cleans_up() -> Any:
    try:
        return torch.ones(1)
    finally:
        torch.zeros(1)


def leaves_at_last() -> Any:
    try:
        return torch.ones(1)
    finally:
        return None  # noqa: B012, SIM107


def without() -> Any:
    with torch.no_grad():
        return torch.ones(1)


CATCH = [
    *(bare, everything, commented, several, sometimes, by_a_variable, by_a_tuple, make()),
    *(suppresses, suppresses_a_tuple, renamed_inside, leaves_at_last),
]
DO_NOT = [
    *(make, of_its_own, of_python, raises_in_the_end, raises_again, cleans_up, without),
    suppresses_of_python,
]


@pytest.mark.parametrize("function", [*CATCH, *DO_NOT], ids=lambda f: f.__name__)
def test_which_handlers_count(function: Callable[..., Any]) -> None:
    lines = {line for *_, line in function.__code__.co_lines() if line is not None}
    caught = {line for line in lines if what_becomes(function, line) is Raised.CAUGHT}
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    expected = {line for line in lines if function in CATCH and "torch.ones(1)" in source[line - 1]}
    assert caught == expected


def what_becomes(function: Callable[..., Any], line: int, raised: Raised = Raised.BY_OPERATION) -> Raised:
    return passed_on(function.__code__, line, globals(), raised)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="except* came with Python 3.11")
def test_groups_of_errors_are_caught_too(tmp_path: Path) -> None:
    lines = [
        "def f():",
        "    try:",
        "        return torch.ones(1)",
        "    except* RuntimeError:",
        "        pass",
    ]
    module = imported(tmp_path / "of_groups.py", lines)
    assert what_becomes(module.f, 4) is Raised.CAUGHT


def imported(file: Path, lines: list[str]) -> Any:
    file.write_text("import torch\n" + "\n".join(lines), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_warning_about_the_source_hides_no_handler(tmp_path: Path) -> None:
    lines = [
        "def f():",
        '    """Of a \\d escape."""',
        "    try:",
        "        return torch.ones(1)",
        "    except RuntimeError:",
        "        pass",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = imported(tmp_path / "of_escapes.py", lines)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert what_becomes(module.f, 5) is Raised.CAUGHT


def test_an_error_under_another_name_may_be_any() -> None:
    first = raises_in_the_end.__code__.co_firstlineno
    assert what_becomes(raises_in_the_end, first + 2) is Raised.ANY
    assert what_becomes(of_python, of_python.__code__.co_firstlineno + 2, Raised.ANY) is Raised.CAUGHT
    assert what_becomes(cleans_up, cleans_up.__code__.co_firstlineno + 2, Raised.ANY) is Raised.ANY


def test_without_source_no_handler_is_seen() -> None:
    space: dict[str, Any] = {"torch": torch}
    exec("def made():\n    try:\n        return torch.ones(1)\n    except RuntimeError:\n        pass", space)
    linecache.checkcache()
    assert passed_on(space["made"].__code__, 3, space) is Raised.BY_OPERATION


def test_torchs_own_functions_do_not_count() -> None:
    code = torch.nn.Module._call_impl.__code__
    lines = range(code.co_firstlineno, code.co_firstlineno + 200)
    space = vars(torch.nn.modules.module)
    assert {passed_on(code, line, space) for line in lines} == {Raised.BY_OPERATION}
