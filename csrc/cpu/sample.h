// What some of a tensor's keys tell about all of them: a hint where there is none, or none that fits.

#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <optional>

namespace ringprune {

// Where keys can be read, before or after a pass: writes the keys of flat positions [lo, lo + count) of a tensor,
// count <= kBlock; called by several threads at once.
using KeySource = c10::function_ref<void(int64_t tensor, int64_t lo, int64_t count, uint32_t* keys)>;

// Candidates there is room for, among which `count` are selected; with more a hint is no help.
inline int64_t room_for(int64_t count) { return 3 * count + 4096; }

struct Sample {
  uint32_t hint;  // a key that somewhat more than the wanted number of keys reach; 1 where there is room for all
  // As far as the sample tells; -1 where no key was asked about:
  int64_t reach = -1;        // keys that reach the hint
  int64_t reach_other = -1;  // keys that reach the key asked about
};

// Reads some keys of flat positions [lo, hi) of a tensor, of a small one all of them. With the key of a hint that did
// not fit the sample is larger, and another one.
Sample sample(KeySource source, int64_t tensor, int64_t lo, int64_t hi, int64_t count,
              std::optional<uint32_t> other = std::nullopt);

}  // namespace ringprune
