// A dense step of a head, with the activation behind it: a block takes 16 outputs of eight rows at a time.
#include "ptx.cuh"

constexpr int WARPS = 8, STEPS = 4;  // of 32 channels each: a warp takes every eighth, of 1024 channels at most

enum Activation { NONE, TANH, RELU, SIGMOID, GELU, GELU_TANH };

struct Dense {
  const uint4 *x, *weight;           // FP16 [tokens, K] and [N, K]
  const unsigned short* bias;        // FP16 [N]
  const int* bounds;                 // row b reads token bounds[b] + shift; none: token b
  float* single;                     // FP32 [rows, N], or none
  unsigned short* half;              // FP16 [rows, N], or none
  int shift, activation, tokens, rows, n, k;
};

__device__ inline float activate(float x, int activation) {
  switch (activation) {
    case TANH: return tanhf(x);
    case RELU: return x < 0 ? 0 : x;
    case SIGMOID: return 1 / (1 + expf(-x));
    case GELU: return 0.5f * x * (1 + erff(x * 0.7071067812f));
    case GELU_TANH: return 0.5f * x * (1 + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
  }
  return x;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 3) head(const Dense call) {
  __shared__ float4 parts[2][WARPS][32];  // in turns, so that one barrier a turn is enough
  int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, count = call.k / 8, output = 16 * blockIdx.x;
  auto load = [&](uint4 (&to)[STEPS], const uint4* from, int row) {  // a thread's eight channels of each step
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      int at = 4 * (warp + WARPS * s) + lane % 4;
      to[s] = at < count ? from[size_t(row) * count + at] : uint4{0, 0, 0, 0};
    }
  };
  uint4 upper[STEPS], lower[STEPS], x[STEPS];
  load(upper, call.weight, min(output + lane / 4, call.n - 1));
  load(lower, call.weight, min(output + 8 + lane / 4, call.n - 1));
  int own = thread % 128, n = output + own / 16 + own % 4 / 2 * 8;  // what a thread of the first four warps sums
  float bias = floats_of(call.bias[min(n, call.n - 1)]).x;
  launch_next();
  wait_previous();
  for (int first = 8 * blockIdx.y, turn = 0; first < call.rows; first += 8 * gridDim.y, turn ^= 1) {
    int row = min(first + lane / 4, call.rows - 1);
    load(x, call.x, call.bounds ? min(max(call.bounds[row] + call.shift, 0), call.tokens - 1) : row);
    float4 sums = {0, 0, 0, 0};
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      mma(sums, upper[s].x, lower[s].x, upper[s].y, lower[s].y, x[s].x, x[s].y);
      mma(sums, upper[s].z, lower[s].z, upper[s].w, lower[s].w, x[s].z, x[s].w);
    }
    parts[turn][warp][lane] = sums;
    __syncthreads();
    int to = first + own / 4 % 4 * 2 + own % 2;
    if (thread >= 128 || to >= call.rows || n >= call.n) continue;
    float sum = bias;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += ((const float*)parts[turn][w])[own];
    sum = activate(sum, call.activation);
    if (call.single) call.single[size_t(to) * call.n + n] = sum;
    else call.half[size_t(to) * call.n + n] = half2_of(sum, 0);
  }
}
