// Which keys a tensor's threshold is looked for in, which of them fall to a block, and how it reads them.

#pragma once

#include "hints.cuh"
#include "keys.cuh"
#include "tiles.cuh"

namespace ringprune::cuda {

constexpr uint32_t kKept = 16;  // keys that a thread loads at once, and keeps

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

// The keys that fall to a block. `kKept` candidates for each thread are read once; the rest, or all of a tensor's
// entries, anew each time.
template <class Keys, int kOfBlock>
class Reading {
  static_assert(kStrip % (8 * kOfBlock) == 0, "a share, some strips, is read in whole turns");

 public:
  __device__ Reading(const Bucket& bucket, const Worker& worker, const Keys& keys)
      : bucket_(bucket), worker_(worker), keys_(keys) {
    const uint64_t size = worker.source.slots ? worker.source.size : 0u;
    begin_ = static_cast<uint32_t>(size * worker.me / worker.workers);
    end_ = static_cast<uint32_t>(size * (worker.me + 1) / worker.workers);
    load(begin_ + threadIdx.x, kept_);
  }

  // Calls body(key) for all of them, in any order, and for some zeros.
  template <class Body>
  __device__ void for_each(const Body& body) const {
    if (!worker_.source.slots) return for_each_entry(body);
#pragma unroll
    for (uint32_t j = 0; j < kKept; ++j) body(kept_[j]);
    for (uint32_t first = begin_ + threadIdx.x + kTurnKeys; first < end_; first += kTurnKeys) {
      uint32_t some[kKept];
      load(first, some);
#pragma unroll
      for (uint32_t j = 0; j < kKept; ++j) body(some[j]);
    }
  }

 private:
  static constexpr uint32_t kTurnKeys = kKept * kOfBlock;

  // Together, for what is done with one lets no later load pass.
  __device__ void load(uint32_t first, uint32_t (&some)[kKept]) const {
    const uint32_t* slots = bucket_.keys + worker_.part.first_slot;
#pragma unroll
    for (uint32_t j = 0; j < kKept; ++j) {
      const uint32_t slot = first + j * kOfBlock;
      some[j] = slot < end_ ? slots[slot] : 0u;
    }
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
  uint32_t begin_, end_;
  uint32_t kept_[kKept];
};

}  // namespace ringprune::cuda
