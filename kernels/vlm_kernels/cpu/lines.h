// Vectors whose first element begins a line: rows of 64 bytes are then read whole, not in halves.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace triptych {

template <class T>
struct LineAllocator {
  using value_type = T;

  LineAllocator() = default;
  template <class U>
  LineAllocator(const LineAllocator<U>&) {}

  T* allocate(std::size_t count) {
    return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(64)));
  }
  void deallocate(T* at, std::size_t) { ::operator delete(at, std::align_val_t(64)); }

  template <class U>
  bool operator==(const LineAllocator<U>&) const { return true; }
  template <class U>
  bool operator!=(const LineAllocator<U>&) const { return false; }
};

template <class T>
using Lines = std::vector<T, LineAllocator<T>>;

}  // namespace triptych
