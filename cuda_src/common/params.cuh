// Compile-time checks that a kernel's `struct Params` is what the host packs. The generated
// CUPY_MOE_CHECK_PARAMS lists one CUPY_MOE_CHECK_FIELD a field, from the Python ParamLayout, and
// initializes the fields by name, which C++20 accepts in the order of the struct only. Equal names,
// order, types and size mean equal offsets (NVRTC before 13.5 has no offsetof).
#pragma once

#include "common/types.cuh"

namespace cupy_moe {

struct AnyPointer {};
struct TensorMap {
  alignas(64) u64 opaque[16];  // CUtensorMap, encoded by the host
};

template <typename Field, typename Kind>
struct FieldIs {
  static constexpr bool kValue = false;
};
template <typename Kind>
struct FieldIs<Kind, Kind> {
  static constexpr bool kValue = true;
};
template <typename Pointee>
struct FieldIs<Pointee*, AnyPointer> {
  static constexpr bool kValue = true;
};
template <typename Field, typename Kind, i32 kCount>
struct FieldIs<Field[kCount], Kind[kCount]> : FieldIs<Field, Kind> {};
template <typename Kind, i32 kCount>
struct FieldIs<Kind[kCount], Kind[kCount]> : FieldIs<Kind, Kind> {};

}  // namespace cupy_moe

#define CUPY_MOE_CHECK_FIELD(P, field, Kind)                         \
  static_assert(cupy_moe::FieldIs<decltype(P::field), Kind>::kValue, \
                #P "::" #field " is not the host's " #Kind)

// Binding every member fails unless the struct has exactly these; a forgotten last one could
// otherwise hide in the tail padding.
#define CUPY_MOE_CHECK_MEMBERS(P, ...)             \
  inline void check_members(P& params) {           \
    [[maybe_unused]] auto& [__VA_ARGS__] = params; \
  }                                                \
  static_assert(true, "a declaration for the semicolon")
