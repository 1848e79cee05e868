// Blocks one after another, threads as fibers; see cuda_on_cpu.h.

#include "cuda_on_cpu.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

dim3 threadIdx, blockIdx, gridDim;

namespace emulation {

constexpr size_t kMostShared = 64 * 1024;
alignas(16) uint4 shared_memory[kMostShared / sizeof(uint4)];

namespace {

constexpr size_t kStack = 128 * 1024;
constexpr size_t kLine = 64;
constexpr unsigned kMostThreads = 1024;
constexpr unsigned kLanes = 32;
constexpr int kUnknown = 0xa5;  // in every byte of shared memory of which nothing may be known

[[noreturn]] void fail(const char* reason) {
  std::fprintf(stderr, "CUDA on CPU: block %u, thread %u: %s\n", blockIdx.x, threadIdx.x, reason);
  std::abort();
}

// A place to jump back to; with the address sanitizer also a stack it has to be told of.
struct Place {
  jmp_buf registers;
  const void* stack = nullptr;
  size_t size = 0;
};

// Leaves `from`, to go on there when somebody jumps back; calls go() to get away.
template <class Go>
void leave(Place& from, [[maybe_unused]] const Place& to, const Go& go) {
#ifdef __SANITIZE_ADDRESS__
  void* frames = nullptr;
  __sanitizer_start_switch_fiber(&frames, to.stack, to.size);
#endif
  if (_setjmp(from.registers) == 0) go();
#ifdef __SANITIZE_ADDRESS__
  const void* stack = nullptr;
  size_t size = 0;
  __sanitizer_finish_switch_fiber(frames, &stack, &size);
#endif
}

struct Copy {
  void* to;
  const void* from;
  size_t size;
};

struct Fiber;
std::vector<std::unique_ptr<Fiber>> fibers;

enum class State : uint8_t { kReady, kWaiting, kDone };

struct Fiber {
  Place place;
  ucontext_t start;
  bool started = false;
  std::vector<Copy> copies;  // that it has not waited for

  Fiber() {
    void* memory = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) fail("no memory for stacks");
    mprotect(memory, 4096, PROT_NONE);  // what runs over its stack is caught
    place.stack = static_cast<char*>(memory) + 4096;
    // Stacks that all ended at a multiple of 128 KiB would share one set of each cache.
    place.size = kStack - 4096 - (fibers.size() * 9 % 512) * kLine;
  }
};

// The lanes of a warp that have come to an operation. Two sets of words: the next operation may begin before the last
// lane has read what the one before brought.
struct Warp {
  unsigned arrived = 0;
  Operation operation;
  unsigned turn = 0;
  uint64_t words[2][kLanes];
};

std::vector<State> states;  // of the fibers, apart from them: looking for one that is ready reads little
std::vector<Warp> warps;
unsigned threads, waiting_for_block, done, current;
size_t shared_bytes;  // of a block, besides its own variables
const std::function<void()>* body;
Place scheduler;

void go_back() {
  leave(fibers[current]->place, scheduler, [] { _longjmp(scheduler.registers, 1); });
}

// What a fiber does in its life: the body once for every block it is used in.
void live() {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(nullptr, &scheduler.stack, &scheduler.size);
#endif
  for (;;) {
    (*body)();
    if (!fibers[current]->copies.empty()) fail("a thread ends before what it copies is there");
    states[current] = State::kDone;
    ++done;
    go_back();
  }
}

void resume(unsigned i) {
  Fiber& fiber = *fibers[i];
  current = i;
  threadIdx.x = i;
  leave(scheduler, fiber.place, [&] {
    if (fiber.started) _longjmp(fiber.place.registers, 1);
    fiber.started = true;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = const_cast<void*>(fiber.place.stack);
    fiber.start.uc_stack.ss_size = fiber.place.size;
    makecontext(&fiber.start, live, 0);
    setcontext(&fiber.start);
  });
}

void wait() {
  states[current] = State::kWaiting;
  go_back();
}

void wake(unsigned begin, unsigned end) {
  for (unsigned i = begin; i < end; ++i) {
    if (states[i] == State::kWaiting) states[i] = State::kReady;
  }
}

void run_block(const std::vector<unsigned>& order) {
  waiting_for_block = done = 0;
  for (Warp& warp : warps) warp.arrived = 0;
  states.assign(threads, State::kReady);
  while (done < threads) {
    bool moved = false;
    for (const unsigned i : order) {
      if (states[i] != State::kReady) continue;
      moved = true;
      resume(i);
    }
    if (!moved) fail("the threads that are left wait for each other for ever");
  }
}

std::mt19937& random_numbers() {
  static std::mt19937 generator([] {
    const char* seed = std::getenv("RINGPRUNE_EMULATION_SEED");
    return seed ? static_cast<unsigned>(std::atoi(seed)) : 1u;
  }());
  return generator;
}

std::vector<unsigned> random_order(unsigned count) {
  std::vector<unsigned> order(count);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), random_numbers());
  return order;
}

}  // namespace

void run(unsigned blocks, unsigned threads_of_block, size_t shared, const std::function<void()>& kernel) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  threads = threads_of_block;
  shared_bytes = shared;
  const bool fits = threads > 0 && threads <= kMostThreads && threads % kLanes == 0 && shared <= kMostShared;
  if (!fits || blocks == 0) fail("no such launch");
  while (fibers.size() < threads) fibers.push_back(std::make_unique<Fiber>());
  warps.resize(threads / kLanes);
  body = &kernel;
  gridDim.x = blocks;
  const std::vector<unsigned> order = random_order(threads);
  for (const unsigned i : random_order(blocks)) {
    blockIdx.x = i;
    std::memset(shared_memory, kUnknown, shared);
    run_block(order);
  }
}

void wait_for_block() {
  if (done > 0) fail("a barrier that other threads have passed by, for they are done");
  if (++waiting_for_block < threads) return wait();
  for (const Warp& warp : warps) {
    if (warp.arrived != 0) fail("a barrier while lanes wait for their warp");
  }
  waiting_for_block = 0;
  wake(0, threads);
}

void copy_later(void* to, const void* from, size_t size) {
  const auto target = reinterpret_cast<uintptr_t>(to), source = reinterpret_cast<uintptr_t>(from);
  const auto first = reinterpret_cast<uintptr_t>(shared_memory);
  if (size != 4 && size != 8 && size != 16) fail("no such size of an asynchronous copy");
  if (target % size != 0 || source % size != 0) fail("an asynchronous copy that is not aligned");
  if (target < first || target + size > first + shared_bytes) fail("a copy to where the launch has no shared memory");
  std::memset(to, kUnknown, size);  // it may be made at once: whoever still reads what was there is too late
  fibers[current]->copies.push_back({to, from, size});
}

void copy_now() {
  for (const Copy& copy : fibers[current]->copies) std::memcpy(copy.to, copy.from, copy.size);
  fibers[current]->copies.clear();
}

const uint64_t* meet(Operation operation, uint32_t mask, uint64_t value) {
  if (mask != ~0u) fail("operations of a part of a warp are not emulated");
  Warp& warp = warps[current / kLanes];
  if (warp.arrived > 0 && warp.operation != operation) fail("the lanes of a warp meet in different operations");
  warp.operation = operation;
  const uint64_t* words = warp.words[warp.turn % 2];
  warp.words[warp.turn % 2][current % kLanes] = value;
  if (++warp.arrived < kLanes) {
    wait();
  } else {
    warp.arrived = 0;
    ++warp.turn;
    const unsigned first = current / kLanes * kLanes;
    wake(first, first + kLanes);
  }
  return words;
}

}  // namespace emulation
