// Routed (token, slot) pairs as the caller gives them: global expert ids, or words that hold an id
// and a weight, (id << 16) | bf16.
#pragma once

#include "common/types.cuh"

namespace cupy_moe::routing {

// Experts [offset, offset + count) are local.
struct LocalExperts {
  i32 offset;
  i32 count;
};

// Local expert of a slot, or -1. The difference modulo 2^32 of any 32-bit id and a local range
// below 2^31 is smaller than the range only for ids in it: no id wraps into the range.
__device__ __forceinline__ i32 local_expert(i32 word, bool packed, LocalExperts experts) {
  const u32 id = static_cast<u32>(packed ? word >> 16 : word);
  const u32 local = id - static_cast<u32>(experts.offset);
  return local < static_cast<u32>(experts.count) ? static_cast<i32>(local) : -1;
}

}  // namespace cupy_moe::routing
