// The kernels, compiled once for each instruction set (TREADLE_VARIANT names it; the compiler's flags allow it).
// Loops are plain and the compiler vectorizes them. All arithmetic is float32, rounded once when it is stored.
#include "kernels.h"

#include "activation.h"
#include "loss.h"
#include "norm.h"
#include "rope.h"
#include "sampling.h"

#ifndef TREADLE_VARIANT
#define TREADLE_VARIANT baseline
#endif
#define TREADLE_TEXT_OF(name) #name
#define TREADLE_TEXT(name) TREADLE_TEXT_OF(name)

namespace treadle {
namespace TREADLE_VARIANT {

extern const PagedKernels paged_kernels;
extern const QuantizedKernels quantized_kernels;
extern const Kernels kernels;
const Kernels kernels = {TREADLE_TEXT(TREADLE_VARIANT),
                         rms_norm,
                         rms_norm_backward,
                         gated_activation,
                         gated_activation_backward,
                         rope,
                         cross_entropy,
                         sample,
                         &paged_kernels,
                         &quantized_kernels};

}  // namespace TREADLE_VARIANT
}  // namespace treadle
