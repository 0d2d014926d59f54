"""Dropout in code for a CPU: eager's mask, drawn faster than eager draws it, in the loop that uses it.

With ``random="eager"`` Inductor calls eager's dropout, which draws one element after the other and then
multiplies twice, in loops of its own. Of 65,536 elements the draws take 370 us of 430 on a processor that is
not Intel's (on Intel's, eager has oneMKL draw). Here the same draws take 45 us (AVX-512): the state of the
generator, a Mersenne Twister, moves on by vector instructions, and two of its words make one element as in
eager. The multiplications go into the loops of the graph.

Source of the recurrence and its constants: Matsumoto and Nishimura, "Mersenne Twister: A 623-dimensionally
equidistributed uniform pseudo-random number generator", ACM TOMACS 8 (1998).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.utils._python_dispatch import _disable_current_modes

from lightning_hotcompile.swap.replaced import Replacement, Replaces

aten = torch.ops.aten

_NEEDED = {
    "ATen/CPUGeneratorImpl.h": ("at::mt19937 engine();", "void set_engine(at::mt19937 engine);"),
    "ATen/core/MT19937RNGEngine.h": (
        "int left_;",
        "uint32_t next_;",
        "std::array<uint32_t, MERSENNE_STATE_N> state_;",
        "if (--(data_.left_) == 0) {",
        "mt19937_data_pod data() const {",
        "void set_data(const mt19937_data_pod& data) {",
    ),
}
"""What of torch's headers the code below goes by."""

SOURCE = """
#ifndef HOTCOMPILE_DROPOUT_MASKS
#define HOTCOMPILE_DROPOUT_MASKS
#include <ATen/CPUGeneratorImpl.h>
#include <cstring>
#include <mutex>
namespace hotcompile {

constexpr int kWords = 624, kAhead = 397, kPairs = kWords / 2;
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint64_t Pairs __attribute__((vector_size(64)));
typedef int64_t Signed __attribute__((vector_size(64)));
typedef int8_t Bytes __attribute__((vector_size(8)));

template <typename V>
inline V load(const void* from) {
  V all;
  std::memcpy(&all, from, sizeof(V));
  return all;
}

template <typename V>
inline V twist(V first, V second) {
  return (((first & 0x80000000u) | (second & 0x7fffffffu)) >> 1) ^ (-(second & 1u) & 0x9908b0dfu);
}

template <typename V>
inline V temper(V word) {
  word ^= word >> 11;
  word ^= (word << 7) & 0x9d2c5680u;
  word ^= (word << 15) & 0xefc60000u;
  return word ^ (word >> 18);
}

template <int from, int to, int other>
inline void move_on(uint32_t* state) {
  int j = from;
  for (; j + 16 <= to; j += 16) {
    const Words next = load<Words>(state + j + other) ^
        twist(load<Words>(state + j), load<Words>(state + j + 1));
    std::memcpy(state + j, &next, sizeof(next));
  }
  for (; j < to; j++) state[j] = state[j + other] ^ twist(state[j], state[j + 1]);
}

inline void next_state(uint32_t* state) {
  move_on<0, kWords - kAhead, kAhead>(state);
  move_on<kWords - kAhead, kWords - 1, kAhead - kWords>(state);
  state[kWords - 1] = state[kAhead - 1] ^ twist(state[kWords - 1], state[0]);
}

inline void keep_pairs(bool* out, const uint32_t* words, int64_t limit) {
  for (int j = 0; j < kPairs; j += 8) {
    const Pairs two = load<Pairs>(words + 2 * j);
    const Signed number = (Signed)(((two << 32) & 0x1fffff00000000ull) | (two >> 32));
    const Bytes kept = __builtin_convertvector(number < limit, Bytes) & 1;
    std::memcpy(out + j, &kept, sizeof(kept));
  }
}

// The same elements, and the same state after them, as at::bernoulli_.
inline void bernoulli(bool* out, int64_t size, double p) {
  auto* generator = at::detail::getDefaultCPUGenerator().get<at::CPUGeneratorImpl>();
  std::lock_guard<std::mutex> lock(generator->mutex_);
  auto engine = generator->engine();
  auto data = engine.data();
  uint32_t* state = data.state_.data();
  const double scaled = p * 9007199254740992.0;  // 2^53
  const int64_t floor = static_cast<int64_t>(scaled);
  const int64_t limit = floor + (static_cast<double>(floor) < scaled);
  const auto word = [&]() -> uint64_t {
    if (--data.left_ == 0) {
      next_state(state);
      data.left_ = kWords;
      data.next_ = 0;
    }
    return temper(state[data.next_++]);
  };
  const auto element = [&]() {
    const uint64_t high = word(), low = word();
    return static_cast<int64_t>(((high << 32) | low) & 0x1fffffffffffffull) < limit;
  };
  int64_t i = 0;
  while (i < size && data.left_ > 2) out[i++] = element();
  if (size - i >= kPairs) {
    uint32_t words[kWords + 1];
    const int odd = data.left_ == 2;  // one word is left over: the first half of the next element
    if (odd) words[0] = temper(state[data.next_]);
    for (; size - i >= kPairs; i += kPairs) {
      next_state(state);
      for (int j = 0; j < kWords; j += 16) {
        const Words some = temper(load<Words>(state + j));
        std::memcpy(words + odd + j, &some, sizeof(some));
      }
      keep_pairs(out + i, words, limit);
      if (odd) words[0] = words[kWords];
    }
    data.left_ = 1 + odd;
    data.next_ = kWords - odd;
  }
  while (i < size) out[i++] = element();
  engine.set_data(data);
  generator->set_engine(engine);
}

inline void draw(AtenTensorHandle mask, double p) {
  void* elements = nullptr;
  int64_t size = 0;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(mask, &elements));
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(mask, &size));
  bernoulli(static_cast<bool*>(elements), size, p);
}

} // namespace hotcompile
#endif
"""


_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


@functools.lru_cache(1)
def why_not_drawn_here() -> str | None:
    """Why eager draws the mask of a dropout, or ``None`` where :data:`SOURCE` draws the same one faster."""
    if sys.platform == "win32" or sys.byteorder != "little":
        return "the code is for GCC and Clang, and for processors that store the low byte first"
    folder = Path(torch.__file__).with_name("include")
    for name, parts in _NEEDED.items():
        try:
            text = (folder / name).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            return f"the header {name} cannot be read: {error}"
        missing = next((part for part in parts if part not in text), None)
        if missing is not None:
            return f"{name} has no {missing!r}"
    return None if _eager_takes_two_words() else "eager draws them in another way on this processor"


def _eager_takes_two_words() -> bool:
    """Whether an element of eager's is drawn as a number of 64 bit is, from two words of the generator."""
    n, p = 1000, 0.3
    with _disable_current_modes():
        ours, theirs = (torch.Generator("cpu").manual_seed(n) for _ in range(2))
        numbers = torch.rand(n, dtype=torch.float64, device="cpu", generator=ours)
        kept = torch.zeros(n, dtype=torch.bool, device="cpu").bernoulli_(p, generator=theirs)
        same_state = torch.equal(ours.get_state(), theirs.get_state())
        return same_state and torch.equal(numbers < p, kept)


def _replace() -> Callable[[], None] | None:
    # Not at the top: a run without a flip does not owe the compiler's import.
    from torch._inductor import ir, lowering

    known: Any = lowering.lowerings
    theirs = known.get(aten.native_dropout.default)
    in_place: Any = getattr(ir, "InplaceBernoulliFallback", None)
    if theirs is None or in_place is None:
        return None
    if list(inspect.signature(in_place.__init__).parameters)[:3] != ["self", "op_overload", "x"]:
        return None
    ours = _lowering(theirs, in_place)
    known[aten.native_dropout.default] = ours

    def undo() -> None:
        if known.get(aten.native_dropout.default) is ours:
            known[aten.native_dropout.default] = theirs

    return undo


def _lowering(theirs: Callable[..., Any], in_place: Any) -> Callable[..., Any]:
    from torch._inductor import config, lowering
    from torch._inductor.utils import convert_shape_to_inductor
    from torch._inductor.virtualized import V

    draws_here = why_not_drawn_here() is None

    class Mask(in_place):  # type: ignore[misc]
        """Draws into a tensor of booleans whose elements lie one after the other."""

        def codegen(self, wrapper: Any) -> None:
            if not draws_here:
                super().codegen(wrapper)
                return
            if SOURCE not in wrapper.header.getvalue():
                wrapper.header.splice(SOURCE)
            (mask,) = (each.codegen_reference() for each in self.inputs)
            wrapper.writeline(f"hotcompile::draw({mask}, {self.constant_args[0]!r});")

    def dropout(x: Any, p: Any, train: Any) -> Any:
        graph: Any = V.graph
        asked = config.fallback_random and graph.cpp_wrapper and not graph.aot_mode and train
        if not (asked and _is_plain(graph.current_node, p)):
            return theirs(x, p, train)
        # Eager's layout of the input, in whose order it draws; Inductor's may be a slice of another buffer.
        value = graph.current_node.args[0].meta["val"]
        size, stride = (convert_shape_to_inductor(each) for each in (value.shape, value.stride()))
        mask = lowering.empty_strided(size, stride, dtype=torch.bool, device=value.device)
        Mask(aten.bernoulli_.float, mask, 1.0 - p)
        kept = lowering.mul(x, lowering.to_dtype(mask, value.dtype))
        return lowering.mul(kept, 1.0 / (1.0 - p)), mask

    return dropout


def _is_plain(node: Any, p: Any) -> bool:
    """Whether eager's mask lies in memory like its input, without gaps, and some elements are kept."""
    value = getattr(node.args[0], "meta", {}).get("val")
    return (
        isinstance(p, float)
        and 0.0 < p < 1.0
        and isinstance(value, torch.Tensor)
        and value.device.type == "cpu"
        and value.dtype in _DTYPES
        and is_non_overlapping_and_dense_or_false(value)
    )


class DropoutMasks(Replaces):
    """While any is entered, Inductor's code for a CPU, called from C++, draws the masks of dropouts itself.

    Nothing happens where this torch has dropout, or its generator, in another way.
    """

    replacement = Replacement(_replace)
