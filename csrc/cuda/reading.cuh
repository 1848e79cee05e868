// Which keys a tensor's threshold is looked for in, which of them fall to a block, and how it reads them.

#pragma once

#include <cuda_pipeline_primitives.h>

#include "hints.cuh"
#include "keys.cuh"
#include "sizes.h"
#include "tiles.cuh"

namespace ringprune::cuda {

constexpr int kHeldBytes = kHeld * sizeof(uint32_t);  // of shared memory, for the kernels that have a Reading

// The shared memory that a kernel's launch asks for.
__device__ inline void* shared_memory() {
#ifdef __CUDACC__
  extern __shared__ uint4 memory[];
  return memory;
#else
  return emulation::shared_memory;
#endif
}

// The keys a tensor's threshold is looked for in: its slots, or where they do not serve all of its entries.
struct Source {
  bool slots;
  uint32_t size;  // of the slots

  // How many blocks share the work; the tensor's others have nothing to do.
  __device__ uint32_t workers(const Part& part, int32_t share) const {
    const auto shares = static_cast<uint32_t>(shares_of(part, share));
    if (!slots) return shares;
    return size <= kOneBlock ? 1u : min(min(ceil_div(size, kSlotsEach), kMostWorkers), shares);
  }
  // Whether the first block to know the first digit finds all of the threshold.
  __device__ bool is_small() const { return slots && size <= kFewSlots; }
};

__device__ inline Source first_source(const Bucket& bucket, const Part& part, const Hint& hint, uint32_t found) {
  return {serves(part, floor_of(bucket, part, hint), found), found};
}

// After the first digit.
__device__ inline Source next_source(const Bucket& bucket, const Part& part, const Progress& progress,
                                     const Source& first) {
  if (first.slots || bucket.at_once) return first;
  return {progress.collected <= static_cast<uint32_t>(part.room), progress.collected};
}

// One of the blocks that look for a tensor's threshold, or the only one.
struct Worker {
  int32_t i;  // the tensor
  const Part& part;
  Source source;
  uint32_t me = 0u;
  uint32_t workers = 1u;

  __device__ Worker(int32_t i, const Part& part, const Source& source) : i(i), part(part), source(source) {}
  __device__ Worker(const Bucket& bucket, int32_t i, const Part& part, const Source& source, int32_t share)
      : i(i),
        part(part),
        source(source),
        me(static_cast<uint32_t>(share - part.first_share)),
        workers(source.workers(part, bucket.parts.share)) {}
};

// The keys that fall to a block. Of candidates `kHeld` are copied into shared memory at once, and read there by a short
// loop each time: code that is run once is slow, for it has to be fetched, and were they kept in registers there would
// be a body for each. What does not fit there, or all of a tensor's entries, is read anew each time. At most one at a
// time.
template <class Keys, int kOfBlock>
class Reading {
  static_assert(kStrip % (8 * kOfBlock) == 0, "a share, some strips, is read in whole turns");
  static_assert(kHeld % kChunk == 0);

 public:
  // Begins to copy, where the slots are aligned to whole chunks.
  __device__ Reading(const Bucket& bucket, const Worker& worker, const Keys& keys)
      : bucket_(bucket), worker_(worker), keys_(keys) {
    begin_ = end_ = held_ = 0u;
    if (!worker.source.slots) return;
    begin_ = border(worker.me);
    end_ = worker.me + 1u == worker.workers ? worker.source.size : border(worker.me + 1u);
    held_ = min(end_ - begin_, kHeld);
    const auto* slots = reinterpret_cast<const uint4*>(bucket.keys + worker.part.first_slot + begin_);
    auto* held = reinterpret_cast<uint4*>(shared_memory());
    for (uint32_t chunk = threadIdx.x; chunk * kChunk < held_; chunk += kOfBlock) {
      __pipeline_memcpy_async(held + chunk, slots + chunk, sizeof(uint4));
    }
    __pipeline_commit();
  }

  // Before keys are read; then there has to be a barrier.
  __device__ void wait() const { __pipeline_wait_prior(0); }

  // Calls body(key) for all of them, in any order, and for some zeros.
  template <class Body>
  __device__ void for_each(const Body& body) const {
    if (!worker_.source.slots) return for_each_entry(body);
    const auto* held = reinterpret_cast<const uint32_t*>(shared_memory());
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < held_; i += kOfBlock) body(held[i]);
    const uint32_t* slots = bucket_.keys + worker_.part.first_slot;
    for (uint32_t first = begin_ + held_ + threadIdx.x; first < end_; first += kTogether * kOfBlock) {
      uint32_t some[kTogether];  // loaded together, for what is done with one lets no later load pass
#pragma unroll
      for (uint32_t j = 0; j < kTogether; ++j) {
        const uint32_t slot = first + j * kOfBlock;
        some[j] = slot < end_ ? slots[slot] : 0u;
      }
#pragma unroll
      for (uint32_t j = 0; j < kTogether; ++j) body(some[j]);
    }
  }

 private:
  static constexpr uint32_t kTogether = 8;

  // Where the slots of a worker begin, in whole chunks.
  __device__ uint32_t border(uint32_t worker) const {
    const uint64_t before = uint64_t{worker_.source.size} * worker / worker_.workers;
    return static_cast<uint32_t>(before / kChunk * kChunk);
  }

  template <class Body>
  __device__ void for_each_entry(const Body& body) const {
    const Part& part = worker_.part;
    const int64_t share = bucket_.parts.share;
    for (int64_t begin = share * worker_.me; begin < part.entries; begin += share * worker_.workers) {
      const int64_t end = min(begin + share, part.entries);
      for (int64_t turn = begin; turn < end; turn += 8 * kOfBlock) {
        const int64_t i = turn + 4 * threadIdx.x, other = i + 4 * kOfBlock;
        const Quad<uint32_t> quad = keys_.load(part, i, part.entries - i);
        const Quad<uint32_t> next = keys_.load(part, other, part.entries - other);
#pragma unroll
        for (int e = 0; e < 4; ++e) body(quad.v[e]);
#pragma unroll
        for (int e = 0; e < 4; ++e) body(next.v[e]);
      }
    }
  }

  const Bucket& bucket_;
  const Worker& worker_;
  const Keys& keys_;
  uint32_t begin_, end_;  // of its slots, counted from the tensor's first
  uint32_t held_;         // how many of them are in shared memory
};

}  // namespace ringprune::cuda
