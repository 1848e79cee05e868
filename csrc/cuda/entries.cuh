// Entries of any dtype and alignment, four neighbours at a time: one wide access where they are aligned to it.

#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "parts.h"

namespace ringprune::cuda {

template <class T>
struct alignas(4 * sizeof(T)) Quad {
  T v[4];
};

template <class T>
__device__ bool is_aligned(const T* to_four) {
  return reinterpret_cast<uintptr_t>(to_four) % sizeof(Quad<T>) == 0;
}

// The first `valid` of four neighbours (four or more: all); the others are zero and not touched.
template <class T>
__device__ Quad<T> load4(const T* from, int64_t valid) {
  if (valid >= 4 && is_aligned(from)) return *reinterpret_cast<const Quad<T>*>(from);
  Quad<T> quad{};
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (e < valid) quad.v[e] = from[e];
  }
  return quad;
}

template <class T>
__device__ void store4(T* to, int64_t valid, const Quad<T>& quad) {
  if (valid >= 4 && is_aligned(to)) {
    // By name: of an assignment nvcc 13 makes four stores for sm_80 and sm_90, whatever it is told of alignment.
    using Words = std::conditional_t<sizeof(quad) == sizeof(uint4), uint4, uint2>;
    static_assert(sizeof(Words) == sizeof(quad));
    Words words;
    memcpy(&words, &quad, sizeof(words));
    __stwb(reinterpret_cast<Words*>(to), words);
    return;
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (e < valid) to[e] = quad.v[e];
  }
}

// Four entries as they lie in memory, 16-bit ones two to a word. Widened in a second step: the branch over the dtype
// then waits for no load, and the loads of several arrays are under way together.
using Packed = Quad<uint32_t>;

__device__ inline Packed load_packed(const void* base, Type type, int64_t i, int64_t valid) {
  if (type == Type::kFloat) return load4(static_cast<const uint32_t*>(base) + i, valid);
  const uint16_t* from = static_cast<const uint16_t*>(base) + i;
  Packed packed{};
  if (valid >= 4 && is_aligned(from)) {
    const uint2 words = *reinterpret_cast<const uint2*>(from);
    packed.v[0] = words.x;
    packed.v[1] = words.y;
  } else {
    const Quad<uint16_t> halves = load4(from, valid);
    packed.v[0] = halves.v[0] | static_cast<uint32_t>(halves.v[1]) << 16;
    packed.v[1] = halves.v[2] | static_cast<uint32_t>(halves.v[3]) << 16;
  }
  return packed;
}

__device__ inline Quad<float> widen(const Packed& packed, Type type) {
  Quad<float> quad;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const auto bits = static_cast<uint16_t>(packed.v[e / 2] >> (e % 2 * 16));
    if (type == Type::kFloat) memcpy(&quad.v[e], &packed.v[e], sizeof(float));
    if (type == Type::kHalf) quad.v[e] = static_cast<float>(c10::Half(bits, c10::Half::from_bits()));
    if (type == Type::kBFloat16) quad.v[e] = static_cast<float>(c10::BFloat16(bits, c10::BFloat16::from_bits()));
  }
  return quad;
}

template <class T>
__device__ Quad<uint16_t> rounded(const Quad<float>& quad) {
  Quad<uint16_t> halves;
#pragma unroll
  for (int e = 0; e < 4; ++e) halves.v[e] = T(quad.v[e]).x;
  return halves;
}

// Writes four neighbours from entry i on, rounded to nearest, ties to even, where memory has 16 bits for each.
__device__ inline void store_rounded(void* base, Type type, int64_t i, int64_t valid, const Quad<float>& quad) {
  if (type == Type::kFloat) {
    store4(static_cast<float*>(base) + i, valid, quad);
  } else {
    store4(static_cast<uint16_t*>(base) + i, valid,
           type == Type::kHalf ? rounded<c10::Half>(quad) : rounded<c10::BFloat16>(quad));
  }
}

// Infinity and NaN have all bits of the exponent set.
__device__ inline bool is_finite(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return (bits & 0x7f800000u) != 0x7f800000u;
}
__device__ inline bool is_finite(double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return (bits & 0x7ff0000000000000u) != 0x7ff0000000000000u;
}

}  // namespace ringprune::cuda
