// LayerNorm with the quantizers behind it, and the embeddings in front of the first: a warp takes a token.
#include "ptx.cuh"

constexpr int MOST = 3;  // outputs in codes: of the residual, of the linears (two quantizers at most)

struct NormOutputs {
  const float *gamma, *beta;
  void* half;                    // [T, H] FP16, or none
  i8* codes[MOST];               // [T, H] each, or none
  const float* multiplier[MOST]; // [H] of each: code = round(y * multiplier)
  float epsilon;
  int tokens, hidden, channels;  // H, and how many are the model's
  float spare;                   // the others, where x, gamma and beta are 0
};

constexpr int WARPS = 4;  // of a block
// Blocks that a multiprocessor holds at once; more codes need more registers.
template <int PARTS, int CODES> constexpr int LEAST_BLOCKS = PARTS > 16 ? 2 : PARTS > 8 ? 4 : PARTS > 6 ? 8 : CODES > 1 ? 1 : PARTS > 3 ? 4 : 7;
// What all tokens share: gamma, beta and multipliers, in registers, or in shared memory where those would be too many.
template <int PARTS, int CODES> struct Vectors {
  static constexpr bool SHARED = PARTS > 6;
  float4 own[SHARED ? 1 : PARTS][2 + CODES];
  const float4* all;
  __device__ inline Vectors(const NormOutputs& call) {
    __shared__ float4 shared[SHARED ? (2 + CODES) * 32 * PARTS : 1];
    int lane = threadIdx.x % 32, count = call.hidden / 4;
    all = shared;
#pragma unroll
    for (int v = 0; v < 2 + CODES; v++) {
      const float4* from = (const float4*)(v == 0 ? call.gamma : v == 1 ? call.beta : call.multiplier[v - 2]);
#pragma unroll
      for (int i = 0; i < (SHARED ? PARTS / WARPS : PARTS); i++)
        if constexpr (SHARED) {
          int at = threadIdx.x + 32 * WARPS * i;
          if (at < count) shared[v * 32 * PARTS + at] = from[at];
        } else own[i][v] = from[min(lane + 32 * i, count - 1)];
    }
    if constexpr (SHARED) __syncthreads();
  }
  __device__ inline float4 get(int v, int i) const {
    if constexpr (SHARED) return all[v * 32 * PARTS + threadIdx.x % 32 + 32 * i];
    else return own[i][v];
  }
};

template <int PARTS, int CODES, class Read>  // x(i): four numbers of a part
__device__ inline void norm(const Read& x, int token, const Vectors<PARTS, CODES>& v, const NormOutputs& call) {
  int lane = threadIdx.x % 32, count = call.hidden / 4;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < PARTS; i++)
    if (lane + 32 * i < count) {
      float4 t = x(i);
      sum += (t.x + t.y) + (t.z + t.w);
    }
#pragma unroll
  for (int l = 16; l; l /= 2) sum += __shfl_xor_sync(~0u, sum, l);
  float mean = sum / call.channels, square = 0;
#pragma unroll
  for (int i = 0; i < PARTS; i++)
    if (lane + 32 * i < count) {
      float4 t = x(i);
      float a = t.x - mean, b = t.y - mean, c = t.z - mean, d = t.w - mean;
      square += (a * a + b * b) + (c * c + d * d);
    }
#pragma unroll
  for (int l = 16; l; l /= 2) square += __shfl_xor_sync(~0u, square, l);
  square -= call.spare * mean * mean;
  float inverse = rsqrtf(square / call.channels + call.epsilon);
#pragma unroll
  for (int i = 0; i < PARTS; i++) {
    int at = lane + 32 * i;
    if (at >= count) continue;
    float4 t = x(i), g = v.get(0, i), b = v.get(1, i);
    float4 y = {fmaf((t.x - mean) * inverse, g.x, b.x), fmaf((t.y - mean) * inverse, g.y, b.y),
                fmaf((t.z - mean) * inverse, g.z, b.z), fmaf((t.w - mean) * inverse, g.w, b.w)};
    size_t to = size_t(token) * count + at;
    if (call.half) ((uint2*)call.half)[to] = {half2_of(y.x, y.y), half2_of(y.z, y.w)};
#pragma unroll
    for (int c = 0; c < CODES; c++) {
      float4 m = v.get(2 + c, i);
      ((u32*)call.codes[c])[to] = codes_of(y.x * m.x, y.y * m.y, y.z * m.z, y.w * m.w);
    }
  }
}

template <int PARTS, int CODES> __device__ inline void norm_body(const void* sums, const NormOutputs& call) {
  Vectors<PARTS, CODES> v(call);
  launch_next();
  wait_previous();
  int lane = threadIdx.x % 32, count = call.hidden / 4, warps = gridDim.x * WARPS;
  int token = blockIdx.x * WARPS + threadIdx.x / 32;
  uint2 raw[PARTS];
  auto read = [&](int token) {
#pragma unroll
    for (int i = 0; i < PARTS; i++)
      if (lane + 32 * i < count && token < call.tokens) raw[i] = ((const uint2*)sums)[size_t(token) * count + lane + 32 * i];
  };
  read(token);
  for (; token < call.tokens; token += warps) {
    auto float4_of = [](uint2 halves) {
      float2 a = floats_of(halves.x), b = floats_of(halves.y);
      return float4{a.x, a.y, b.x, b.y};
    };
    uint2 now[PARTS];
    float4 x[PARTS];
#pragma unroll
    for (int i = 0; i < PARTS; i++) now[i] = raw[i], x[i] = float4_of(raw[i]);
    read(token + warps);
    // the widest take half of the registers, and more instructions
    norm<PARTS, CODES>([&](int i) { return v.SHARED ? float4_of(now[i]) : x[i]; }, token, v, call);
  }
}

struct Tables { const int *ids, *positions, *types; const void *word, *position, *type; };

template <int PARTS, int CODES> __device__ inline void embed_body(const Tables& tables, const NormOutputs& call) {
  Vectors<PARTS, CODES> v(call);
  launch_next();
  wait_previous();
  int lane = threadIdx.x % 32, count = call.hidden / 4, warps = gridDim.x * WARPS;
  for (int token = blockIdx.x * WARPS + threadIdx.x / 32; token < call.tokens; token += warps) {
    const uint2* rows[3] = {(const uint2*)tables.word + size_t(tables.ids[token]) * count,
                            tables.position ? (const uint2*)tables.position + size_t(tables.positions[token]) * count : nullptr,
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
    norm<PARTS, CODES>([&](int i) { return x[i]; }, token, v, call);
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

#define NORM(PARTS, CODES)                                                               \
  extern "C" __global__ void __launch_bounds__(32 * WARPS, (LEAST_BLOCKS<PARTS, CODES>)) \
      norm_##PARTS##_##CODES(const void* sums, const NormOutputs call) {                 \
    norm_body<PARTS, CODES>(sums, call);                                                 \
  }
#define EMBED(PARTS, CODES)                                                  \
  extern "C" __global__ void __launch_bounds__(32 * WARPS)                   \
      embed_##PARTS##_##CODES(const Tables tables, const NormOutputs call) { \
    embed_body<PARTS, CODES>(tables, call);                                  \
  }
