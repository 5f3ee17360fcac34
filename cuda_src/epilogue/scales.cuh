// What one expert contributes to every value of its tiles.
#pragma once

namespace cupy_moe::epilogue {

struct ExpertScales {
  float output;  // s1 (FC1) or s2 (FC2)
  float gate;    // sg, FC1 only
  float limit;   // clamp limit on raw accumulators, SwigluStep only
};

}  // namespace cupy_moe::epilogue
