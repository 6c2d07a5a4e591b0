// INT8 GEMM by mma.sync: out[M, N] = epilogue(A[M, K] . B[N, K]^T), for compute capability 7.5 and newer. Arrays,
// permuted rows of B, epilogue and bits are those of gemm.cu; there are no tensor maps.
//
// A block stays for many tiles. Its loads run STAGES - 1 blocks of K ahead, across the border of tiles, so they go on
// while an epilogue is computed; a second block of the multiprocessor multiplies meanwhile. Turing has no asynchronous
// copies: there a block of K waits in registers while the one before is multiplied. Where there are few tiles, parts of
// K of one tile are summed by several blocks; the last to end adds the sums of the others, which are integers.
#include "ptx.cuh"
#include "epilogue.cuh"

struct Split {
  u32* done;   // [tiles], 0 before and after
  int4* sums;  // [tiles, parts, TM * TN / 4]
  int parts;   // of K
};

// Make the output of a warp's sums: rows `row + 16 * mi + 8 * h`, columns from `column` on.
template <int MI, int WN, Activation ACTIVATION, Residual RESIDUAL, bool CODED>
__device__ inline void write_sums(const int (&sums)[MI][WN / 8][4], int row, int column, const ArgumentsOf<ACTIVATION>& call) {
  constexpr int RUN = RUN_OF<CODED>, GROUP = 4 * RUN;
  constexpr bool SCALED = CODED && ACTIVATION != NONE && ACTIVATION != ROTARY;
  int places[MI][2];  // of the rows' turns
  if constexpr (ACTIVATION == ROTARY) {
#pragma unroll
    for (int i = 0; i < 2 * MI; i++) places[i / 2][i % 2] = call.positions[min(row + 8 * i, call.m - 1)] * call.pitch;
  }
#pragma unroll
  for (int g = 0; g < WN / GROUP; g++, column += GROUP) {
    if (column >= call.n) break;
    u32 words[MI][2][4];  // what a thread writes, and before that the residual
    if constexpr (RESIDUAL != NO_RESIDUAL) {
#pragma unroll
      for (int mi = 0; mi < MI; mi++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          size_t r = row + 16 * mi + 8 * h;
          if (r < call.m) read_residual<RESIDUAL>(words[mi][h], call.residual, r * call.n + column);
        }
    }
#pragma unroll
    for (int four = 0; four < RUN / 4; four++) {
      auto read = [&](const float* from, float by) {
        float4 v = *(const float4*)(from + column + 4 * four);
        return float4{v.x * by, v.y * by, v.z * by, v.w * by};
      };
      float4 scale = read(call.scale, IN<ACTIVATION>), bias = read(call.bias, IN<ACTIVATION>), factor, shift;
      if constexpr (SCALED && GATED<ACTIVATION>) {
        float2 v = *(const float2*)(call.factor + (column + 4 * four) / 2);
        factor = {v.x * OUT<ACTIVATION, CODED>, v.y * OUT<ACTIVATION, CODED>, 0, 0};
      } else if constexpr (SCALED || RESIDUAL == RESIDUAL_CODES) factor = read(call.factor, OUT<ACTIVATION, CODED>);
      if constexpr (SCALED) shift = shift_of<ACTIVATION>(factor, call.center);
      int turned = -1;
      if constexpr (ACTIVATION == ROTARY) turned = turn_of<CODED>(column + 4 * four, call);
      auto scaled = [](int sum, float scale, float bias, float factor, float shift) {
        float x = activate<ACTIVATION>(fmaf(float(sum), scale, bias));
        if constexpr (SCALED && !GATED<ACTIVATION>) return fmaf(x, factor, shift);
        return ACTIVATION == GELU_TANH ? x * (0.5f / UNIT) : x;
      };
#pragma unroll
      for (int mi = 0; mi < MI; mi++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int *s = &sums[mi][g * GROUP / 8 + 2 * four][2 * h], *next = &sums[mi][g * GROUP / 8 + 2 * four + 1][2 * h];
          float x0 = scaled(s[0], scale.x, bias.x, factor.x, shift.x), x1 = scaled(s[1], scale.y, bias.y, factor.y, shift.y);
          float x2 = scaled(next[0], scale.z, bias.z, factor.z, shift.z), x3 = scaled(next[1], scale.w, bias.w, factor.w, shift.w);
          if constexpr (ACTIVATION == ROTARY) {
            if (turned >= 0) turn(x0, x1, x2, x3, call.table[places[mi][h] + turned]);
          }
          if constexpr (GATED<ACTIVATION>) {
            gate<ACTIVATION>(x0, x1, x2, x3);
            if constexpr (CODED) x0 = fmaf(x0, factor.x, shift.x), x1 = fmaf(x1, factor.y, shift.y);
            else if constexpr (BY_TANH<ACTIVATION>) x0 *= BACK<ACTIVATION>, x1 *= BACK<ACTIVATION>;
            finish_gated<CODED>(x0, x1, words[mi][h], four);
          } else finish<RESIDUAL, CODED>(x0, x1, x2, x3, factor, words[mi][h], four);
        }
    }
#pragma unroll
    for (int mi = 0; mi < MI; mi++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        size_t r = row + 16 * mi + 8 * h;
        if (r >= call.m) continue;
        write_words<ACTIVATION, CODED>(call.out, r * call.n + column, words[mi][h]);
      }
  }
}

template <int TM, int TN, int TK, int WARPS_M, int WARPS_N, int STAGES, bool SPLITS, Activation ACTIVATION, Residual RESIDUAL, bool CODED>
__device__ inline void gemm_body(const i8* a_rows, const i8* b_rows, const Split& split, const ArgumentsOf<ACTIVATION>& call) {
  constexpr int THREADS = 32 * WARPS_M * WARPS_N, WM = TM / WARPS_M, WN = TN / WARPS_N, MI = WM / 16, NI = WN / 8;
  constexpr int CHUNKS = TK / 16, ROWS = THREADS / CHUNKS, A_COPIES = TM / ROWS, B_COPIES = TN / ROWS;  // of a thread
  constexpr int A_BYTES = TM * TK, STAGE = (TM + TN) * TK, STEPS = TK / 32, RUN = RUN_OF<CODED>, SPAN = 8;
  static_assert(WN % (4 * RUN) == 0 && TM % ROWS == 0 && TN % ROWS == 0 && ROWS % 8 == 0 && STEPS % 2 == 0);
  extern __shared__ __align__(1024) u8 memory[];
  u32 base = shared_address(memory);
  int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  int n_tiles = (call.n + TN - 1) / TN, m_tiles = (call.m + TM - 1) / TM, parts = SPLITS ? split.parts : 1;
  int tiles = n_tiles * m_tiles * parts;  // and their parts
  int blocks = (call.k + TK - 1) / TK, rows_b = (call.n + 4 * RUN - 1) / (4 * RUN) * (4 * RUN);
  // Tiles in the order of columns of SPAN tiles, so that blocks that run at once share rows of A and of B.
  auto place = [&](int tile, int& row, int& column) {
    int group = tile / parts / (SPAN * n_tiles), at = tile / parts - group * SPAN * n_tiles, high = min(m_tiles - group * SPAN, SPAN);
    row = (group * SPAN + at % high) * TM, column = at / high * TN;
  };
  auto begin_of = [&](int part) { return SPLITS ? blocks * part / parts : part * blocks; };  // blocks of K
  auto swizzle = [](int row) { return TK == 128 ? row % 8 : row / 2 % 4; };  // eight rows are in all banks

  // loads: block `load_k` of K of tile `load_tile`
  int copied = thread / CHUNKS, chunk = thread % CHUNKS;
  u32 to = base + copied * TK + 16 * (chunk ^ swizzle(copied));
  int load_tile = blockIdx.x, load_k = 0, last_k = 0, a_at = 0, b_at = 0, a_left = 0, b_left = 0, pitch = ROWS * call.k;
  auto aim = [&]() {
    int row, column;
    place(load_tile, row, column);
    load_k = begin_of(load_tile % parts), last_k = begin_of(load_tile % parts + 1);
    row += copied, column += copied;
    int skipped = load_k * TK + 16 * chunk;
    a_at = row * call.k + skipped, b_at = column * call.k + skipped, a_left = call.m - row, b_left = rows_b - column;
  };
  auto advance = [&]() {
    a_at += TK, b_at += TK;
    if (++load_k < last_k) return;
    load_tile += gridDim.x;
    if (load_tile < tiles) aim();
  };
  auto issue_b = [&](int slot, int at, int block) {
    bool there = block * TK + 16 * chunk < call.k;
#pragma unroll
    for (int i = 0; i < B_COPIES; i++)
      copy16_or_zeros(to + slot * STAGE + A_BYTES + i * ROWS * TK, b_rows + at + i * pitch, there && i * ROWS < b_left);
  };
  auto issue = [&](int slot, bool weights) {
    if (load_tile < tiles) {
      bool there = load_k * TK + 16 * chunk < call.k;
#pragma unroll
      for (int i = 0; i < A_COPIES; i++)
        copy16_or_zeros(to + slot * STAGE + i * ROWS * TK, a_rows + a_at + i * pitch, there && i * ROWS < a_left);
      if (weights) issue_b(slot, b_at, load_k);
      advance();
    }
    copies_commit();
  };
  uint4 held[AMPERE ? 1 : A_COPIES + B_COPIES];
  auto fetch = [&]() {
    if (load_tile >= tiles) return;
    bool there = load_k * TK + 16 * chunk < call.k;
#pragma unroll
    for (int i = 0; i < A_COPIES; i++)
      held[i] = there && i * ROWS < a_left ? *(const uint4*)(a_rows + a_at + i * pitch) : uint4{0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < B_COPIES; i++)
      held[A_COPIES + i] = there && i * ROWS < b_left ? *(const uint4*)(b_rows + b_at + i * pitch) : uint4{0, 0, 0, 0};
    advance();
  };
  auto put = [&](int slot) {
    u32 at = to + slot * STAGE;
#pragma unroll
    for (int i = 0; i < A_COPIES; i++) put16(at + i * ROWS * TK, held[i]);
#pragma unroll
    for (int i = 0; i < B_COPIES; i++) put16(at + A_BYTES + i * ROWS * TK, held[A_COPIES + i]);
  };

  // operands of a step of 32 of K
  int warp_m = warp / WARPS_N * WM, warp_n = warp % WARPS_N * WN;
  int a_row = warp_m + lane % 16, b_row = warp_n + lane / 16 * 8 + lane % 8;
  u32 a_from = base + a_row * TK + 16 * (lane / 16 ^ swizzle(a_row));
  u32 b_from = base + A_BYTES + b_row * TK + 16 * (lane / 8 % 2 ^ swizzle(b_row));
  u32 a[2][MI][4], b[2][NI / 2][4];
  auto read = [&](int buffer, int slot, int step) {
#pragma unroll
    for (int i = 0; i < NI / 2; i++) load_matrices(b[buffer][i], (b_from + slot * STAGE ^ 32 * step) + i * 16 * TK);
#pragma unroll
    for (int i = 0; i < MI; i++) load_matrices(a[buffer][i], (a_from + slot * STAGE ^ 32 * step) + i * 16 * TK);
  };

  launch_next();
  aim();
  if constexpr (AMPERE) {
    // Weights do not depend on previous kernels: the first of them are loaded while those still run.
    int ahead = EARLY ? min(STAGES - 1, last_k - load_k) : 0;
    for (int s = 0; s < ahead; s++) issue_b(s, b_at + s * TK, load_k + s);
    wait_previous();
    for (int s = 0; s < STAGES - 1; s++) issue(s, s >= ahead);
    copies_wait<STAGES - 2>();
  } else {
    fetch();
    put(0);
  }
  __syncthreads();
  int slot = 0, free = STAGES - 1;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    int sums[MI][NI][4];
#pragma unroll
    for (int i = 0; i < MI * NI * 4; i++) sums[i / (NI * 4)][i / 4 % NI][i % 4] = 0;
    read(0, slot, 0);
    int last = begin_of(tile % parts + 1) - 1;
    for (int block = begin_of(tile % parts); block <= last; block++) {
#pragma unroll
      for (int step = 0; step < STEPS; step++) {
        if (step < STEPS - 1) read((step + 1) % 2, slot, step + 1);
        if (step == 0) {
          if constexpr (AMPERE) {
            issue(free, true);
            if (++free == STAGES) free = 0;
          } else fetch();
        }
        if (step == STEPS - 1) {  // what of this block of K is not yet multiplied is in registers
          if (++slot == STAGES) slot = 0;
          if constexpr (AMPERE) copies_wait<STAGES - 2>(); else put(slot);
          __syncthreads();
          if (block < last) read(0, slot, 0);
        }
#pragma unroll
        for (int i = 0; i < MI; i++)
#pragma unroll
          for (int j = 0; j < NI; j++) {
            u32(&m)[4] = a[step % 2][i], (&n)[4] = b[step % 2][j / 2];
            mma<false>(sums[i][j], m[0], m[1], m[2], m[3], n[j % 2 * 2], n[j % 2 * 2 + 1]);
          }
      }
    }
    if constexpr (SPLITS) {
      if (parts > 1) {
        u32& before = *(u32*)(memory + STAGES * STAGE);
        auto at = [&](int part, int i) { return split.sums + (size_t(tile / parts * parts + part) * (MI * NI) + i) * THREADS + thread; };
#pragma unroll
        for (int i = 0; i < MI * NI; i++) {
          int(&s)[4] = sums[i / NI][i % NI];
          *at(tile % parts, i) = {s[0], s[1], s[2], s[3]};
        }
        __threadfence();
        __syncthreads();
        if (thread == 0) before = atomicAdd(split.done + tile / parts, 1u);
        __syncthreads();
        if (before + 1 < parts) continue;
        __threadfence();
        if (thread == 0) split.done[tile / parts] = 0;
        for (int part = 0; part < parts; part++) {
          if (part == tile % parts) continue;
#pragma unroll
          for (int i = 0; i < MI * NI; i++) {
            int(&s)[4] = sums[i / NI][i % NI];
            int4 other = *at(part, i);
            s[0] += other.x, s[1] += other.y, s[2] += other.z, s[3] += other.w;
          }
        }
      }
    }
    int row, column;
    place(tile, row, column);
    write_sums<MI, WN, ACTIVATION, RESIDUAL, CODED>(sums, row + warp_m + lane / 4, column + warp_n + RUN * (lane % 4), call);
  }
}

#define GEMM_OF(NAME, TM, TN, TK, WARPS_M, WARPS_N, STAGES, BLOCKS, SPLITS, ACTIVATION, ...)             \
  extern "C" __global__ void __launch_bounds__(32 * WARPS_M * WARPS_N, BLOCKS)                           \
      NAME(const i8* a, const i8* b, const Split split, const ArgumentsOf<ACTIVATION> call) {            \
    gemm_body<TM, TN, TK, WARPS_M, WARPS_N, STAGES, SPLITS, ACTIVATION, __VA_ARGS__>(a, b, split, call); \
  }
