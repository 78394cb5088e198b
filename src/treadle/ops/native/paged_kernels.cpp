// The kernels of the paged cache, compiled once for each instruction set like kernels.cpp.
#include <type_traits>

#include "paged_attention.h"

#ifndef TREADLE_VARIANT
#define TREADLE_VARIANT baseline
#endif

namespace treadle {
namespace TREADLE_VARIANT {

extern const PagedKernels paged_kernels;
const PagedKernels paged_kernels = {paged_write, paged_attend, paged_combine};

}  // namespace TREADLE_VARIANT
}  // namespace treadle
