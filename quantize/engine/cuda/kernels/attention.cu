// Self-attention of INT8 codes over packed rows of any length, with the recipe's own arithmetic:
// S = q . k in int32; p = softmax(S * scale) in FP32, over the keys of the query's own row; P = round(p * unit);
// context = P . v in int32; code = round(context * factor[c]). Nothing is padded.
//
// A block takes 64 consecutive tokens as queries, whatever rows they belong to, and the keys from the start of the
// first token's row to the end of the last one's, for some heads one after the other: the next head is loaded while
// one is computed. A warp takes 16 of the queries and 128 keys at a time. The recipe quantizes the normalized P, so
// a warp with more than 128 keys goes over them twice: for maximum and sum, then for P . v. Sums of S start at
// 3 * 2^22, so that their bits are floats. The order of keys within 32 is permuted alike in P and v.
#include "ptx.cuh"

struct AttentionArguments {
  const i8 *q, *k, *v;     // [T, H] each, rows `pitch` apart
  const int *start, *end;  // [T] first token of a token's row, and the one behind its last
  const float* factor;     // [H] scales of P and v, over that of the context's codes
  void* out;               // [T, H] codes or FP16
  int most;                // keys that fit into a buffer of shared memory: a multiple of 128
  int heads;               // of a block
  float scale;             // scales of q and k / sqrt(head size) * log2(e)
  float unit;              // 1 / scale of P
  int tokens, hidden, pitch;
};

constexpr int KEYS = 128, QUERIES = 64;
constexpr u32 MAGIC = 0x4B400000;

template <bool FIRST>  // with sums that start at MAGIC
__device__ inline void mma(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if constexpr (FIRST)
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(MAGIC));
  else
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ inline void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ inline void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ inline void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
__device__ inline u32 low_bytes(u32 a, u32 b, u32 c, u32 d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}
__device__ inline float over_quad(float x, bool maximum) {
#pragma unroll
  for (int lane = 1; lane < 4; lane *= 2) {
    float y = __shfl_xor_sync(~0u, x, lane);
    x = maximum ? fmaxf(x, y) : x + y;
  }
  return x;
}

template <int D, bool ONE, bool CODED, bool CLAMP> __device__ inline void attention_body(const AttentionArguments& call) {
  constexpr int CHUNKS = D / 16, PARTS = D / 32, STEP = 128 / CHUNKS;  // of 16 bytes; of the inner product; rows a copy
  extern __shared__ __align__(128) i8 memory[];
  int buffer = (QUERIES + 2 * call.most + 4) * D;  // queries, keys, values, factors
  int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, quad = lane / 4, t = lane % 4;
  int window = blockIdx.x * QUERIES, head0 = blockIdx.y * call.heads, first = window + 16 * warp;
  int heads = min(call.heads, call.hidden / D - head0);
  launch_next();
  wait_previous();
  int from = call.start[window], to = call.end[min(window + QUERIES, call.tokens) - 1];
  int low = 1 << 30, high = 0, begin[2], size[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    int row = min(first + quad + 8 * h, call.tokens - 1);
    begin[h] = call.start[row], size[h] = call.end[row] - begin[h];
  }
  if (first < call.tokens) low = call.start[first], high = call.end[min(first + 15, call.tokens - 1)];
  bool whole_range = ONE || to - from <= call.most, once = whole_range && high - low <= KEYS;  // one load, one pass

  // Rows of a copy are STEP apart, so the swizzle of values is the same in all rows of a thread.
  int copied = thread / CHUNKS, chunk = thread % CHUNKS, swizzled = chunk ^ copied / (128 / D) % CHUNKS;
  auto load_keys = [&](int head, u32 at, int base) {
    u32 k = at + (QUERIES + copied) * D, v = k + call.most * D + 16 * swizzled;
    size_t source = size_t(base + copied) * call.pitch + head * D + 16 * chunk;
    k += 16 * chunk;
    for (int left = min(call.most, to - base) - copied; left > 0; left -= STEP) {
      copy16(k, call.k + source);
      copy16(v, call.v + source);
      k += STEP * D, v += STEP * D, source += size_t(STEP) * call.pitch;
    }
  };
  auto load_head = [&](int n) {
    int head = head0 + n;
    u32 at = shared_address(memory) + n % 2 * buffer;
#pragma unroll
    for (int i = 0; i < QUERIES / STEP; i++) {
      int token = min(window + copied + i * STEP, call.tokens - 1);
      copy16(at + (copied + i * STEP) * D + 16 * chunk, call.q + size_t(token) * call.pitch + head * D + 16 * chunk);
    }
    if (thread < D / 4) copy16(at + (QUERIES + 2 * call.most) * D + 16 * thread, call.factor + head * D + 4 * thread);
    load_keys(head, at, from);
    copies_commit();
  };

  load_head(0);
  for (int n = 0; n < heads; n++) {
    const i8 *qs = memory + n % 2 * buffer, *ks = qs + QUERIES * D, *vs = ks + call.most * D;
    if (n + 1 < heads && whole_range) load_head(n + 1), copies_wait<1>(); else copies_wait<0>();
    __syncthreads();
    u32 q[2][D / 16];  // of a thread: D / 4 consecutive codes of each of its two rows
    int s[KEYS / 8][4], o[CHUNKS][2][4];
    float most[2] = {-1e30f, -1e30f}, sum[2] = {0, 0}, shift[2] = {0, 0}, unit[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const u32* p = (const u32*)(qs + (16 * warp + quad + 8 * h) * D) + t * (D / 16);
      if constexpr (D == 64) *(uint4*)q[h] = *(const uint4*)p; else *(uint2*)q[h] = *(const uint2*)p;
    }
#pragma unroll
    for (int d = 0; d < CHUNKS; d++)
#pragma unroll
      for (int i = 0; i < 8; i++) o[d][i / 4][i % 4] = 0;

    // S of 16 queries and the keys from key0 on that lie `at` behind the buffer's first, `base`; -infinity where a
    // key is of another row, or was in an earlier step.
    auto score = [&](int key0, int base, int at, int groups) {
      const i8* keys = ks + (at + quad) * D + t * (D / 4);
#pragma unroll
      for (int g = 0; g < KEYS / 32; g++) {
        if (g >= groups) break;
#pragma unroll
        for (int j = 4 * g; j < 4 * g + 4; j++) {
          u32 b[D / 16];
          if constexpr (D == 64) *(uint4*)b = *(const uint4*)(keys + 8 * j * D); else *(uint2*)b = *(const uint2*)(keys + 8 * j * D);
          mma<true>(s[j], q[0][0], q[1][0], q[0][1], q[1][1], b[0], b[1]);
          if constexpr (PARTS > 1) mma<false>(s[j], q[0][2], q[1][2], q[0][3], q[1][3], b[2], b[3]);
        }
      }
      int ahead[2] = {base + at - begin[0], base + at - begin[1]};  // of the row's first key
      bool whole = groups >= 4 && key0 == base + at;
#pragma unroll
      for (int h = 0; h < 2; h++) whole &= ahead[h] >= 0 && ahead[h] + KEYS <= size[h];
      if (!__all_sync(~0u, whole)) {
        int skip = key0 - base - at, limit = 32 * groups;
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            int key = 8 * j + 2 * t + i % 2;
            bool own = u32(ahead[i / 2] + key) < size[i / 2] && key >= skip && key < limit;
            s[j][i] = own ? s[j][i] : 0xFF800000;
          }
      }
    };
    auto weigh = [&]() {  // s becomes exp(S - maximum so far); sums go on
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float m = most[h];
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
          m = fmaxf(m, fmaxf(__int_as_float(s[j][2 * h]), __int_as_float(s[j][2 * h + 1])));
        m = over_quad(m, true);
        float before = shift[h];  // its rounding is in what was summed, so it is in what that is multiplied by
        shift[h] = -m * call.scale;
        float l = sum[h] * exp2_of(shift[h] - before);
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
          for (int i = 0; i < 2; i++) {
            float p = exp2_of(fmaf(__int_as_float(s[j][2 * h + i]), call.scale, shift[h]));
            s[j][2 * h + i] = __float_as_int(p);
            l += p;
          }
        sum[h] = l, most[h] = m;
      }
    };
    auto finish = [&]() {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float all = over_quad(sum[h], false);
        unit[h] = all > 0 ? call.unit / all : 0.0f;
      }
    };
    auto add = [&](int at, int groups) {  // P . v, with P = round(s * unit)
      const i8* values = vs + (at + lane) * D;
      int swizzle = (at + lane) / (128 / D) % CHUNKS;
#pragma unroll
      for (int g = 0; g < KEYS / 32; g++) {
        if (g >= groups) break;
        u32 a[4];
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            u32 c[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
              float p = __int_as_float(s[4 * g + 2 * half + i / 2][2 * h + i % 2]);
              c[i] = __float_as_uint(CLAMP ? fminf(p * unit[h], 127.0f) + 12582912.0f : fmaf(p, unit[h], 12582912.0f));
            }
            a[h + 2 * half] = low_bytes(c[0], c[1], c[2], c[3]);
          }
#pragma unroll
        for (int d = 0; d < CHUNKS; d++) {
          u32 r[4], p = shared_address(values + 32 * g * D + 16 * (d ^ swizzle));
          asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                       : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(p));
          mma<false>(o[d][0], a[0], a[1], a[2], a[3], __byte_perm(r[0], r[1], 0x6420), __byte_perm(r[2], r[3], 0x6420));
          mma<false>(o[d][1], a[0], a[1], a[2], a[3], __byte_perm(r[0], r[1], 0x7531), __byte_perm(r[2], r[3], 0x7531));
        }
      }
    };
    auto place = [&](int key0, int base) { return min(key0 - base, call.most - KEYS); };
    auto groups_of = [&](int base, int at) { return (min(high, base + call.most) - base - at + 31) / 32; };

    if constexpr (ONE) {
      if (high > low) {
        int at = place(low, from), groups = groups_of(from, at);
        score(low, from, at, groups);
        weigh();
        finish();
        add(at, groups);
      }
    } else {
      for (int pass = 0; pass < 2; pass++) {
        for (int base = from; base < to; base += call.most) {
          if (!whole_range && pass + base > from) {
            __syncthreads();
            load_keys(head0 + n, shared_address(qs), base);
            copies_commit();
            copies_wait<0>();
            __syncthreads();
          }
          int last = min(high, base + call.most);
          for (int key0 = max(low, base); key0 < last; key0 += KEYS) {
            int at = place(key0, base), groups = groups_of(base, at);
            if (pass == 0 || !once) score(key0, base, at, groups);
            if (pass == 0) {
              weigh();
            } else {
              if (!once) {
#pragma unroll
                for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                  for (int i = 0; i < 4; i++)
                    s[j][i] = __float_as_int(exp2_of(fmaf(__int_as_float(s[j][i]), call.scale, shift[i / 2])));
              }
              add(at, groups);
            }
          }
        }
        if (pass == 0) finish();
      }
    }
    const float4* factors = (const float4*)(qs + (QUERIES + 2 * call.most) * D) + t;
#pragma unroll
    for (int d = 0; d < CHUNKS; d++) {
      float4 factor = factors[4 * d];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int *even = &o[d][0][2 * h], *odd = &o[d][1][2 * h], row = first + quad + 8 * h;
        float x0 = float(even[0]) * factor.x, x1 = float(odd[0]) * factor.y;
        float x2 = float(even[1]) * factor.z, x3 = float(odd[1]) * factor.w;
        size_t to = size_t(row) * call.hidden + (head0 + n) * D + 16 * d + 4 * t;
        if (row >= call.tokens) continue;
        if constexpr (CODED) *(u32*)((i8*)call.out + to) = codes_of(x0, x1, x2, x3);
        else *(uint2*)((char*)call.out + 2 * to) = {half2_of(x0, x1), half2_of(x2, x3)};
      }
    }
    __syncthreads();
    if (n + 1 < heads && !whole_range) load_head(n + 1);
  }
}

// One step of keys is enough for all rows of all blocks, or any number of steps.
#define ATTENTION_OF(NAME, D, ONE, CODED, CLAMP)                                                         \
  extern "C" __global__ void __launch_bounds__(128, 3) attention_##NAME(const AttentionArguments call) { \
    attention_body<D, ONE, CODED, CLAMP>(call);                                                           \
  }
#define ATTENTION(NAME, D, CODED, CLAMP)             \
  ATTENTION_OF(NAME##_short, D, true, CODED, CLAMP)  \
  ATTENTION_OF(NAME##_long, D, false, CODED, CLAMP)
