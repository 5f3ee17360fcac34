#pragma once

#include "common/types.cuh"

namespace cupy_moe::ptx {

inline std::atomic<int> early_successors{0};  // threads that let the next grid start

inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() { ++early_successors; }

}  // namespace cupy_moe::ptx
