// What a strip finds when it looks back over those before it: on a CPU, where blocks never run at once, the tests of
// the ops see only strips that know all there is before them.

#include <cstdint>
#include <vector>

#include "../../../csrc/cuda/positions.cuh"

// The counts of all strips before one, of which each has told its own, or where `whole` is set of all up to its end.
extern "C" uint64_t ringprune_counts_before(const uint64_t* own, const uint8_t* whole, int32_t strip) {
  using namespace ringprune::cuda;
  std::vector<Counts> words(strip + 1);
  const Announced announced(words.data());
  Counts before = 0, found = 0;
  for (int32_t j = 0; j < strip; ++j) {
    before += own[j];
    whole[j] ? announced.announce_up_to(j, before) : announced.announce(j, own[j]);
  }
  emulation::run(1, kLanes, 0, [&] {
    const Counts counts = announced.before(strip);
    if (threadIdx.x == 0) found = counts;
  });
  return found;
}
