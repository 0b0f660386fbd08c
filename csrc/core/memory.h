// Memory from the operating system: page-aligned, zeroed, with huge pages for large blocks.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>

namespace quire {

// Pages are allocated on first write: unused ones cost nothing.
class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data_ == MAP_FAILED) {
      data_ = nullptr;
      throw std::bad_alloc();
    }
    if (bytes >= kHuge) madvise(data_, bytes, MADV_HUGEPAGE);
  }
  ~Memory() {
    if (data_) munmap(data_, bytes_);
  }
  Memory(Memory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Memory& operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  template <typename T = uint8_t>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }

  // Ensures at least `bytes`; the content is lost when it grows.
  void reserve(size_t bytes) {
    if (bytes > bytes_) *this = Memory(bytes + bytes / 4);
  }

 private:
  static constexpr size_t kHuge = size_t(2) << 20;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace quire
