// Memory for what a kernel needs only while it runs, kept for the next call: fresh pages cost more than the work.
//
// A block that many calls in a row have hardly used is given back: warm-up's dense steps are over at some time.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace ringprune {

// A buffer of the process's pool for as long as this lives; each thread that asks at the same time gets its own.
class Scratch {
 public:
  // More calls than a step has buckets: where one of them is large, it uses its block once a step.
  static constexpr int kPatience = 256;

  // What taking `count` numbers uses up: pieces start at cache lines.
  template <class T>
  static constexpr size_t bytes_for(size_t count) {
    return (count * sizeof(T) + 63) / 64 * 64;
  }

  // Args: the sum of bytes_for() over all that is going to be taken.
  explicit Scratch(size_t bytes) : bytes_(bytes) {
    {
      const std::lock_guard lock(mutex());
      if (!pool().empty()) {
        block_ = std::move(pool().back());
        pool().pop_back();
      }
    }
    if (block_.size < bytes) block_ = {std::unique_ptr<std::byte[]>(new std::byte[bytes]), bytes};
  }
  ~Scratch() {
    block_.hardly_used = bytes_ < block_.size / 4 ? block_.hardly_used + 1 : 0;
    if (block_.hardly_used >= kPatience) return;
    const std::lock_guard lock(mutex());
    pool().push_back(std::move(block_));
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  template <class T>
  T* take(size_t count) {
#ifdef __SANITIZE_ADDRESS__  // pieces of their own, so that writing beyond the end of one is seen
    used_ += bytes_for<T>(count);
    if (used_ > bytes_) std::abort();
    return reinterpret_cast<T*>(pieces_.emplace_back(new std::byte[count * sizeof(T)]).get());
#endif
    T* taken = reinterpret_cast<T*>(block_.data.get() + used_);
    used_ += bytes_for<T>(count);
    return taken;
  }

 private:
  struct Block {
    std::unique_ptr<std::byte[]> data;
    size_t size = 0;
    int hardly_used = 0;  // calls in a row that needed less than a quarter of it
  };
  static std::mutex& mutex() {
    static std::mutex* one = new std::mutex;  // never destroyed: threads may outlive main
    return *one;
  }
  static std::vector<Block>& pool() {
    static std::vector<Block>* one = new std::vector<Block>;
    return *one;
  }

  Block block_;
  size_t bytes_;
  size_t used_ = 0;
#ifdef __SANITIZE_ADDRESS__
  std::vector<std::unique_ptr<std::byte[]>> pieces_;
#endif
};

}  // namespace ringprune
