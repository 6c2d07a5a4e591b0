// What a GEMM makes of its sums, by wgmma and by mma.sync: one text, so the same bits. A thread has from both the same
// sums of 8 columns: of columns 2 * (lane % 4) + {0, 1} in the rows lane / 4 and 8 more.
#pragma once
enum Activation { NONE, GELU_TANH, GELU };
enum Residual { NO_RESIDUAL, HALVES, RESIDUAL_CODES };

struct GemmArguments {
  const float *scale, *bias, *factor;
  const void* residual;
  void* out;
  int m, n, k;
  float center;
};

// GELU by tanh takes UNIT * x and gives 2 * UNIT * gelu(x), so that tanh's x * (0.7978845608 + 0.0356774081 * x^2) is
// two instructions. Scale and bias are times IN<>, factors times OUT<>.
constexpr float UNIT = 0.3292034910f;
template <Activation ACTIVATION> constexpr float IN = ACTIVATION == GELU_TANH ? UNIT : 1.0f;
template <Activation ACTIVATION, bool CODED> constexpr float OUT = ACTIVATION == GELU_TANH && CODED ? 0.5f / UNIT : 1.0f;
template <bool CODED> constexpr int RUN_OF = CODED ? 16 : 8;  // consecutive columns of a thread: 16 bytes

template <Activation ACTIVATION> __device__ inline float activate(float x) {
  if constexpr (ACTIVATION == GELU_TANH) return fmaf(x, tanh_of(x * fmaf(x, x, 2.4236819551f)), x);
  if constexpr (ACTIVATION == GELU) return 0.5f * x * (1.0f + erff(x * 0.7071067812f));
  return x;
}

// What is subtracted behind an activation, times the factor.
template <Activation ACTIVATION> __device__ inline float4 shift_of(float4 factor, float center) {
  float minus = -center * (ACTIVATION == GELU_TANH ? 2 * UNIT : 1.0f);
  return {factor.x * minus, factor.y * minus, factor.z * minus, factor.w * minus};
}

// Write columns 4 * four and on: codes, or halves, into `words`, where the residual is before.
template <Residual RESIDUAL, bool CODED>
__device__ inline void finish(float x0, float x1, float x2, float x3, float4 factor, u32 (&words)[4], int four) {
  if constexpr (CODED) {
    words[four] = codes_of(x0, x1, x2, x3);
  } else {
    u32 &w0 = words[2 * four], &w1 = words[2 * four + 1];
    if constexpr (RESIDUAL == HALVES) {
      float2 r0 = floats_of(w0), r1 = floats_of(w1);
      x0 += r0.x, x1 += r0.y, x2 += r1.x, x3 += r1.y;
    }
    if constexpr (RESIDUAL == RESIDUAL_CODES) {
      x0 = fmaf(float(i8(w0)), factor.x, x0), x1 = fmaf(float(i8(w0 >> 8)), factor.y, x1);
      x2 = fmaf(float(i8(w0 >> 16)), factor.z, x2), x3 = fmaf(float(i8(w0 >> 24)), factor.w, x3);
    }
    w0 = half2_of(x0, x1), w1 = half2_of(x2, x3);
  }
}

// Read the residual of 16 bytes of output, `at` values into it: codes take half of the words.
template <Residual RESIDUAL> __device__ inline void read_residual(u32 (&w)[4], const void* residual, size_t at) {
  if constexpr (RESIDUAL == HALVES) {
    uint4 v = *(const uint4*)((const char*)residual + at * 2);
    w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
  } else {
    uint2 v = *(const uint2*)((const char*)residual + at);
    w[0] = v.x, w[2] = v.y;
  }
}
