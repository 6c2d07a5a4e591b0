// INT8 GEMM of Hopper: out[M, N] = epilogue(A[M, K] . B[N, K]^T), codes int8, sums int32, row-major.
//
// A block has three warp groups: one loads by TMA, two take turns (ping-pong): while one multiplies a tile, the
// other finishes its own. Each block stays for many tiles. Rows of B are permuted by the packer so that a thread
// owns consecutive columns and writes 16 bytes at once: no staging in shared memory.
// The epilogue is x = activation(sum * scale[n] + bias[n]); then x + residual[m, n] in FP16, or x + codes[m, n] *
// factor[n]; then FP16, or codes round(x), behind an activation round(x * factor[n]).
#include "ptx.cuh"

enum Activation { NONE, GELU_TANH, GELU };
enum Residual { NO_RESIDUAL, HALVES, RESIDUAL_CODES };

template <int N> __device__ inline void wgmma(int (&d)[N / 2], u64 a, u64 b, bool add);
template <> __device__ inline void wgmma<64>(int (&d)[32], u64 a, u64 b, bool add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, p; }\n"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]),
        "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]),
        "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]),
        "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31])
      : "l"(a), "l"(b), "r"(int(add)));
}
template <> __device__ inline void wgmma<128>(int (&d)[64], u64 a, u64 b, bool add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, p; }\n"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]),
        "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]),
        "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]),
        "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31]),
        "+r"(d[32]), "+r"(d[33]), "+r"(d[34]), "+r"(d[35]), "+r"(d[36]), "+r"(d[37]), "+r"(d[38]), "+r"(d[39]),
        "+r"(d[40]), "+r"(d[41]), "+r"(d[42]), "+r"(d[43]), "+r"(d[44]), "+r"(d[45]), "+r"(d[46]), "+r"(d[47]),
        "+r"(d[48]), "+r"(d[49]), "+r"(d[50]), "+r"(d[51]), "+r"(d[52]), "+r"(d[53]), "+r"(d[54]), "+r"(d[55]),
        "+r"(d[56]), "+r"(d[57]), "+r"(d[58]), "+r"(d[59]), "+r"(d[60]), "+r"(d[61]), "+r"(d[62]), "+r"(d[63])
      : "l"(a), "l"(b), "r"(int(add)));
}

struct GemmArguments {
  const float *scale, *bias, *factor;
  const void* residual;
  void* out;
  int m, n, k;
};

// Of a tile with rows of 128 bytes, swizzled by 128 bytes: 8 rows lie 1,024 bytes apart.
__device__ inline u64 descriptor(u32 address) { return u64(address >> 4 & 0x3FFF) | 1ull << 16 | 64ull << 32 | 1ull << 62; }

template <Activation ACTIVATION> __device__ inline float activate(float x) {
  if constexpr (ACTIVATION == GELU_TANH) {
    float u = x * (0.7978845608f + 0.0356774081f * x * x), h = 0.5f * x;
    return fmaf(h, tanh_of(u), h);
  }
  if constexpr (ACTIVATION == GELU) return 0.5f * x * (1.0f + erff(x * 0.7071067812f));
  return x;
}

template <int MI, int TN, int STAGES, Activation ACTIVATION, Residual RESIDUAL, bool CODED>
__device__ inline void gemm_body(const TensorMap& a_map, const TensorMap& b_map, const GemmArguments& call) {
  constexpr int TM = 64 * MI, TK = 128;
  constexpr int A_BYTES = TM * TK, B_BYTES = TN * TK, STAGE = A_BYTES + B_BYTES;
  constexpr bool SCALED = CODED && ACTIVATION != NONE, FACTOR = SCALED || RESIDUAL == RESIDUAL_CODES;
  constexpr int RUN = CODED ? 16 : 8, GROUP = 4 * RUN;  // consecutive columns of a thread, of its four
  extern __shared__ u8 memory[];
  u32 base = (shared_address(memory) + 1023) & ~1023u;
  u32 full = base + STAGES * STAGE, empty = full + 8 * STAGES;
  int thread = threadIdx.x, group = thread / 128, warp = thread % 128 / 32, lane = thread % 32;

  if (thread == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&a_map));
    asm volatile("prefetch.tensormap [%0];" ::"l"(&b_map));
  }
  __syncthreads();
  launch_next();

  int n_tiles = (call.n + TN - 1) / TN, m_tiles = (call.m + TM - 1) / TM;
  int tiles = n_tiles * m_tiles, blocks = (call.k + TK - 1) / TK;
  int first = blockIdx.x, step = gridDim.x;

  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (thread == 0) {
      // Weights do not depend on previous kernels: the first of them are loaded while those still run.
      int ahead = min(STAGES, blocks), column = first % n_tiles * TN;
      for (int at = 0; at < ahead; at++) {
        barrier_expect(full + 8 * at, STAGE);
        load_tile(base + at * STAGE + A_BYTES, &b_map, at * TK, column, full + 8 * at);
      }
      wait_previous();
      int at = 0; u32 phase = 0;
      for (int tile = first; tile < tiles; tile += step) {
        int row = tile / n_tiles * TM, column = tile % n_tiles * TN;
        for (int block = 0; block < blocks; block++) {
          u32 to = base + at * STAGE, bar = full + 8 * at;
          if (tile > first || block >= ahead) {
            barrier_wait(empty + 8 * at, phase ^ 1);
            barrier_expect(bar, STAGE);
            load_tile(to + A_BYTES, &b_map, block * TK, column, bar);
          }
          load_tile(to, &a_map, block * TK, row, bar);
          if (++at == STAGES) at = 0, phase ^= 1;
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    int mine = group - 1, done = 0;  // k blocks of all tiles before this one
    if (mine == 1) turn_give(1);     // the first turn is the first group's
    wait_previous();
    int order = 0;
    for (int tile = first; tile < tiles; tile += step, order ^= 1, done += blocks) {
      if (order != mine) continue;
      int row = tile / n_tiles * TM + 16 * warp + lane / 4, column = tile % n_tiles * TN + RUN * (lane % 4);
      u32 words[TN / GROUP][MI][2][4];  // what a thread writes, and before that the residual
      if constexpr (RESIDUAL != NO_RESIDUAL) {
#pragma unroll
        for (int g = 0; g < TN / GROUP; g++)
#pragma unroll
          for (int mi = 0; mi < MI; mi++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
              size_t r = row + 64 * mi + 8 * h, at = r * call.n + column + g * GROUP;
              if (r >= call.m || column + g * GROUP >= call.n) continue;
              u32(&w)[4] = words[g][mi][h];
              if constexpr (RESIDUAL == HALVES) {
                uint4 v = *(const uint4*)((const char*)call.residual + at * 2);
                w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
              } else {
                uint2 v = *(const uint2*)((const char*)call.residual + at);
                w[0] = v.x, w[2] = v.y;
              }
            }
      }
      int sums[MI][TN / 2];
      turn_wait(1 + mine);
      int at = done % STAGES; u32 phase = done / STAGES & 1; int last = -1;
      for (int block = 0; block < blocks; block++) {
        barrier_wait(full + 8 * at, phase);
#pragma unroll
        for (int mi = 0; mi < MI; mi++)
#pragma unroll
          for (int i = 0; i < TN / 2; i++) asm volatile("" : "+r"(sums[mi][i])::"memory");
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        u64 a = descriptor(base + at * STAGE), b = descriptor(base + at * STAGE + A_BYTES);
#pragma unroll
        for (int part = 0; part < 4; part++)
#pragma unroll
          for (int mi = 0; mi < MI; mi++) wgmma<TN>(sums[mi], a + 2 * part + mi * (64 * TK >> 4), b + 2 * part, block + part > 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if (last >= 0) {
          asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
          if (lane == 0) barrier_arrive(empty + 8 * last);
        }
        last = at;
        if (++at == STAGES) at = 0, phase ^= 1;
      }
      turn_give(2 - mine);
#pragma unroll
      for (int mi = 0; mi < MI; mi++)
#pragma unroll
        for (int i = 0; i < TN / 2; i++) asm volatile("" : "+r"(sums[mi][i])::"memory");
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
      for (int mi = 0; mi < MI; mi++)
#pragma unroll
        for (int i = 0; i < TN / 2; i++) asm volatile("" : "+r"(sums[mi][i])::"memory");
      if (lane == 0) barrier_arrive(empty + 8 * last);

#pragma unroll
      for (int g = 0; g < TN / GROUP; g++, column += GROUP) {
        if (column >= call.n) break;
#pragma unroll
        for (int four = 0; four < RUN / 4; four++) {
          float4 scale = *(const float4*)(call.scale + column + 4 * four);
          float4 bias = *(const float4*)(call.bias + column + 4 * four), factor;
          if constexpr (FACTOR) factor = *(const float4*)(call.factor + column + 4 * four);
#pragma unroll
          for (int mi = 0; mi < MI; mi++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
              const int* s = &sums[mi][g * GROUP / 2 + 8 * four + 2 * h];
              float x0 = activate<ACTIVATION>(fmaf(float(s[0]), scale.x, bias.x));
              float x1 = activate<ACTIVATION>(fmaf(float(s[1]), scale.y, bias.y));
              float x2 = activate<ACTIVATION>(fmaf(float(s[4]), scale.z, bias.z));
              float x3 = activate<ACTIVATION>(fmaf(float(s[5]), scale.w, bias.w));
              if constexpr (SCALED) x0 *= factor.x, x1 *= factor.y, x2 *= factor.z, x3 *= factor.w;
              if constexpr (CODED) {
                words[g][mi][h][four] = codes_of(x0, x1, x2, x3);
              } else {
                u32 &w0 = words[g][mi][h][2 * four], &w1 = words[g][mi][h][2 * four + 1];
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
        }
#pragma unroll
        for (int mi = 0; mi < MI; mi++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            size_t r = row + 64 * mi + 8 * h;
            if (r >= call.m) continue;
            uint4 v = {words[g][mi][h][0], words[g][mi][h][1], words[g][mi][h][2], words[g][mi][h][3]};
            *(uint4*)((char*)call.out + (r * call.n + column) * (CODED ? 1 : 2)) = v;
          }
      }
    }
  }
}

#define GEMM_OF(NAME, MI, TN, STAGES, ACTIVATION, RESIDUAL, CODED)                                               \
  extern "C" __global__ void __launch_bounds__(384, 1)                                                           \
      NAME(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, const GemmArguments call) { \
    gemm_body<MI, TN, STAGES, ACTIVATION, RESIDUAL, CODED>(a, b, call);                                          \
  }
// Three tiles for each epilogue: 128 x 128, 64 x 128, 64 x 64.
#define GEMM(NAME, ...)                          \
  GEMM_OF(gemm_128_128_##NAME, 2, 128, 6, __VA_ARGS__) \
  GEMM_OF(gemm_64_128_##NAME, 1, 128, 8, __VA_ARGS__)  \
  GEMM_OF(gemm_64_64_##NAME, 1, 64, 12, __VA_ARGS__)
