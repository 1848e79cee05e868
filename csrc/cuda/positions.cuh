// From the threshold to the positions: counted per tile, added up in order, written where they belong.

#pragma once

#include "digits.cuh"
#include "hints.cuh"
#include "keys.cuh"
#include "tiles.cuh"

namespace ringprune::cuda {

constexpr Counts kOneAbove = Counts{1} << 32;
constexpr Counts kOneEqual = 1;
__device__ inline uint32_t above_of(Counts counts) { return static_cast<uint32_t>(counts >> 32); }
__device__ inline uint32_t equal_of(Counts counts) { return static_cast<uint32_t>(counts); }

// The strip of this block.
struct Strip {
  int32_t i;  // of the tensor
  Part part;
  int32_t me;          // which of the tensor's strips
  int32_t first_tile;  // of all tiles
  int32_t tiles;

  __device__ Strip(const Parts& parts, int32_t number)
      : i(find_row_together(parts, &Part::first_strip, number)),
        part(parts.rows[i]),
        me(number - part.first_strip),
        first_tile(part.first_tile + me * kStripTiles),
        tiles(min(kStripTiles, tiles_of(part) - me * kStripTiles)) {}
};

// What may be selected of one tile, in order: its candidates, or all of its entries.
struct Items {
  int32_t first;  // slot of the bucket, or entry of the tensor
  uint32_t size;
  uint32_t key;    // of the lane's first, where they are candidates
  uint32_t entry;  // of the tensor; the same one's
};

// The tiles of a strip that fall to this warp, one in as many as the block has warps. What was collected of all of them
// is loaded together, for waiting is what takes time here.
template <class Keys, int kOfBlock>
class WarpTiles {
 public:
  static constexpr int kEach = kStripTiles * kLanes / kOfBlock;

  __device__ WarpTiles(const Bucket& bucket, const Strip& strip, const Keys& keys, bool slots)
      : bucket_(bucket), part_(strip.part), keys_(keys), first_entry_(strip.me * kStrip), slots_(slots) {
    Run runs[kEach];  // loaded before it is known whether they serve, which `slots` says
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      runs[k] = number(k) < strip.tiles ? bucket.runs[strip.first_tile + number(k)] : Run{0, 0};
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int64_t rest = part_.entries - begin(k);
      const auto all = static_cast<uint32_t>(max(min(rest, int64_t{kTile}), int64_t{0}));
      items_[k].first = slots_ ? static_cast<int32_t>(part_.first_slot + runs[k].first) : begin(k);
      items_[k].size = slots_ ? runs[k].size : all;
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const bool has = slots_ && static_cast<uint32_t>(lane()) < items_[k].size;
      items_[k].key = has ? key(k, lane()) : 0u;
      items_[k].entry = has ? entry(k, lane()) : 0u;
    }
  }

  // Which tile of the strip the warp's k-th is.
  __device__ static int number(int k) { return warp() + k * (kOfBlock / kLanes); }

  // Calls body(entry of the tensor, counts of the items before, whether it is above, whether equal) for every item of
  // the k-th tile; returns the counts of all.
  template <class Body>
  __device__ Counts for_each_item(int k, uint32_t threshold, const Body& body) const {
    constexpr uint32_t kTurnsTogether = 4;
    const uint32_t size = items_[k].size;
    Counts counts = 0;
    for (uint32_t begin = 0; begin < size; begin += kTurnsTogether * kLanes) {
      uint32_t some[kTurnsTogether];
#pragma unroll
      for (uint32_t turn = 0; turn < kTurnsTogether; ++turn) {
        const uint32_t j = begin + turn * kLanes + lane();
        some[turn] = is_at_hand(j) ? items_[k].key : j < size ? key(k, j) : 0u;
      }
#pragma unroll
      for (uint32_t turn = 0; turn < kTurnsTogether; ++turn) {
        const uint32_t j = begin + turn * kLanes + lane();
        if (begin + turn * kLanes >= size) break;
        const bool is_above = some[turn] > threshold, is_equal = some[turn] == threshold && some[turn] != 0u;
        const uint32_t above = __ballot_sync(kAllLanes, is_above), equal = __ballot_sync(kAllLanes, is_equal);
        body([&] { return is_at_hand(j) ? items_[k].entry : entry(k, j); },
             counts + __popc(above & lanes_before()) * kOneAbove + __popc(equal & lanes_before()) * kOneEqual, is_above,
             is_equal);
        counts += __popc(above) * kOneAbove + __popc(equal) * kOneEqual;
      }
    }
    return counts;
  }

 private:
  __device__ bool is_at_hand(uint32_t j) const { return slots_ && j == static_cast<uint32_t>(lane()); }
  __device__ int32_t begin(int k) const { return first_entry_ + number(k) * kTile; }
  __device__ uint32_t key(int k, uint32_t j) const {
    return slots_ ? bucket_.keys[items_[k].first + j] : keys_.load(part_, items_[k].first + j, 1).v[0];
  }
  __device__ uint32_t entry(int k, uint32_t j) const {
    return slots_ ? begin(k) + bucket_.entries[items_[k].first + j] : items_[k].first + j;
  }

  const Bucket& bucket_;
  const Part& part_;
  const Keys& keys_;
  int32_t first_entry_;
  bool slots_;
  Items items_[kEach];
};

// What a strip has, tile by tile, and the tensor's threshold, for which this waits. All threads together, once.
template <class Keys, int kOfBlock>
struct Selected {
  using Tiles = WarpTiles<Keys, kOfBlock>;
  const Bucket& bucket;
  const Strip& strip;
  const Progress& progress;
  Tiles tiles;
  uint32_t threshold;
  uint32_t ties;  // how many of those equal to it

  __device__ Selected(const Bucket& bucket, const Strip& strip, const Keys& keys, bool slots)
      : bucket(bucket), strip(strip), progress(bucket.progress[strip.i]), tiles(bucket, strip, keys, slots) {
    __shared__ uint64_t outcome;
    if (threadIdx.x == 0) {  // were it a thread of each warp, those who wait would keep the news from coming
      while ((outcome = read_now(progress.outcome)) == 0) {
      }
    }
    __syncthreads();
    threshold = static_cast<uint32_t>(outcome >> 32) & 0x7fffffffu;
    ties = static_cast<uint32_t>(outcome);
  }

  // For each lane the counts of the tiles up to that one. All threads together.
  __device__ Counts count() const {
    __shared__ Counts of_tiles[kStripTiles];
#pragma unroll
    for (int k = 0; k < Tiles::kEach; ++k) {
      const Counts found = tiles.for_each_item(k, threshold, [](auto...) {});
      if (lane() == 0) of_tiles[tiles.number(k)] = found;
    }
    __syncthreads();
    return warp_scan(of_tiles[lane()]);
  }

  // Writes their positions; before(k) is how many come before the warp's k-th tile.
  template <class Before>
  __device__ void write(const Before& before) const {
    int32_t* positions = bucket.positions + strip.part.first_position;
#pragma unroll
    for (int k = 0; k < Tiles::kEach; ++k) {
      const Counts before_tile = before(k);
      tiles.for_each_item(k, threshold, [&](auto entry, Counts in_tile, bool is_above, bool is_equal) {
        const Counts all = before_tile + in_tile;
        if (!is_above && !(is_equal && equal_of(all) < ties)) return;
        positions[above_of(all) + min(equal_of(all), ties)] = static_cast<int32_t>(strip.part.start + entry());
      });
    }
    if (threshold > 0u) return;  // there are as many as were asked for
    if (threadIdx.x == 0) wait_for_digits(progress, kDigits);
    __syncthreads();
    const int64_t step = int64_t{strips_of(strip.part)} * kOfBlock, mine = int64_t{strip.me} * kOfBlock + threadIdx.x;
    for (int64_t i = read_now(progress.selected) + mine; i < strip.part.count; i += step) positions[i] = kPad;
  }
};

// Counts of a tensor's strips as other blocks read them: each tells its own as soon as it has them, and how many there
// are up to its end as soon as it knows what comes before. (D. Merrill, M. Garland: Single-pass Parallel Prefix Scan
// with Decoupled Look-back, NVIDIA NVR-2016-002.)
class Announced {
 public:
  __device__ explicit Announced(Counts* counts) : counts_(counts) {}

  // In one access, so that nobody sees a part of it.
  __device__ void announce(int32_t strip, Counts own) const { write_now(counts_[strip], own | kThere); }
  __device__ void announce_up_to(int32_t strip, Counts all) const { write_now(counts_[strip], all | kThere | kUpTo); }

  // Sum over the strips before one, for whose numbers this waits. All lanes of a warp together.
  __device__ Counts before(int32_t strip) const {
    Counts sum = 0;
    for (int32_t end = strip; end > 0; end -= kWindows * kLanes) {
      Counts words[kWindows];  // from the nearest on; before the first strip there is nothing
#pragma unroll
      for (int k = 0; k < kWindows; ++k) words[k] = word(end - 1 - k * kLanes - lane());
#pragma unroll
      for (int k = 0; k < kWindows; ++k) {
        while (words[k] == 0) words[k] = word(end - 1 - k * kLanes - lane());
        const uint32_t whole = __ballot_sync(kAllLanes, (words[k] & kUpTo) != 0);
        const bool counts = whole == 0 || lane() < __ffs(static_cast<int>(whole));
        if (counts) sum += words[k] & ~(kThere | kUpTo);
        if (whole != 0) return warp_sum(sum);
      }
    }
    return warp_sum(sum);
  }

  // Waits until all that many have told theirs; all threads of the block together.
  template <int kOfBlock>
  __device__ void wait(int32_t strips) const {
    for (int32_t strip = threadIdx.x; strip < strips; strip += kOfBlock) {
      while (word(strip) == 0) {
      }
    }
    __syncthreads();
  }

 private:
  static constexpr int kWindows = 4;
  static constexpr Counts kThere = Counts{1} << 63, kUpTo = Counts{1} << 31;  // numbers are below 2^31
  __device__ Counts word(int32_t strip) const { return strip < 0 ? kThere | kUpTo : read_now(counts_[strip]); }

  Counts* counts_;
};

// Writes the positions of a strip, the `number`-th of all, as soon as its tensor's threshold is known. in_slots(strip)
// is whether the slots serve.
template <int kOfBlock, class Keys, class InSlots>
__device__ void write_strip(const Bucket& bucket, const Keys& keys, int32_t number, const InSlots& in_slots) {
  __shared__ Counts before_strip;
  const Strip strip(bucket.parts, number);
  if (strip.part.count == 0) return;
  const Selected<Keys, kOfBlock> selected(bucket, strip, keys, in_slots(strip));
  const Counts up_to = selected.count();
  if (warp() == 0) {
    const Announced announced(bucket.strip_counts + strip.part.first_strip);
    const Counts own = __shfl_sync(kAllLanes, up_to, kLanes - 1);
    if (lane() == 0) {
      __threadfence();  // whoever sees it may change the hint, which has been read
      announced.announce(strip.me, own);
    }
    const Counts before = announced.before(strip.me);
    if (lane() == 0) announced.announce_up_to(strip.me, before + own);
    if (lane() == 0) before_strip = before;
  }
  __syncthreads();
  selected.write([&](int k) {
    const int tile = selected.tiles.number(k);
    const Counts before = __shfl_sync(kAllLanes, up_to, max(tile - 1, 0));
    return before_strip + (tile > 0 ? before : 0);
  });
}

}  // namespace ringprune::cuda
