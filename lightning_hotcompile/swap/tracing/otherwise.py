"""All that Dynamo does otherwise while it traces for us.

Each module named here changes one thing, which the top of its file explains. Its function ``overrides`` gives
the methods of Dynamo's that it replaces for that.
"""

from __future__ import annotations

from lightning_hotcompile.swap.tracing import (
    added_guards,
    arange_lists,
    arrays_copied,
    broadcast_sizes,
    buffer_flags,
    cached_functions,
    caught_errors,
    changing_numbers,
    collectives,
    compared_numbers,
    constant_values,
    dynamic_dims,
    failing_properties,
    fake_gradients,
    filled_diagonals,
    float_inputs,
    growing,
    higher_order,
    inference,
    kept_numbers,
    known_values,
    late_items,
    made_losses,
    masked_values,
    metric_frames,
    moving_averages,
    moving_texts,
    number_texts,
    numpy_calls,
    numpy_numbers,
    optimizer_settings,
    own_gradients,
    python_state,
    recurrent_layers,
    same_data,
    scripted_functions,
    short_loops,
    silent_loggers,
    sparse_tensors,
    torchs_layers,
    torchs_warnings,
)
from lightning_hotcompile.swap.tracing.overrides import Override

_IN_ORDER = (
    numpy_calls,
    numpy_numbers,
    python_state,
    collectives,
    higher_order,
    caught_errors,
    inference,
    own_gradients,
    optimizer_settings,
    cached_functions,
    scripted_functions,
    recurrent_layers,
    sparse_tensors,
    short_loops,
    growing,
    changing_numbers,
    moving_averages,
    float_inputs,
    kept_numbers,
    dynamic_dims,
    known_values,
    broadcast_sizes,
    arange_lists,
    arrays_copied,
    masked_values,
    number_texts,
    moving_texts,
    made_losses,
    same_data,
    compared_numbers,
    filled_diagonals,
    late_items,
    buffer_flags,
    silent_loggers,
    constant_values,
    torchs_layers,
    metric_frames,
    torchs_warnings,
    failing_properties,
    added_guards,
    fake_gradients,
)
"""Where two override the same method, the later one is called first, and may call the earlier one."""


def all_overrides() -> list[Override]:
    """What all of these modules override, in the order in which it is put in place."""
    return [each for module in _IN_ORDER for each in module.overrides()]
