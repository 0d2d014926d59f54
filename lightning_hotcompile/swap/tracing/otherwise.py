"""All that Dynamo does otherwise while it traces for us."""

from __future__ import annotations

from lightning_hotcompile.swap.tracing.added_guards import guarded_too
from lightning_hotcompile.swap.tracing.arange_lists import known_in_advance
from lightning_hotcompile.swap.tracing.arrays_copied import copied_silently
from lightning_hotcompile.swap.tracing.broadcast_sizes import sizes_in_python
from lightning_hotcompile.swap.tracing.buffer_flags import known_from_buffers
from lightning_hotcompile.swap.tracing.cached_functions import asked_by_guards
from lightning_hotcompile.swap.tracing.caught_errors import errors_stay_caught
from lightning_hotcompile.swap.tracing.changing_numbers import computed_by_python
from lightning_hotcompile.swap.tracing.collectives import called_by_python
from lightning_hotcompile.swap.tracing.compared_numbers import compared_like_python
from lightning_hotcompile.swap.tracing.constant_values import known_of_constants
from lightning_hotcompile.swap.tracing.dynamic_dims import varies_everywhere
from lightning_hotcompile.swap.tracing.failing_properties import looked_up_after_all
from lightning_hotcompile.swap.tracing.fake_gradients import noted_fake_gradients
from lightning_hotcompile.swap.tracing.filled_diagonals import filled_as_views
from lightning_hotcompile.swap.tracing.float_inputs import constants_if_needed
from lightning_hotcompile.swap.tracing.growing import grow_in_python
from lightning_hotcompile.swap.tracing.higher_order import called_whole
from lightning_hotcompile.swap.tracing.inference import entered_by_python
from lightning_hotcompile.swap.tracing.kept_numbers import kept_by_python
from lightning_hotcompile.swap.tracing.known_values import forgotten_for_shapes
from lightning_hotcompile.swap.tracing.late_items import known_after_the_graph
from lightning_hotcompile.swap.tracing.made_losses import made_like_others
from lightning_hotcompile.swap.tracing.masked_values import chosen_by_where
from lightning_hotcompile.swap.tracing.metric_frames import metrics_by_python
from lightning_hotcompile.swap.tracing.moving_averages import scaled_by_tensors
from lightning_hotcompile.swap.tracing.moving_texts import unknown_texts
from lightning_hotcompile.swap.tracing.number_texts import texts_by_python
from lightning_hotcompile.swap.tracing.numpy_calls import numpy_by_numpy
from lightning_hotcompile.swap.tracing.optimizer_settings import as_they_are
from lightning_hotcompile.swap.tracing.overrides import Override
from lightning_hotcompile.swap.tracing.own_gradients import refused
from lightning_hotcompile.swap.tracing.python_state import left_to_python
from lightning_hotcompile.swap.tracing.recurrent_layers import called_between_graphs
from lightning_hotcompile.swap.tracing.same_data import not_set_to_themselves
from lightning_hotcompile.swap.tracing.scripted_functions import called_as_scripted
from lightning_hotcompile.swap.tracing.short_loops import ended_in_short_loops
from lightning_hotcompile.swap.tracing.silent_loggers import silent_in_graphs
from lightning_hotcompile.swap.tracing.sparse_tensors import used_by_python
from lightning_hotcompile.swap.tracing.torchs_layers import compiled_like_others
from lightning_hotcompile.swap.tracing.torchs_warnings import given_once

_LEFT = (
    numpy_by_numpy,
    left_to_python,
    called_by_python,
    called_whole,
    errors_stay_caught,
    entered_by_python,
    refused,
    as_they_are,
    asked_by_guards,
    called_as_scripted,
    called_between_graphs,
    used_by_python,
    ended_in_short_loops,
    grow_in_python,
    computed_by_python,
    scaled_by_tensors,
    constants_if_needed,
    kept_by_python,
    varies_everywhere,
    forgotten_for_shapes,
    sizes_in_python,
    known_in_advance,
    copied_silently,
    chosen_by_where,
    texts_by_python,
    unknown_texts,
    made_like_others,
    not_set_to_themselves,
    compared_like_python,
    filled_as_views,
    known_after_the_graph,
    known_from_buffers,
    silent_in_graphs,
    known_of_constants,
    compiled_like_others,
    metrics_by_python,
    given_once,
    looked_up_after_all,
)
"""What Dynamo does not stand in for, mostly at the price of a graph break, or of the whole frame."""


def all_overrides() -> list[Override]:
    """In the order in which they are put: of two of one name the later one is called first."""
    return [each for part in (*_LEFT, guarded_too, noted_fake_gradients) for each in part()]
