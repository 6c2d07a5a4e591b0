// LayerNorm with the quantizers behind it, and the embeddings in front of the first: a warp takes a token.
#include "ptx.cuh"

constexpr int MOST = 3;  // outputs in codes: of the residual, of the linears (two quantizers at most)

struct NormOutputs {
  const float *gamma, *beta;
  void* half;                    // [T, H] FP16, or none
  i8* codes[MOST];               // [T, H] each, or none
  const float* multiplier[MOST]; // [H] of each: code = round(y * multiplier)
  float epsilon;
  int tokens, hidden;
};

template <int PARTS, int CODES> struct Vectors {  // what a warp holds for all its tokens
  float4 gamma[PARTS], beta[PARTS], multiplier[CODES ? CODES : 1][PARTS];
  __device__ inline Vectors(const NormOutputs& call) {
    int lane = threadIdx.x % 32, count = call.hidden / 4;
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
      int at = min(lane + 32 * i, count - 1);
      gamma[i] = ((const float4*)call.gamma)[at], beta[i] = ((const float4*)call.beta)[at];
#pragma unroll
      for (int c = 0; c < CODES; c++) multiplier[c][i] = ((const float4*)call.multiplier[c])[at];
    }
  }
};

template <int PARTS, int CODES>
__device__ inline void norm(const float4 (&x)[PARTS], int token, const Vectors<PARTS, CODES>& v, const NormOutputs& call) {
  int lane = threadIdx.x % 32, count = call.hidden / 4;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < PARTS; i++) if (lane + 32 * i < count) sum += (x[i].x + x[i].y) + (x[i].z + x[i].w);
#pragma unroll
  for (int l = 16; l; l /= 2) sum += __shfl_xor_sync(~0u, sum, l);
  float mean = sum / call.hidden, square = 0;
#pragma unroll
  for (int i = 0; i < PARTS; i++)
    if (lane + 32 * i < count) {
      float a = x[i].x - mean, b = x[i].y - mean, c = x[i].z - mean, d = x[i].w - mean;
      square += (a * a + b * b) + (c * c + d * d);
    }
#pragma unroll
  for (int l = 16; l; l /= 2) square += __shfl_xor_sync(~0u, square, l);
  float inverse = rsqrtf(square / call.hidden + call.epsilon);
#pragma unroll
  for (int i = 0; i < PARTS; i++) {
    int at = lane + 32 * i;
    if (at >= count) continue;
    float4 g = v.gamma[i], b = v.beta[i];
    float4 y = {fmaf((x[i].x - mean) * inverse, g.x, b.x), fmaf((x[i].y - mean) * inverse, g.y, b.y),
                fmaf((x[i].z - mean) * inverse, g.z, b.z), fmaf((x[i].w - mean) * inverse, g.w, b.w)};
    size_t to = size_t(token) * count + at;
    if (call.half) ((uint2*)call.half)[to] = {half2_of(y.x, y.y), half2_of(y.z, y.w)};
#pragma unroll
    for (int c = 0; c < CODES; c++) {
      float4 m = v.multiplier[c][i];
      ((u32*)call.codes[c])[to] = codes_of(y.x * m.x, y.y * m.y, y.z * m.z, y.w * m.w);
    }
  }
}

template <int PARTS, int CODES> __device__ inline void norm_body(const void* sums, const NormOutputs& call) {
  Vectors<PARTS, CODES> v(call);
  launch_next();
  wait_previous();
  int lane = threadIdx.x % 32, count = call.hidden / 4, warps = gridDim.x * (blockDim.x / 32);
  int token = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  uint2 raw[PARTS];
  auto read = [&](int token) {
#pragma unroll
    for (int i = 0; i < PARTS; i++)
      if (lane + 32 * i < count && token < call.tokens) raw[i] = ((const uint2*)sums)[size_t(token) * count + lane + 32 * i];
  };
  read(token);
  for (; token < call.tokens; token += warps) {
    float4 x[PARTS];
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
      float2 a = floats_of(raw[i].x), b = floats_of(raw[i].y);
      x[i] = {a.x, a.y, b.x, b.y};
    }
    read(token + warps);
    norm(x, token, v, call);
  }
}

struct Tables { const int *ids, *positions, *types; const void *word, *position, *type; };

template <int PARTS, int CODES> __device__ inline void embed_body(const Tables& tables, const NormOutputs& call) {
  Vectors<PARTS, CODES> v(call);
  launch_next();
  wait_previous();
  int lane = threadIdx.x % 32, count = call.hidden / 4, warps = gridDim.x * (blockDim.x / 32);
  for (int token = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; token < call.tokens; token += warps) {
    const uint2* rows[3] = {(const uint2*)tables.word + size_t(tables.ids[token]) * count,
                            (const uint2*)tables.position + size_t(tables.positions[token]) * count,
                            tables.type ? (const uint2*)tables.type + size_t(tables.types[token]) * count : nullptr};
    float4 x[PARTS];
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
      x[i] = {0, 0, 0, 0};
#pragma unroll
      for (int r = 0; r < 3; r++)
        if (rows[r] && lane + 32 * i < count) {
          uint2 w = rows[r][lane + 32 * i];
          float2 a = floats_of(w.x), b = floats_of(w.y);
          x[i].x += a.x, x[i].y += a.y, x[i].z += b.x, x[i].w += b.y;
        }
    }
    norm(x, token, v, call);
  }
}

// Codes of an FP16 tensor: one thread for four numbers.
extern "C" __global__ void __launch_bounds__(256)
    quantize(const uint2* x, const float4* multiplier, u32* codes, int tokens, int hidden) {
  launch_next();
  wait_previous();
  int count = hidden / 4, at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= tokens * count) return;
  float2 a = floats_of(x[at].x), b = floats_of(x[at].y);
  float4 m = multiplier[at % count];
  codes[at] = codes_of(a.x * m.x, a.y * m.y, b.x * m.z, b.y * m.w);
}

#define NORM(PARTS, CODES)                                                                                             \
  extern "C" __global__ void __launch_bounds__(128) norm_##PARTS##_##CODES(const void* sums, const NormOutputs call) { \
    norm_body<PARTS, CODES>(sums, call);                                                                             \
  }
#define EMBED(PARTS, CODES)                                                                                                \
  extern "C" __global__ void __launch_bounds__(128) embed_##PARTS##_##CODES(const Tables tables, const NormOutputs call) { \
    embed_body<PARTS, CODES>(tables, call);                                                                              \
  }
