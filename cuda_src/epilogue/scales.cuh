// What one expert contributes to every value of its tiles.
#pragma once

namespace cupy_moe::epilogue {

struct ExpertScales {
  float output;  // s1 (FC1) or s2 (FC2)
  float gate;    // sg, FC1 only
  float limit;   // clamp limit on raw accumulators; SwigluStep and FC1 of FP4 only
  float alpha;   // slope of the sigmoid (Swiglu) or bound of the gate (Situ); FC1 of FP4 only
  float beta;    // added to the raw up half (Swiglu) or its bound (Situ); FC1 of FP4 only
};

// Without a limit there is nothing to clamp; values pass a limit that is NaN, too.
__device__ __forceinline__ bool clamps(const ExpertScales& scales) {
  return scales.limit < __int_as_float(0x7F800000);
}

}  // namespace cupy_moe::epilogue
