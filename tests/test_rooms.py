"""The order of the rooms: what may import what, told from the source alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import lightning_hotcompile

PACKAGE = "lightning_hotcompile"
ROOT = Path(lightning_hotcompile.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
MOST_LINES = 280

ROOMS = (
    "base",
    "watch",
    "plan",
    "swap",
    "receipt",
    "view",
    "capture",
    "store",
    "machine",
    "run",
    "callback",
    "cli",
)
"""A module imports only from its own room or from rooms before it; ``bench`` measures all of them."""

ROOM_OF_TOP_MODULE = {
    "errors": "base",
    "version": "base",
    "config": "base",
    "either_lightning": "swap",
    "switch": "base",
    "together": "machine",
    "machine": "machine",
    "tracks": "machine",
    "__init__": "callback",
    "__main__": "cli",
    "asked_for": "callback",
    "callback": "callback",
    "checkpoint_hooks": "callback",
    "environment": "callback",
    "evaluation_hooks": "callback",
    "trace": "cli",
}

IMPORT_LIGHTNING = {
    "asked_for",
    "callback",
    "capture.callback",
    "capture.explaining",
    "capture.verdict",
    "checkpoint_hooks",
    "either_lightning",
    "environment",
    "evaluation_hooks",
    "receipt.metrics",
    "run.preflight",
    "run.session",
    "run.side_gains",
    "run.stage_context",
    "run.stage_run",
    "run.stages",
    "run.step_watch",
    "run.trainer_facts",
    "swap.steplog",
}

PRIVATE_TORCH = {
    # Dynamo, Inductor and AOTAutograd: the file for private API of the compiler.
    "swap.dynamo": None,
    # When it begins and ends to compile.
    "swap.compile_timer": {"torch._dynamo"},
    # Dynamo's run-only mode, and what it has compiled for one code.
    "swap.compiled_function": {
        "_debug_get_cache_entry_list",
        "_get_cache_entries_for_region",
        "torch._dynamo",
    },
    # What it keeps of what it has compiled.
    "swap.letting_go": {
        *("_debug_get_cache_entry_list", "_edits", "_get_cache_entries_for_region"),
        *("torch._dynamo", "torch._C"),
    },
    # What it notes on each compile.
    "swap.past_compiles": {"torch._dynamo", "torch._guards"},
    # What becomes of a frame that the backend has refused.
    "swap.graphs.later_frames": {"torch._dynamo"},
    # The backends behind Dynamo.
    "swap.inductor.compilers": None,
    # Who packs the tensors that are saved for a backward.
    "swap.process.saved_tensors": {
        *("_C", "_autograd", "_top_saved_tensors_default_hooks"),
        *("_checkpoint_internal", "_user_hooks"),  # how torch marks its own, which the user has not set
    },
    # Whether a thread runs a backward pass, or compiles.
    "swap.own_thread": {"_C", "_current_graph_task_id", "torch._guards"},
    # Who looks into a call.
    "swap.onlookers": {
        "_current_level",
        "torch.fx._symbolic_trace",
        "torch.nn.modules.module._has_any_global_hook",
    },
    # What an operation of a graph is called.
    "swap.inductor.layout_checks": {"torch.fx.node._get_qualified_name", "torch._C"},
    # Where Inductor keeps its files; it has no option for the precompiled headers.
    "swap.inductor.paths": {
        "torch._inductor",
        "_HEADER_DIR",
        "_HEADER_LOCK_DIR",
    },
    # How it finds out which vector instructions a compiler can do.
    "swap.inductor.cxx": {"torch._inductor"},
    "swap.inductor.probes": {"torch._inductor"},
    # How its C++ compiler is got ready.
    "swap.inductor.cpp_beside": {"torch._inductor"},
    # How it writes the loops of its C++ code.
    "swap.inductor.loop_errors": {"torch._inductor", "_lines"},
    # What AOTAutograd takes for operations that draw random numbers.
    "swap.inductor.draws": {"torch._functorch", "_ops"},
    # Which loops of it threads share.
    "swap.inductor.scatters": {"torch._inductor", "_cache"},
    # How it hands over the C++ code of a kernel.
    "swap.inductor.vector_masks": {"torch._inductor"},
    # Where its C++ compiler writes.
    "swap.inductor.whole_files": {"torch._inductor"},
    # Which operations its C++ code can call.
    "swap.inductor.cpp_wrapper": {"torch._inductor", "torch.utils._pytree"},
    "swap.inductor.loops": {"torch._inductor"},
    # Which memory layout its code has for convolutions.
    "swap.inductor.conv_layout": {"torch._inductor"},
    "swap.inductor.conv_gradients": {"torch._inductor"},
    # How Dynamo stands in for a call of numpy's.
    "swap.tracing.numpy_calls": {"torch._dynamo"},
    "swap.tracing.numpy_numbers": {"torch._dynamo"},
    # How it rewrites collectives.
    "swap.tracing.collectives": {"torch._dynamo"},
    # How it takes random numbers, dicts and generators of Python's.
    "swap.tracing.python_state": {"torch._dynamo"},
    "swap.tracing.number_texts": {"torch._dynamo"},
    "swap.tracing.compared_numbers": {"torch._dynamo"},
    "swap.tracing.number_arithmetic": {"torch._dynamo"},
    "swap.tracing.lists_in_tuples": {"torch._dynamo"},
    "swap.tracing.moving_texts": {"torch._dynamo"},
    "swap.tracing.settled_texts": {"torch._dynamo"},
    "swap.tracing.absent_attributes": {"torch._dynamo"},
    "swap.tracing.dict_attributes": {"torch._dynamo"},
    # Whether its profiler is at work.
    "capture.callback": {"_C", "_autograd", "_profiler_enabled"},
    # What it is called with while it is traced.
    "swap.graphs.traced_once": {"torch._subclasses"},
    # Which backward is under way, and whether it leaves the graph.
    "swap.graphs.backward": {
        "_C",
        "_autograd",
        "_backward_hooks",
        "_current_graph_task_id",
        "_execution_engine",
        "_get_current_graph_task_keep_graph",
    },
    # What stands in a frame for an object that it leaves alone.
    "swap.tracing.left_variable": {"torch._dynamo", "torch._guards"},
    "swap.tracing.kept_numbers": {"torch._dynamo"},
    # What it traces with.
    "swap.tracing.failing_properties": {"_modules", "torch._dynamo"},
    "swap.tracing.fake_gradients": {"torch._dynamo"},
    "swap.tracing.known_values": {"torch._subclasses", "torch.utils._pytree"},
    # How it calls what makes shapes and tensors.
    "swap.tracing.broadcast_sizes": {"torch._dynamo", "_C", "_infer_size"},
    "swap.tracing.arrays_copied": {"torch._dynamo"},
    "swap.tracing.masked_values": {"torch._dynamo"},
    "swap.tracing.constant_values": {"_version", "torch._dynamo", "torch.utils._python_dispatch"},
    "swap.tracing.copied_objects": {"torch._dynamo"},
    "swap.tracing.stored_dicts": {"torch._dynamo"},
    "swap.tracing.short_loops": {"_iter", "torch._dynamo"},
    "swap.tracing.sparse_tensors": {"_base", "_is_view", "torch._dynamo"},
    "swap.tracing.torchs_layers": {"torch._dynamo"},
    "swap.tracing.metric_frames": {"torch._dynamo"},
    "swap.tracing.torchs_warnings": {"torch._dynamo"},
    "swap.tracing.late_items": {"torch._dynamo"},
    "swap.tracing.made_losses": {"torch._dynamo"},
    "swap.tracing.instance_checks": {"torch._dynamo"},
    "swap.tracing.old_variables": {"torch._dynamo"},
    "swap.tracing.filled_diagonals": {"torch._dynamo"},
    "swap.tracing.same_data": {"torch._dynamo", "_cdata"},
    # What it knows of numbers in a tensor.
    "swap.tracing.arange_lists": {"torch._dynamo"},
    "swap.tracing.buffer_flags": {"torch._dynamo"},
    "swap.tracing.byte_masks": {"torch._dynamo"},
    # How it takes numbers that change.
    "swap.tracing.changing_numbers": {"torch._dynamo", "torch.utils._sympy"},
    "swap.tracing.float_inputs": {
        "torch._dynamo",
        "torch._functorch",
        "torch.utils._sympy",
    },
    "swap.tracing.plain_numbers": {
        "torch._dynamo",
        "_foreach_add",
        "_foreach_add_",
        "_foreach_lerp_",
        "_foreach_mul",
        "_foreach_mul_",
        "_foreach_sub",
        "_tensor_var",
    },
    # What it guards.
    "swap.tracing.added_guards": {"torch._dynamo"},
    # How it calls functions with a cache.
    "swap.tracing.cached_functions": {"torch._dynamo"},
    # How it calls loggers.
    "swap.tracing.silent_loggers": {"torch._dynamo"},
    "swap.tracing.recurrent_layers": {"torch._dynamo"},
    "swap.tracing.scripted_functions": {"torch._dynamo"},
    # How it writes back lists and dicts.
    "swap.tracing.growing": {"torch._dynamo", "torch._guards", "_get_modified_vars"},
    # Which functions it compiles no code for.
    "swap.tracing.inlined_only": {"torch._C", "torch._dynamo"},
    # What a function in the making reads, and what it sets.
    "swap.tracing.set_and_read": {"torch._dynamo", "_get_modified_vars"},
    # How it takes gradients in a step.
    "swap.tracing.own_gradients": {"torch._dynamo"},
    # Whether Lightning goes through its loaders one after the other.
    "run.stages": {"_combined_loader", "_should_accumulate"},
    # How it takes an optimizer that a step looks at.
    "swap.tracing.optimizer_settings": {"torch._dynamo"},
    # For which backend it traces.
    "swap.tracing.overrides": {"torch._dynamo"},
    # How it captures operations on functions.
    "swap.tracing.higher_order": {"torch._dynamo"},
    # How it enters inference mode.
    "swap.tracing.inference": {"torch._dynamo"},
    # The stance that the user has set.
    "swap.tracing.stance": {"torch._dynamo", "_stance"},
    # Which operations it traces, and in which functions.
    "swap.tracing.caught_errors": {
        "_GeneratorContextManager",
        "_current_tx",
        "_getframe",
        "torch._dynamo",
    },
    # What the callback sets while its code is in place, and code by hand has not.
    "bench.one_steady": {"torch._functorch"},
    # How a module is called, and the attribute that module.compile() sets.
    "swap.swapped_region": {"_call_impl"},
    "plan.regions": {"_compiled_call_impl"},
    "run.trainer_facts": {"_compiled_call_impl"},
    # Which modes are in use, in their order.
    "watch.lowest_mode": {"torch.utils._python_dispatch"},
    # Which parameters there are, in the walk that finds the modules.
    "watch.signature": {"_parameters"},
    # What records the stream of operations, and which tensors are the same.
    "watch.opgraph": None,
    "watch.below_autocast": None,
    "watch.tensor_identity": None,
    # What a compile in another process needs to have the same key in the caches.
    "swap.prewarm.graphfile": None,
    "swap.prewarm.symbols": None,
    "swap.prewarm.tensor_spec": {"torch._subclasses"},
    "swap.prewarm.compile_state": {"torch._functorch", "torch._inductor"},
    # maybe_mark_dynamic, which is documented and has no other home; what Dynamo has learned of sizes.
    "swap.tracing.dynamic_dims": {"_dynamo", "torch._dynamo"},
    # How Inductor knows what a loop reads that it writes anew.
    "swap.inductor.kept_dependencies": {"torch._inductor"},
    # Whether Inductor's loops may share a buffer.
    "swap.inductor.local_buffers": {"torch._inductor"},
    "swap.prewarm.rehearsal": {"torch.utils._pytree"},
    "swap.inductor.equal_elements": {"torch._inductor"},
    # Where Inductor finds the largest element of a pooling.
    "swap.inductor.pool_indices": {"torch._inductor", "torch.utils._sympy"},
    "swap.inductor.reduction_tiles": {"torch._inductor"},
    # Which modes a comparison must not run under.
    "swap.parity.apart": {"torch.utils._python_dispatch"},
    # How Inductor makes a dropout, and which modes a question to eager must not run under.
    "swap.inductor.dropout_masks": {"torch._inductor", "torch._prims_common", "torch.utils._python_dispatch"},
    # How Inductor makes an operation that it has no code of its own for.
    "swap.inductor.draw_order": {"_ops", "torch._inductor"},
    # What operations of a graph switch on, and what pops the levels of torch.func.
    "swap.process.thread_state": {
        "_C",
        "_autograd",
        "_func_decrement_nesting",
        "_functorch",
        "_grad_decrement_nesting",
        "_jvp_decrement_nesting",
        "_saved_tensors_hooks_disable",
        "_saved_tensors_hooks_enable",
        "_saved_tensors_hooks_get_disabled_error_message",
        "_vmap_decrement_nesting",
    },
    # Changes that autograd is not to count, and which tensors of a captured graph share memory.
    "swap.graphs.uncounted": {"_cdata", "torch.autograd.grad_mode._unsafe_preserve_version_counter"},
    "swap.graphs.unbounded": {"_input_metadata"},
    # When it begins and ends to trace a frame.
    "swap.tracing.tracing_limit": {"torch._dynamo"},
    # All that is in force amid a trace, out of which a handler of signals is called.
    "swap.tracing.signal_handlers": {
        *("_C", "torch._C", "torch._guards", "torch.utils._python_dispatch"),
        *("_ForceDispatchKeyGuard", "_dispatch_tls_local_exclude_set", "_dispatch_tls_local_include_set"),
        *("_get_current_function_mode_stack", "_getframe", "_pop_mode", "_push_mode"),
    },
    # What a compiled backward leaves, in each thread.
    "swap.graphs.kept_buffers": {"torch._functorch"},
    # What torch.optim and Lightning leave on a wrapped step, and who is told of it.
    "swap.optimizers.optimizer_step": {
        "_opt_called",
        "_wrapped_by_lr_sched",
        "_is_profiler_enabled",
        "_optimizer_step_pre_hooks",
        "_optimizer_step_post_hooks",
        "_global_optimizer_pre_hooks",
        "_global_optimizer_post_hooks",
    },
    # One call for many tensors, as torch.optim makes them.
    "swap.optimizers.fused_check": {"_foreach_norm", "_foreach_sub"},
    "swap.optimizers.fused_kernels": {"_foreach_add_"},
    "swap.optimizers.optimizer_values": {"_foreach_add_"},
    # What each training imports in its first step: done before trainings that are compared are forked.
    "bench.one_run": {"torch._dynamo"},
    "receipt.metrics": {"_batches_that_stepped"},
}
"""Private attributes and imports of other packages, by module; ``None`` allows any."""


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def room_of(name: str) -> str:
    first, _, rest = name.partition(".")
    return first if rest else ROOM_OF_TOP_MODULE[first]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(path: Path) -> Iterator[tuple[str, bool]]:
    """Each imported module or name with its module, and whether it is for type checkers only."""
    for_types = {
        id(node)
        for test in ast.walk(tree_of(path))
        if isinstance(test, ast.If) and ast.unparse(test.test) == "TYPE_CHECKING"
        for node in ast.walk(test)
    }
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in for_types
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", id(node) in for_types


def own_imports(path: Path, *, for_types: bool = True) -> set[str]:
    """The modules of the package that a file imports, by their names inside of it."""
    names = {name_of(p) for p in FILES}
    found = set()
    for imported, only_types in imports_of(path):
        if imported.startswith(f"{PACKAGE}.") and (for_types or not only_types):
            inside = imported.removeprefix(f"{PACKAGE}.")
            found.add(inside if inside in names else inside.rpartition(".")[0])
    return found


def by_name(path: Path) -> str:
    return name_of(path)


def test_the_rooms_are_the_known_ones() -> None:
    assert {room_of(name_of(p)) for p in FILES} == {*ROOMS, "bench"}


@pytest.mark.parametrize("path", FILES, ids=by_name)
def test_a_module_imports_only_from_its_room_or_rooms_before_it(path: Path) -> None:
    room = room_of(name_of(path))
    allowed = (*ROOMS, "bench") if room == "bench" else ROOMS[: ROOMS.index(room) + 1]
    assert {i for i in own_imports(path) if room_of(i) not in allowed} == set()


FOLDERS_OF_SWAP = ("process", "tracing", "parity", "inductor", "graphs", "optimizers", "prewarm")
"""The same order within the largest room; what stands beside the folders is held to go round in no circle."""


def folder_in_swap(name: str) -> str | None:
    room, _, inside = name.partition(".")
    folder, _, module = inside.partition(".")
    return folder if room == "swap" and module else None


def test_the_folders_of_swap_are_the_known_ones() -> None:
    assert {folder_in_swap(name_of(p)) for p in FILES} - {None} == set(FOLDERS_OF_SWAP)


@pytest.mark.parametrize("folder", FOLDERS_OF_SWAP)
def test_a_folder_of_swap_imports_only_from_folders_before_it(folder: str) -> None:
    later = FOLDERS_OF_SWAP[FOLDERS_OF_SWAP.index(folder) + 1 :]
    found = {
        (name_of(path), imported)
        for path in FILES
        if folder_in_swap(name_of(path)) == folder
        for imported in own_imports(path)
        if folder_in_swap(imported) in later
    }
    assert found == set()


LATE_IMPORTS: set[tuple[str, str]] = {("environment", "asked_for")}
"""Imports inside of functions: only of all of the package, which a Trainer without it must not import."""


def test_no_import_goes_round_in_a_circle() -> None:
    graph = {name_of(p): own_imports(p, for_types=False) for p in FILES}
    for name, imported in LATE_IMPORTS:
        graph[name].remove(imported)
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"import cycle: {' -> '.join((*path, name))}"
        if name not in done:
            for imported in graph[name]:
                visit(imported, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_late_imports_are_these() -> None:
    found = {
        (name_of(path), (node.module or "").removeprefix(f"{PACKAGE}."))
        for path in FILES
        if room_of(name_of(path)) != "cli"  # its help does not wait for torch: tests/cli/test_main.py
        for function in ast.walk(tree_of(path))
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE)
    }
    assert found == LATE_IMPORTS


def test_rooms_export_nothing_by_themselves() -> None:
    for path in ROOT.glob("*/__init__.py"):
        body = tree_of(path).body
        assert all(isinstance(node, ast.Expr) for node in body), f"{path} holds more than a docstring"


def test_only_these_modules_import_lightning() -> None:
    found = {
        name_of(path)
        for path in FILES
        if any(i.partition(".")[0] in ("lightning", "pytorch_lightning") for i, _ in imports_of(path))
    }
    assert {n for n in found if room_of(n) != "bench"} == IMPORT_LIGHTNING


@pytest.mark.parametrize(
    "path",
    [p for p in FILES if room_of(name_of(p)) in ("base", "watch", "plan", "view", "store", "machine", "cli")],
    ids=by_name,
)
def test_what_works_without_lightning_does_not_import_it(path: Path) -> None:
    assert not [i for i, _ in imports_of(path) if "lightning" in i and not i.startswith(PACKAGE)]


def test_nothing_imports_transformer_engine() -> None:
    # Also a broken installation raises at import: it is recognised by the names of classes.
    for path in FILES:
        if name_of(path) != "bench.te_gpt":
            assert not [i for i, _ in imports_of(path) if i.startswith("transformer_engine")], path


def private_names(path: Path) -> set[str]:
    """Private names of other packages: attributes of anything but ``self``, and imports."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls"):
                found.add(node.attr)
    for imported, _ in imports_of(path):
        parts = imported.split(".")
        private = next((i for i, part in enumerate(parts) if part.startswith("_")), None)
        if private is not None and parts[0] not in (PACKAGE, "__future__"):
            found.add(".".join(parts[: private + 1]))
    return found


@pytest.mark.parametrize("path", FILES, ids=by_name)
def test_private_names_of_other_packages_stay_where_they_are(path: Path) -> None:
    allowed = PRIVATE_TORCH.get(name_of(path), set())
    if allowed is not None:
        assert private_names(path) <= allowed


@pytest.mark.parametrize("name", sorted(PRIVATE_TORCH))
def test_no_exception_outlives_its_use(name: str) -> None:
    path = ROOT.joinpath(*name.split(".")).with_suffix(".py")
    found, allowed = private_names(path), PRIVATE_TORCH[name]
    assert found if allowed is None else found == allowed


def test_no_file_is_too_long() -> None:
    lines = {name_of(p): len(p.read_text(encoding="utf-8").splitlines()) for p in FILES}
    assert {name: n for name, n in lines.items() if n > MOST_LINES} == {}


def test_no_file_has_a_name_that_says_nothing() -> None:
    assert not {p.stem for p in FILES} & {"utils", "helpers", "misc", "common", "manager"}


RENAMED = {"var_getattr": ("tp_getattro_impl", "hasattr(", 'endswith("_impl")')}
"""Methods of Dynamo's that torch 2.14 has under another name, and how a file shows that it knows.

The checks run with one version of torch. Twice such a name alone kept all from being compiled with another.
"""


@pytest.mark.parametrize("name", sorted(RENAMED))
def test_a_method_with_two_names_is_known_by_both(name: str) -> None:
    texts = {name_of(path): path.read_text(encoding="utf-8") for path in FILES}
    assert any(name in text for text in texts.values()), f"{name} is used no longer: take it off the list"
    found = {at for at, text in texts.items() if name in text and not any(w in text for w in RENAMED[name])}
    assert found == set()
