// The tables that selection works with, made for one call.

#pragma once

#include <algorithm>

#include "../selection.h"
#include "../sizes.h"
#include "table.h"

namespace ringprune::cuda {

// Fills in what selection needs of each row; see there for the room: four times what is selected serves a hint at up
// to four times the rank.
struct SelectionLayout {
  int64_t slots = 0;
  int64_t strips = 0;
  int64_t shares = 0;
  int64_t entries = 0;
  int64_t share;
  int32_t histograms = 0;

  SelectionLayout(std::vector<Part>& parts, at::IntArrayRef counts, at::IntArrayRef starts) {
    for (const Part& part : parts) entries += part.entries;
    share = ceil_div(std::max(entries / kMostShares, int64_t{1}), int64_t{kStrip}) * kStrip;
    for (size_t i = 0; i < parts.size(); ++i) {
      Part& part = parts[i];
      part.count = static_cast<int32_t>(counts[i]);
      part.first_position = static_cast<int32_t>(starts[i]);
      part.room = counts[i] > 0 ? static_cast<int32_t>(std::min(part.entries, 4 * counts[i] + 4096)) : 0;
      part.first_slot = slots;
      part.first_strip = static_cast<int32_t>(strips);
      part.first_share = static_cast<int32_t>(shares);
      part.histogram = histograms;
      slots += ceil_div<int64_t>(part.room, kChunk) * kChunk;
      strips += ceil_div<int64_t>(part.entries, kStrip);
      shares += ceil_div(part.entries, share);
      if (counts[i] > 0 && part.entries > share) ++histograms;
    }
  }
};

// Owns the memory of a Bucket. Sends the table and zeros `nonfinite` with it, where given.
class Scratch {
 public:
  Scratch(const Session& session, HostTable<Part>& table, at::IntArrayRef counts, at::IntArrayRef starts,
          at::Tensor& positions, Zeros nonfinite = {}) {
    const SelectionLayout layout(table.rows, counts, starts);
    const auto tensors = static_cast<int64_t>(table.rows.size());
    histograms_ = session.empty_of<uint32_t>(int64_t{layout.histograms} * kBins);
    const bool at_once = layout.entries <= kAtOnce;
    counters_ = session.empty(tensors * sizeof(Progress) + (layout.strips + 1) * sizeof(Counts), at::kByte);
    keys_ = session.empty_of<uint32_t>(layout.slots);
    entries_ = session.empty_of<uint16_t>(layout.slots);
    runs_ = session.empty_of<Run>(table.tiles());
    bucket.parts = table.send(session, rows_, zeros_in(counters_), zeros_in(histograms_), nonfinite);
    bucket.parts.strips = static_cast<int32_t>(layout.strips);
    bucket.parts.shares = static_cast<int32_t>(layout.shares);
    bucket.parts.share = static_cast<int32_t>(layout.share);
    bucket.at_once = at_once;
    bucket.progress = memory<Progress>(counters_);
    bucket.strip_counts = reinterpret_cast<Counts*>(bucket.progress + tensors);
    bucket.begun = reinterpret_cast<uint32_t*>(bucket.strip_counts + layout.strips);
    bucket.left = bucket.begun + 1;
    bucket.histograms = memory<uint32_t>(histograms_);
    bucket.keys = memory<uint32_t>(keys_);
    bucket.entries = memory<uint16_t>(entries_);
    bucket.runs = memory<Run>(runs_);
    bucket.positions = positions.mutable_data_ptr<int32_t>();
  }

  Bucket bucket{};

 private:
  template <class T>
  static T* memory(at::Tensor& tensor) {
    return static_cast<T*>(tensor.mutable_data_ptr());
  }

  at::Tensor rows_, counters_, histograms_, keys_, entries_, runs_;
};

}  // namespace ringprune::cuda
