// The kernels' arguments, and the table of functions that each instruction-set variant of kernels.cpp provides.
#pragma once
#include <cstdint>

namespace treadle {

enum DType : std::int32_t { kFloat32 = 0, kBFloat16 = 1 };
enum Activation : std::int32_t { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3, kRelu2 = 4 };

// Where rows lie: row r is at (r / group) * outer + (r % group) * inner elements from `data`.
struct Rows {
  void* data;
  std::int64_t group, outer, inner;
};

namespace {  // as in math.h: a copy for each variant

template <class T>
inline T* row_of(const Rows& rows, std::int64_t row) {
  return static_cast<T*>(rows.data) + (row / rows.group) * rows.outer + (row % rows.group) * rows.inner;
}

}  // namespace

struct RmsNorm {
  DType x_type, weight_type;
  std::int64_t width;
  float eps, offset;
  Rows x, residual, out, total;  // residual.data and total.data are null unless an addition comes first
  const void* weight;
};

struct RmsNormBackward {
  DType x_type, weight_type;
  std::int64_t width;
  float eps, offset;
  Rows grad, x, extra, grad_x;  // extra: added to the gradient of x, or null
  const void* weight;
};

struct GatedActivation {
  DType type;
  Activation kind;
  std::int64_t width;
  Rows gate, up, out;                 // forward
  Rows grad, grad_gate, grad_up;      // backward
};

struct Rope {
  DType type;
  bool interleaved, inverse;
  std::int64_t heads, width, pairs;   // rows are (token, head); `pairs` of channels are turned
  Rows x, out;
  const float *cos, *sin;             // [tokens, pairs]
};

struct CrossEntropy {
  DType type;
  std::int64_t vocabulary;
  float softcap;
  bool with_gradients;
  void* logits;                       // [rows, vocabulary]; replaced by its gradient when asked for
  const std::int64_t* targets;
  const float* weights;
  float* losses;
};

struct Sample {
  DType type;
  std::int64_t vocabulary;
  const void* logits;                    // [rows, vocabulary]
  float* odds;                           // [rows, vocabulary], scratch
  const float* temperature;
  const std::int32_t* top_k;
  const float *top_p, *min_p, *uniform;
  std::int64_t* tokens;
};

struct PagedKernels;
struct QuantizedKernels;

// Each function handles rows begin .. end-1. `grad_weight` is float32 and is added to.
struct Kernels {
  const char* name;
  void (*rms_norm)(const RmsNorm&, std::int64_t begin, std::int64_t end);
  void (*rms_norm_backward)(const RmsNormBackward&, std::int64_t begin, std::int64_t end, float* grad_weight);
  void (*gated_activation)(const GatedActivation&, std::int64_t begin, std::int64_t end);
  void (*gated_activation_backward)(const GatedActivation&, std::int64_t begin, std::int64_t end);
  void (*rope)(const Rope&, std::int64_t begin, std::int64_t end);
  void (*cross_entropy)(const CrossEntropy&, std::int64_t begin, std::int64_t end);
  void (*sample)(const Sample&, std::int64_t begin, std::int64_t end);
  const PagedKernels* paged;
  const QuantizedKernels* quantized;
};

// The variant in use.
const Kernels& chosen_kernels();

}  // namespace treadle
