// Self-attention of INT8 codes over packed rows of any length, with the recipe's own arithmetic:
// S = q . k in int32; p = softmax(S * scale) in FP32, over the keys of the query's own row; P = round(p * unit);
// context = P . v in int32; code = round(context * factor[c]). Nothing is padded.
//
// A block takes 64 consecutive tokens as queries of one head, whatever rows they belong to, and the keys from the
// start of the first token's row to the end of the last one's. A warp takes 16 of the queries and 128 keys at a time.
// The recipe quantizes the normalized P, so a warp with more than 128 keys goes over them twice: for maximum and sum,
// then for P . v. Sums of S start at 3 * 2^22, so that their bits are floats. The order of keys within 32 is permuted
// alike in P and v.
#include "ptx.cuh"

struct AttentionArguments {
  const i8 *q, *k, *v;     // [T, H] each, rows `pitch` apart
  const int *start, *end;  // [T] first token of a token's row, and the one behind its last
  const float* factor;     // [H] scales of P and v, over that of the context's codes
  void* out;               // [T, H] codes or FP16
  int most;                // keys that fit into shared memory at once: a multiple of 128
  float scale;             // scales of q and k / sqrt(head size) * log2(e)
  float unit;              // 1 / scale of P
  int tokens, hidden, pitch;
};

constexpr int KEYS = 128, QUERIES = 64, MAGIC = 0x4B400000;

__device__ inline void mma(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ inline void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ inline void copies_wait() { asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory"); }
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

template <int D, bool CODED, bool CLAMP> __device__ inline void attention_body(const AttentionArguments& call) {
  constexpr int CHUNKS = D / 16, PARTS = D / 32;  // of 16 bytes; steps of 32 of the inner product
  extern __shared__ __align__(128) i8 memory[];
  i8 *qs = memory, *ks = qs + QUERIES * D, *vs = ks + call.most * D;
  int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, quad = lane / 4, t = lane % 4;
  int window = blockIdx.x * QUERIES, head = blockIdx.y * D, first = window + 16 * warp;
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
  bool once = to - from <= call.most && high - low <= KEYS;  // one pass does

  for (int at = thread; at < QUERIES * CHUNKS; at += 128) {
    int token = min(window + at / CHUNKS, call.tokens - 1);
    copy16(shared_address(qs + 16 * at), call.q + size_t(token) * call.pitch + head + at % CHUNKS * 16);
  }
  auto load = [&](int base) {
    int count = min(call.most, to - base);
    for (int at = thread; at < count * CHUNKS; at += 128) {
      int key = at / CHUNKS, c = at % CHUNKS;
      size_t from = size_t(base + key) * call.pitch + head + 16 * c;
      copy16(shared_address(ks + 16 * at), call.k + from);
      copy16(shared_address(vs + key * D + 16 * (c ^ key / (128 / D) % CHUNKS)), call.v + from);
    }
    copies_wait();
    __syncthreads();
  };

  u32 q[2][D / 16];  // of a thread: D / 4 consecutive codes of each of its two rows
  int s[KEYS / 8][4], o[CHUNKS][2][4];
  float most[2] = {-1e30f, -1e30f}, sum[2] = {0, 0}, shift[2], unit[2];
#pragma unroll
  for (int d = 0; d < CHUNKS; d++)
#pragma unroll
    for (int n = 0; n < 8; n++) o[d][n / 4][n % 4] = 0;

  for (int pass = 0; pass < 2; pass++)
    for (int base = from; base < to; base += call.most) {
      if (pass == 0 || to - from > call.most) {
        if (pass + base > from) __syncthreads();
        load(base);
      }
      if (pass + base == from) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const u32* p = (const u32*)(qs + (16 * warp + quad + 8 * h) * D) + t * (D / 16);
          if constexpr (D == 64) *(uint4*)q[h] = *(const uint4*)p; else *(uint2*)q[h] = *(const uint2*)p;
        }
      }
      int last = min(high, base + call.most);
      for (int key0 = max(low, base); key0 < last; key0 += KEYS) {
        int at = min(key0 - base, call.most - KEYS), groups = (last - base - at + 31) / 32;
        if (pass == 0 || !once) {
#pragma unroll
          for (int g = 0; g < KEYS / 32; g++) {
            if (g >= groups) break;
#pragma unroll
            for (int j = 4 * g; j < 4 * g + 4; j++) {
              s[j][0] = s[j][1] = s[j][2] = s[j][3] = MAGIC;
              const u32* k = (const u32*)(ks + (at + 8 * j + quad) * D) + t * (D / 16);
              u32 b[D / 16];
              if constexpr (D == 64) *(uint4*)b = *(const uint4*)k; else *(uint2*)b = *(const uint2*)k;
#pragma unroll
              for (int part = 0; part < PARTS; part++)
                mma(s[j], q[0][2 * part], q[1][2 * part], q[0][2 * part + 1], q[1][2 * part + 1], b[2 * part], b[2 * part + 1]);
            }
          }
          int ahead[2] = {base + at - begin[0], base + at - begin[1]};  // of the row's first key
          bool whole = groups >= 4 && key0 == base + at;
#pragma unroll
          for (int h = 0; h < 2; h++) whole &= ahead[h] >= 0 && ahead[h] + KEYS <= size[h];
          if (!__all_sync(~0u, whole)) {
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
              for (int n = 0; n < 4; n++) {
                u32 key = ahead[n / 2] + 8 * j + 2 * t + n % 2;
                if (key >= size[n / 2] || base + at + 8 * j + 2 * t + n % 2 < key0 || j / 4 >= groups) s[j][n] = 0xFF800000;
              }
          }
        }
        if (pass == 0) {
#pragma unroll
          for (int h = 0; h < 2; h++) {
            float m = most[h];
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++)
              m = fmaxf(m, fmaxf(__int_as_float(s[j][2 * h]), __int_as_float(s[j][2 * h + 1])));
            m = over_quad(m, true);
            float l = sum[h] * exp2_of((most[h] - m) * call.scale);
            shift[h] = -m * call.scale;
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
              for (int n = 0; n < 2; n++) {
                float p = exp2_of(fmaf(__int_as_float(s[j][2 * h + n]), call.scale, shift[h]));
                s[j][2 * h + n] = __float_as_int(p);
                l += p;
              }
            sum[h] = l, most[h] = m;
          }
        } else {
          if (!once) {
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
              for (int n = 0; n < 4; n++)
                s[j][n] = __float_as_int(exp2_of(fmaf(__int_as_float(s[j][n]), call.scale, shift[n / 2])));
          }
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
                for (int n = 0; n < 4; n++) {
                  float p = __int_as_float(s[4 * g + 2 * half + n / 2][2 * h + n % 2]);
                  c[n] = __float_as_uint(CLAMP ? fminf(p * unit[h], 127.0f) + 12582912.0f : fmaf(p, unit[h], 12582912.0f));
                }
                a[h + 2 * half] = low_bytes(c[0], c[1], c[2], c[3]);
              }
#pragma unroll
            for (int d = 0; d < CHUNKS; d++) {
              int key = at + 32 * g + lane;
              u32 r[4], p = shared_address(vs + key * D + 16 * (d ^ key / (128 / D) % CHUNKS));
              asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                           : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(p) : "memory");
              mma(o[d][0], a[0], a[1], a[2], a[3], __byte_perm(r[0], r[1], 0x6420), __byte_perm(r[2], r[3], 0x6420));
              mma(o[d][1], a[0], a[1], a[2], a[3], __byte_perm(r[0], r[1], 0x7531), __byte_perm(r[2], r[3], 0x7531));
            }
          }
        }
      }
      if (pass == 0 && base + call.most >= to) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          float all = over_quad(sum[h], false);
          unit[h] = all > 0 ? call.unit / all : 0.0f;
        }
      }
    }
#pragma unroll
  for (int d = 0; d < CHUNKS; d++) {
    int column = head + 16 * d + 4 * t;
    float4 factor = *(const float4*)(call.factor + column);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int *even = &o[d][0][2 * h], *odd = &o[d][1][2 * h], row = first + quad + 8 * h;
      float x0 = float(even[0]) * factor.x, x1 = float(odd[0]) * factor.y;
      float x2 = float(even[1]) * factor.z, x3 = float(odd[1]) * factor.w;
      size_t to = size_t(row) * call.hidden + column;
      if (row >= call.tokens) continue;
      if constexpr (CODED) *(u32*)((i8*)call.out + to) = codes_of(x0, x1, x2, x3);
      else *(uint2*)((char*)call.out + 2 * to) = {half2_of(x0, x1), half2_of(x2, x3)};
    }
  }
}

#define ATTENTION(NAME, D, CODED, CLAMP)                                                                  \
  extern "C" __global__ void __launch_bounds__(128, 3) attention_##NAME(const AttentionArguments call) { \
    attention_body<D, CODED, CLAMP>(call);                                                                \
  }
