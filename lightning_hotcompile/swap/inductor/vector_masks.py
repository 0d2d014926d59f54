"""Masks of code for a CPU (``x > 0``, dropout) are stored and loaded by vector instructions.

Inductor's own way goes through an array, element by element: 131,072 of them took 520 us to store and 160 us
to load, with two threads and AVX-512, and 13 and 16 us by what is here. Each ReLU has one to store in the
forward and one to load in the backward, as has each dropout and each pooling.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_hotcompile.swap.replaced import Replacement, Replaces, put_in_place

_HEADER = "ATen/cpu/vec/vec_mask.h"
_OTHERS = ("ATen/cpu/vec/vec256/vec256_mask.h", "ATen/cpu/vec/vec512/vec512_mask.h")
_INCLUDE = "#include <torch/csrc/inductor/cpp_prefix.h>\n"
_MASK = "VecMask<"
_NEEDED = (
    "static VecMask<T, N> from(U* b, int count) {",
    "void store(bool* b, int count = size()) {",
)
"""What of the header is specialized below."""

SOURCE = """
#ifndef HOTCOMPILE_VECTOR_MASKS
#define HOTCOMPILE_VECTOR_MASKS
#if (defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)) && !defined(_MSC_VER)
#include <cstring>
namespace at::vec {
inline namespace CPU_CAPABILITY {

inline void hotcompile_store(bool* to, const Vectorized<float>& mask) {
#if defined(CPU_CAPABILITY_AVX512)
  const __mmask16 is_set = _mm512_cmp_ps_mask(mask, _mm512_setzero_ps(), _CMP_NEQ_UQ);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_maskz_set1_epi8(is_set, 1));
#else
  const __m256i bits = _mm256_castps_si256(_mm256_cmp_ps(mask, _mm256_setzero_ps(), _CMP_NEQ_UQ));
  const __m128i low = _mm256_castsi256_si128(bits), high = _mm256_extracti128_si256(bits, 1);
  const __m128i words = _mm_packs_epi32(low, high);
  const __m128i bytes = _mm_and_si128(_mm_packs_epi16(words, words), _mm_set1_epi8(1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), bytes);
#endif
}

inline Vectorized<float> hotcompile_load(const bool* from) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm512_castsi512_ps(_mm512_movm_epi32(_mm_test_epi8_mask(bytes, bytes)));
#else
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_cvtepu8_epi32(bytes), _mm256_setzero_si256()));
#endif
}

#define HOTCOMPILE_MASK(N)                                                                    \\
  template <>                                                                                 \\
  inline void VecMask<float, N>::store(bool* to, int count) {                                 \\
    constexpr int each = Vectorized<float>::size();                                           \\
    if (count >= size()) {                                                                    \\
      for (int i = 0; i < N; i++) hotcompile_store(to + i * each, mask_[i]);                  \\
      return;                                                                                 \\
    }                                                                                         \\
    bool all[size()];                                                                         \\
    for (int i = 0; i < N; i++) hotcompile_store(all + i * each, mask_[i]);                   \\
    std::memcpy(to, all, count);                                                              \\
  }                                                                                           \\
  template <>                                                                                 \\
  template <>                                                                                 \\
  inline VecMask<float, N> VecMask<float, N>::from<const bool>(const bool* from, int count) { \\
    constexpr int each = Vectorized<float>::size();                                           \\
    VectorizedN<float, N> mask;                                                               \\
    if (count >= size()) {                                                                    \\
      for (int i = 0; i < N; i++) mask[i] = hotcompile_load(from + i * each);                 \\
      return mask;                                                                            \\
    }                                                                                         \\
    bool all[size()] = {};                                                                    \\
    std::memcpy(all, from, count);                                                            \\
    for (int i = 0; i < N; i++) mask[i] = hotcompile_load(all + i * each);                    \\
    return mask;                                                                              \\
  }                                                                                           \\
  template <>                                                                                 \\
  template <>                                                                                 \\
  inline VecMask<float, N> VecMask<float, N>::from<bool>(bool* from, int count) {             \\
    return VecMask<float, N>::from<const bool>(static_cast<const bool*>(from), count);        \\
  }

HOTCOMPILE_MASK(1)
HOTCOMPILE_MASK(2)
#undef HOTCOMPILE_MASK

} // namespace CPU_CAPABILITY
} // namespace at::vec
#endif
#endif
"""
"""Put after Inductor's own header. A mask's element is set where it is not 0, as there. Code may ask for more
elements than a mask has; those are in no use. 2 vectors are what code for bfloat16 has. Other processors (and
other types of masks) keep the general way."""


def with_vector_masks(code: str) -> str:
    """The code of a C++ kernel, as it is where it has no mask."""
    return code.replace(_INCLUDE, _INCLUDE + SOURCE, 1) if _MASK in code else code


@functools.lru_cache(1)
def why_not_here() -> str | None:
    """Why this torch has to keep its own way, or ``None``."""
    from torch._inductor.codegen import cpp

    write = getattr(getattr(cpp, "CppScheduling", None), "define_kernel", None)
    if write is None or list(inspect.signature(write).parameters)[:2] != ["self", "src_code"]:
        return "Inductor writes its kernels in another way"
    folder = Path(torch.__file__).with_name("include")
    try:
        general, *special = [(folder / name).read_text(encoding="utf-8") for name in (_HEADER, *_OTHERS)]
    except (OSError, ValueError) as error:
        return f"the header {_HEADER}, or one beside it, cannot be read: {error}"
    missing = [part for part in _NEEDED if part not in general]
    if missing:
        return f"{_HEADER} has no {missing[0]!r}"
    taken = [
        name for name, text in zip(_OTHERS, special, strict=True) if re.search(r"::(store|from)\b", text)
    ]
    return f"{taken[0]} has a way of its own" if taken else None


def _replace() -> Callable[[], None] | None:
    # Not at the top: a run without a flip does not owe the compiler's import.
    if why_not_here() is not None:
        return None
    from torch._inductor.codegen import cpp

    scheduling: Any = cpp.CppScheduling
    theirs = scheduling.define_kernel

    def define_kernel(self: Any, src_code: str, *args: Any, **kwargs: Any) -> Any:
        return theirs(self, with_vector_masks(src_code), *args, **kwargs)

    return put_in_place({(scheduling, "define_kernel"): define_kernel})


class VectorMasks(Replaces):
    """While any is entered, code that Inductor writes for a CPU has masks of 32-bit numbers done in vectors.

    Nothing happens where this torch has its masks, or writes its kernels, in another way.
    """

    replacement = Replacement(_replace)
