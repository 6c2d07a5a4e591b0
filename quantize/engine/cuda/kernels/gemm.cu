// INT8 GEMM of Hopper: out[M, N] = epilogue(A[M, K] . B[N, K]^T), codes int8, sums int32, row-major.
//
// A block has three warp groups: one loads by TMA, two take turns (ping-pong): while one multiplies a tile, the
// other finishes its own. Or they make half of each tile together: then the last wave of blocks ends sooner. Each block
// stays for many tiles. If it is stationary, these follow each other in a column of tiles, and the weights of that
// column stay in shared memory: half of the bytes are loaded. Rows of B are permuted by the packer so that a thread
// owns consecutive columns and writes 16 bytes at once: no staging in shared memory.
// The epilogue is x = activation(sum * scale[n] + bias[n]); then x + residual[m, n] in FP16, or x + codes[m, n] *
// factor[n]; then FP16, or codes round(x), behind an activation round((x - center) * factor[n]). What it reads of
// columns is in shared memory before a group's turn begins.
#include "ptx.cuh"
#include "epilogue.cuh"

// Of a tile with rows of 128 bytes, swizzled by 128 bytes: 8 rows lie 1,024 bytes apart.
__device__ inline u64 descriptor(u32 address) { return u64(address >> 4 & 0x3FFF) | 1ull << 16 | 64ull << 32 | 1ull << 62; }

// Small tiles leave registers of a multiprocessor: a block of the kernel before or behind runs beside theirs. So it is
// where that was timed faster: all of a BERT, none of a ModernBERT.
template <int MI, bool TOGETHER, Activation ACTIVATION, Residual RESIDUAL>
constexpr bool LEAN = MI == 1 && !TOGETHER && RESIDUAL != HALVES && (ACTIVATION == NONE || ACTIVATION == GELU_TANH);

template <int MI, int TN, int STAGES, bool STATIONARY, bool TOGETHER, Activation ACTIVATION, Residual RESIDUAL, bool CODED>
__device__ inline void gemm_body(const TensorMap& a_map, const TensorMap& b_map, const ArgumentsOf<ACTIVATION>& call) {
  constexpr int GROUPS = TOGETHER ? 2 : 1, TM = 64 * MI * GROUPS, TK = 128;
  constexpr int A_BYTES = TM * TK, B_BYTES = TN * TK, STAGE = A_BYTES + (STATIONARY ? 0 : B_BYTES);
  constexpr bool SCALED = CODED && ACTIVATION != NONE && ACTIVATION != ROTARY, FACTOR = SCALED || RESIDUAL == RESIDUAL_CODES;
  constexpr int RUN = RUN_OF<CODED>, GROUP = 4 * RUN;
  extern __shared__ u8 memory[];
  u32 base = (shared_address(memory) + 1023) & ~1023u;
  int n_tiles = (call.n + TN - 1) / TN, m_tiles = (call.m + TM - 1) / TM;
  int tiles = n_tiles * m_tiles, blocks = (call.k + TK - 1) / TK, first = blockIdx.x, step = gridDim.x;
  if constexpr (STATIONARY)
    first = tiles * blockIdx.x / gridDim.x, tiles = tiles * (blockIdx.x + 1) / gridDim.x, step = 1;
  auto row_of = [&](int tile) { return (STATIONARY ? tile % m_tiles : tile / n_tiles) * TM; };
  auto column_of = [&](int tile) { return (STATIONARY ? tile / m_tiles : tile % n_tiles) * TN; };
  u32 weights = base + STAGES * STAGE, full = weights + (STATIONARY ? blocks * B_BYTES : 0), empty = full + 8 * STAGES;
  auto b_at = [&](int at, int block) { return STATIONARY ? weights + block * B_BYTES : base + at * STAGE + A_BYTES; };
  int thread = threadIdx.x, group = of_warp(thread / 128), warp = thread % 128 / 32, lane = thread % 32;

  if (thread == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, 4 * GROUPS);
    }
    barriers_ready();
    prefetch_map(&a_map);
    prefetch_map(&b_map);
  }
  __syncthreads();
  launch_next();

  if (group == 0) {
    fewer_registers<24>();
    if (thread == 0) {
      // Weights do not depend on previous kernels: the first of them are loaded while those still run.
      int ahead = min(STAGES, blocks), column = column_of(first);
      for (int at = 0; at < ahead; at++) {
        barrier_expect(full + 8 * at, A_BYTES + B_BYTES);
        load_tile(b_at(at, at), &b_map, at * TK, column, full + 8 * at);
      }
      wait_previous();
      int at = 0; u32 phase = 0;
      for (int tile = first; tile < tiles; tile += step) {
        int row = row_of(tile), column = column_of(tile);
        // There are no more stages than blocks of K: where a stage is free, so is its block of the column before.
        bool loads_b = !STATIONARY || tile == first || column != column_of(tile - 1);
        for (int block = 0; block < blocks; block++) {
          u32 to = base + at * STAGE, bar = full + 8 * at;
          if (tile > first || block >= ahead) {
            barrier_wait(empty + 8 * at, phase ^ 1);
            barrier_expect(bar, A_BYTES + (loads_b ? B_BYTES : 0));
            if (loads_b) load_tile(b_at(at, block), &b_map, block * TK, column, bar);
          }
          load_tile(to, &a_map, block * TK, row, bar);
          if (++at == STAGES) at = 0, phase ^= 1;
        }
      }
    }
  } else {
    more_registers<LEAN<MI, TOGETHER, ACTIVATION, RESIDUAL> ? 128 : 240>();
    // Together, both groups make half of the rows of each tile; else every other tile.
    int mine = group - 1, who = TOGETHER ? 0 : mine, every = TOGETHER ? 1 : 2;
    int slot = TOGETHER ? thread - 128 : thread % 128, below = TOGETHER ? 64 * MI * mine : 0;
    float* numbers = (float*)(memory + (empty + 8 * STAGES - shared_address(memory))) + 6 * TN * who;  // [2][3][TN]
    float loaded[3];  // of a column of the group's next tile: scale, bias, factor
    auto load = [&](int tile) {
      int column = column_of(tile) + slot;
      if (tile >= tiles || slot >= TN || column >= call.n) return;
      loaded[0] = call.scale[column], loaded[1] = call.bias[column];
      if constexpr (FACTOR) loaded[2] = call.factor[GATED<ACTIVATION> ? column / 2 : column];
    };
    auto store = [&](float* to) {
      if (slot >= TN) return;
      to[slot] = loaded[0] * IN<ACTIVATION>, to[TN + slot] = loaded[1] * IN<ACTIVATION>;
      if constexpr (FACTOR) to[2 * TN + slot] = loaded[2] * OUT<ACTIVATION, CODED>;
    };
    if (who == 1) turn_give(1);  // the first turn is the first group's
    load(first + who * step);
    store(numbers);
    wait_previous();
    for (int number = who, tile = first + who * step; tile < tiles; number += every, tile += every * step) {
      int row = row_of(tile) + below + 16 * warp + lane / 4, column = column_of(tile) + RUN * (lane % 4);
      int done = number * blocks;  // k blocks of all tiles before this one
      const float* own = numbers + (number & every ? 3 * TN : 0) + RUN * (lane % 4);
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
              read_residual<RESIDUAL>(words[g][mi][h], call.residual, at);
            }
      }
      int places[MI][2];  // of the rows' turns
      if constexpr (ACTIVATION == ROTARY) {
#pragma unroll
        for (int i = 0; i < 2 * MI; i++)
          places[i / 2][i % 2] = call.positions[min(row + i / 2 * 64 + i % 2 * 8, call.m - 1)] * call.pitch;
      }
      int sums[MI][TN / 2];
      turn_wait(1 + who);
      load(tile + every * step);
      int at = done % STAGES; u32 phase = done / STAGES & 1; int last = -1;
      for (int block = 0; block < blocks; block++) {
        barrier_wait(full + 8 * at, phase);
#pragma unroll
        for (int mi = 0; mi < MI; mi++)
#pragma unroll
          for (int i = 0; i < TN / 2; i++) pin(sums[mi][i]);
        wgmma_fence();
        u64 a = descriptor(base + at * STAGE + below * TK), b = descriptor(b_at(at, block));
#pragma unroll
        for (int part = 0; part < 4; part++)
#pragma unroll
          for (int mi = 0; mi < MI; mi++) wgmma<TN>(sums[mi], a + 2 * part + mi * (64 * TK >> 4), b + 2 * part, block + part > 0);
        wgmma_commit();
        if (last >= 0) {
          wgmma_wait<1>();
          if (lane == 0) barrier_arrive(empty + 8 * last);
        }
        last = at;
        if (++at == STAGES) at = 0, phase ^= 1;
      }
      if constexpr (!TOGETHER) turn_give(2 - mine);
      store(numbers + (number & every ? 0 : 3 * TN));  // all warps are done with the group's previous tile
      float4 next[3];  // scale, bias and factor of the next four columns: shared memory is busy, and slow to answer
      auto read = [&](int at) {
#pragma unroll
        for (int i = 0; i < (FACTOR ? 3 : 2); i++) next[i] = *(const float4*)(own + i * TN + at);
      };
      read(0);
#pragma unroll
      for (int mi = 0; mi < MI; mi++)
#pragma unroll
        for (int i = 0; i < TN / 2; i++) pin(sums[mi][i]);
      wgmma_wait<0>();
#pragma unroll
      for (int mi = 0; mi < MI; mi++)
#pragma unroll
        for (int i = 0; i < TN / 2; i++) pin(sums[mi][i]);
      if (lane == 0) barrier_arrive(empty + 8 * last);

#pragma unroll
      for (int g = 0; g < TN / GROUP; g++, column += GROUP) {
        if (column >= call.n) break;
#pragma unroll
        for (int four = 0; four < RUN / 4; four++) {
          float4 scale = next[0], bias = next[1], factor = next[2];
          float4 shift = shift_of<ACTIVATION>(factor, call.center);
          int turned = -1;
          if constexpr (ACTIVATION == ROTARY) turned = turn_of<CODED>(column + 4 * four, call);
          if (four < RUN / 4 - 1) read(g * GROUP + 4 * (four + 1));
          else if (g < TN / GROUP - 1) read((g + 1) * GROUP);
#pragma unroll
          for (int mi = 0; mi < MI; mi++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
              const int* s = &sums[mi][g * GROUP / 2 + 8 * four + 2 * h];
              float x0 = activate<ACTIVATION>(fmaf(float(s[0]), scale.x, bias.x));
              float x1 = activate<ACTIVATION>(fmaf(float(s[1]), scale.y, bias.y));
              float x2 = activate<ACTIVATION>(fmaf(float(s[4]), scale.z, bias.z));
              float x3 = activate<ACTIVATION>(fmaf(float(s[5]), scale.w, bias.w));
              if constexpr (ACTIVATION == ROTARY) {
                if (turned >= 0) turn(x0, x1, x2, x3, call.table[places[mi][h] + turned]);
              }
              if constexpr (GATED<ACTIVATION>) {
                gate<ACTIVATION>(x0, x1, x2, x3);
                if constexpr (CODED) x0 = fmaf(x0, factor.x, shift.x), x1 = fmaf(x1, factor.z, shift.z);
                else if constexpr (BY_TANH<ACTIVATION>) x0 *= BACK<ACTIVATION>, x1 *= BACK<ACTIVATION>;
                finish_gated<CODED>(x0, x1, words[g][mi][h], four);
                continue;
              }
              if constexpr (SCALED) {
                x0 = fmaf(x0, factor.x, shift.x), x1 = fmaf(x1, factor.y, shift.y);
                x2 = fmaf(x2, factor.z, shift.z), x3 = fmaf(x3, factor.w, shift.w);
              } else if constexpr (ACTIVATION == GELU_TANH) x0 *= 0.5f / UNIT, x1 *= 0.5f / UNIT, x2 *= 0.5f / UNIT, x3 *= 0.5f / UNIT;
              finish<RESIDUAL, CODED>(x0, x1, x2, x3, factor, words[g][mi][h], four);
            }
        }
#pragma unroll
        for (int mi = 0; mi < MI; mi++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            size_t r = row + 64 * mi + 8 * h;
            if (r >= call.m) continue;
            write_words<ACTIVATION, CODED>(call.out, r * call.n + column, words[g][mi][h]);
          }
      }
    }
  }
}

#define GEMM_OF(NAME, MI, TN, STAGES, STATIONARY, TOGETHER, ACTIVATION, RESIDUAL, CODED)                         \
  extern "C" __global__ void __launch_bounds__((LEAN<MI, TOGETHER, ACTIVATION, RESIDUAL> ? 640 : 384), 1)       \
      NAME(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, const ArgumentsOf<ACTIVATION> call) { \
    gemm_body<MI, TN, STAGES, STATIONARY, TOGETHER, ACTIVATION, RESIDUAL, CODED>(a, b, call);                    \
  }
