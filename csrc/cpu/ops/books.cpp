// encode_books and decode_books on the CPU: a book of levels for every block of values.

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>

#include "../../coded.h"
#include "../loops.h"

namespace ringprune {
namespace {

using namespace books;

constexpr int64_t kBlocksEach = kGrain / kBookValues;  // given to one thread at least

// What one thread fits books in.
struct Room {
  alignas(64) std::array<int32_t, kBookValues> bins;
  alignas(64) std::array<int32_t, kBookValues> codes;
  // Neighbours are counted apart: where they fall into one bin, the second would wait for the first.
  std::array<int64_t, kBookBins> histogram;
  std::array<int64_t, kBookBins> besides;
  Bins table;
  std::array<uint8_t, kBookBins> code_of;
  std::array<float, kBookBins> level_of;
  std::array<uint32_t, kBookBins> entry_of;
};

void count(const float* from, int64_t count, Room& room) {
  const auto held = [&](int64_t i) { return kOne + static_cast<int64_t>(bits_of(from[i]) & kBelow); };
  room.histogram.fill(0);
  room.besides.fill(0);
  for (int64_t i = 0; i + 1 < count; i += 2) {
    room.histogram[room.bins[i]] += held(i);
    room.besides[room.bins[i + 1]] += held(i + 1);
  }
  if (count % 2) room.histogram[room.bins[count - 1]] += held(count - 1);
}

void encode_block(const Loops& loop, const float* from, int64_t number, int levels, Room& room, uint16_t* book,
                  uint8_t* codes, float* rest) {
  const uint32_t largest = loop.largest_magnitude(from, number);
  const int32_t base = base_of(largest);
  const bool is_nan = largest >= kInfinity;
  if (is_nan || is_too_small(base)) {
    std::fill_n(book, levels, is_nan ? kNaN : uint16_t{0});
    std::fill_n(codes, (number * bits_per_code(levels) + 7) / 8, uint8_t{0});
    for (int64_t i = 0; i < number; ++i) rest[i] = is_nan ? std::nanf("") : from[i];
    return;
  }
  loop.sort_into_bins(from, number, base, room.bins.data());
  count(from, number, room);
  loop.resolve_bins(room.histogram.data(), room.besides.data(), base, room.table);
  fit(room.table, base, levels, book, room.code_of.data(), room.level_of.data());
  for (int b = 0; b < kBookBins; ++b) room.entry_of[b] = bits_of(room.level_of[b]) | room.code_of[b];
  loop.round_to_levels(from, room.bins.data(), room.entry_of.data(), number, room.codes.data(), rest);
  (levels == 4 ? loop.join_two_bits : loop.join_four_bits)(room.codes.data(), number, codes);
}

void encode_books(const at::Tensor& values, const at::Tensor& rest, const at::Tensor& body, int64_t levels) {
  check_encode(values, rest, body, levels);
  const Loops& loop = loops();
  const int64_t numel = values.numel();
  const float* from = values.const_data_ptr<float>();
  auto* into = rest.mutable_data_ptr<float>();
  auto* first = reinterpret_cast<uint16_t*>(body.mutable_data_ptr());
  auto* codes = body.mutable_data_ptr<uint8_t>() + book_bytes(numel, levels);
  const int64_t written = (numel * bits_per_code(levels) + 7) / 8;
  std::fill(codes + written, codes + code_bytes(numel, levels), uint8_t{0});
  at::parallel_for(0, blocks_of(numel), kBlocksEach, [&](int64_t begin, int64_t end) {
    const auto room = std::make_unique<Room>();
    for (int64_t block = begin; block < end; ++block) {
      const int64_t start = block * kBookValues, count = std::min<int64_t>(kBookValues, numel - start);
      encode_block(loop, from + start, count, static_cast<int>(levels), *room, first + levels * block,
                   codes + start * bits_per_code(levels) / 8, into + start);
    }
  });
  mark_written(rest);
  mark_written(body);
}

void decode_books(const at::Tensor& body, const at::Tensor& values, int64_t levels, bool add) {
  check_decode(body, values, levels);
  const auto decode = (levels == 4 ? loops().decode_two_bits : loops().decode_four_bits)[add];
  const int64_t numel = values.numel();
  const auto* first = reinterpret_cast<const uint16_t*>(body.const_data_ptr());
  const auto* codes = body.const_data_ptr<uint8_t>() + book_bytes(numel, levels);
  auto* into = values.mutable_data_ptr<float>();
  at::parallel_for(0, blocks_of(numel), kBlocksEach, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t start = block * kBookValues, count = std::min<int64_t>(kBookValues, numel - start);
      std::array<float, kMostLevels> level;
      for (int64_t j = 0; j < levels; ++j) level[j] = float_of(uint32_t{first[levels * block + j]} << 16);
      decode(codes + start * bits_per_code(levels) / 8, level.data(), count, into + start);
    }
  });
  mark_written(values);
}

}  // namespace

TORCH_LIBRARY_IMPL(ringprune, CPU, m) {
  m.impl("encode_books", encode_books);
  m.impl("decode_books", decode_books);
}

}  // namespace ringprune
