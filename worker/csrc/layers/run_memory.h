// The scratch memory of a run over rows, taken part by part.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace tokend {

inline int64_t bytes_of(int64_t dtype) { return dtype == TOKEND_FLOAT32 ? 4 : 2; }

// Rows of some bytes each, `stride` bytes apart.
struct Rows {
    char* memory = nullptr;
    int64_t stride = 0;

    void* row(int64_t index) const { return memory + index * stride; }
};

// Takes memory from an address aligned to 64, or counts it if the address is null.
class RunMemory {
  public:
    explicit RunMemory(void* memory) : memory_(static_cast<char*>(memory)) {}

    int64_t num_bytes() const { return num_bytes_; }

    char* take(int64_t count) {
        char* begin = memory_ + num_bytes_;
        num_bytes_ += (count + 63) / 64 * 64;
        return begin;
    }

    template <class T>
    T* array(int64_t count) {
        return reinterpret_cast<T*>(take(count * int64_t(sizeof(T))));
    }

    Rows rows(int64_t num_rows, int64_t row_bytes) { return {take(num_rows * row_bytes), row_bytes}; }

    // Rows that a product may read in place: an odd number of cache lines apart, so that the same
    // column of several rows falls into different cache sets.
    Rows input_rows(int64_t num_rows, int64_t row_bytes) { return rows(num_rows, ((row_bytes + 63) / 64 | 1) * 64); }

  private:
    char* memory_;
    int64_t num_bytes_ = 0;
};

}  // namespace tokend
