// What a GEMM makes of its sums, by wgmma and by mma.sync: one text, so the same bits. A thread has from both the same
// sums of 8 columns: of columns 2 * (lane % 4) + {0, 1} in the rows lane / 4 and 8 more.
#pragma once
enum Activation { NONE, GELU_TANH, GELU, GATED_GELU_TANH, GATED_GELU, ROTARY };
enum Residual { NO_RESIDUAL, HALVES, RESIDUAL_CODES };

struct GemmArguments {
  const float *scale, *bias, *factor;
  const void* residual;
  void* out;
  int m, n, k;
  float center;
};

// Columns 2 j and 2 j + 1 below `turned` are rotated by the angle of the row's position.
struct RotaryArguments : GemmArguments {
  const int* positions;  // [M]
  const float4* table;   // [positions, pitch] cosine and sine of two pairs of columns, as `turn_of` finds them
  int turned, head, pitch;
};
template <Activation ACTIVATION> struct Arguments { using type = GemmArguments; };
template <> struct Arguments<ROTARY> { using type = RotaryArguments; };
template <Activation ACTIVATION> using ArgumentsOf = typename Arguments<ACTIVATION>::type;
// Columns 2 j and 2 j + 1 make output j: an input, with its activation, times its gate.
template <Activation ACTIVATION> constexpr bool GATED = ACTIVATION == GATED_GELU_TANH || ACTIVATION == GATED_GELU;
template <Activation ACTIVATION> constexpr bool BY_TANH = ACTIVATION == GELU_TANH || ACTIVATION == GATED_GELU_TANH;

// GELU by tanh takes UNIT * x and gives 2 * UNIT * gelu(x), so that tanh's x * (0.7978845608 + 0.0356774081 * x^2) is
// two instructions. Scale and bias are times IN<>, factors times OUT<>.
constexpr float UNIT = 0.3292034910f;
template <Activation ACTIVATION> constexpr float IN = BY_TANH<ACTIVATION> ? UNIT : 1.0f;
template <Activation ACTIVATION> constexpr float BACK = 0.5f / UNIT / (GATED<ACTIVATION> ? UNIT : 1.0f);  // a gate is times UNIT too
template <Activation ACTIVATION, bool CODED> constexpr float OUT = BY_TANH<ACTIVATION> && CODED ? BACK<ACTIVATION> : 1.0f;
template <bool CODED> constexpr int RUN_OF = CODED ? 16 : 8;  // consecutive columns of a thread: 16 bytes

template <Activation ACTIVATION> __device__ inline float activate(float x) {
  if constexpr (ACTIVATION == GELU_TANH) return fmaf(x, tanh_of(x * fmaf(x, x, 2.4236819551f)), x);
  if constexpr (ACTIVATION == GELU) return 0.5f * x * (1.0f + erff(x * 0.7071067812f));
  return x;
}

// Of four columns the two outputs that they make.
template <Activation ACTIVATION> __device__ inline void gate(float& x0, float& x1, float x2, float x3) {
  constexpr Activation OWN = ACTIVATION == GATED_GELU_TANH ? GELU_TANH : GELU;
  x0 = activate<OWN>(x0) * x1, x1 = activate<OWN>(x2) * x3;
}

// Where the turns of four columns are in a row of the table; below 0: they are not rotated.
template <bool CODED> __device__ inline int turn_of(int column, const RotaryArguments& call) {
  constexpr int RUN = RUN_OF<CODED>;
  int c = column % call.head;
  return column < call.turned ? c / (4 * RUN) * RUN + c % RUN / 4 * 4 + c / RUN % 4 : -1;
}
__device__ inline void turn(float& x0, float& x1, float& x2, float& x3, float4 by) {
  float a = x0, b = x2;
  x0 = fmaf(a, by.x, -__fmul_rn(x1, by.y)), x1 = fmaf(x1, by.x, __fmul_rn(a, by.y));
  x2 = fmaf(b, by.z, -__fmul_rn(x3, by.w)), x3 = fmaf(x3, by.z, __fmul_rn(b, by.w));
}

// What is subtracted behind an activation, times the factor.
template <Activation ACTIVATION> __device__ inline float4 shift_of(float4 factor, float center) {
  float minus = -center * (BY_TANH<ACTIVATION> ? 2 * UNIT : 1.0f) * (ACTIVATION == GATED_GELU_TANH ? UNIT : 1.0f);
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

// The same of a gate's two outputs: half of the columns.
template <bool CODED> __device__ inline void finish_gated(float x0, float x1, u32 (&words)[4], int four) {
  if constexpr (!CODED) words[four] = half2_of(x0, x1);
  else if (four % 2 == 0) words[four / 2] = codes_of(x0, x1, 0, 0);
  else words[four / 2] |= codes_of(0, 0, x0, x1);
}
// Write 16 bytes, or 8 of a gate's outputs, `at` values into the product.
template <Activation ACTIVATION, bool CODED> __device__ inline void write_words(void* out, size_t at, const u32 (&w)[4]) {
  char* to = (char*)out + at * (CODED ? 1 : 2) / (GATED<ACTIVATION> ? 2 : 1);
  if constexpr (GATED<ACTIVATION>) *(uint2*)to = {w[0], w[1]};
  else *(uint4*)to = {w[0], w[1], w[2], w[3]};
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
