// Self-attention of INT8 codes over packed rows of any length, with the recipe's own arithmetic:
// S = q . k in int32; p = softmax(S * scale) in FP32, over the keys of the query's own row; P = round(p * unit);
// context = P . v in int32; code = round(context * factor[c]). With ROW_MAX p is exp(S * scale - maximum) instead, P has
// 255 codes, and the context is divided by their sum. Nothing is padded.
//
// A block takes 64 consecutive tokens as queries, whatever rows they belong to, and the keys from the start of the
// first token's row to the end of the last one's, for some heads one after the other: the next head is loaded while
// one is computed. A warp takes 16 of the queries and 128 keys at a time, or the last 64. P is quantized over the sum or
// the maximum of its row, so a warp with more than 128 keys goes over them twice: for these, then for P . v. Sums of S
// start at 3 * 2^22, so that their bits are floats. The order of keys within 32 is permuted alike in P and v.
// If BIASED, scores have a bias by the distance from query to key.
#include "ptx.cuh"

struct AttentionArguments {
  const i8 *q, *k, *v;     // [T, H] each, rows `pitch` apart
  const int *start, *end;  // [T] first token of a token's row, and the one behind its last
  const float* factor;     // [H] scales of P and v, over that of the context's codes
  const float* bias;       // [heads, 2 span - 1] by distance, if BIASED
  void* out;               // [T, H] codes or FP16
  int most;                // keys that fit into a buffer of shared memory: a multiple of 128
  int heads;               // of a block
  float scale;             // scales of q and k / sqrt(head size), times log2(e) unless BIASED
  float unit;              // 1 / scale of P
  int tokens, hidden, pitch;
  int span;   // most tokens of a row, if BIASED
  int sight;  // keys that a query sees to each side
};

constexpr int KEYS = 128, QUERIES = 64;
constexpr float LOG2E = 1.4426950408889634f;
enum Form { PLAIN, CLAMPED, ROW_MAX };  // of P: over the sum of its row, also beyond 127, or over its maximum

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

// Of a warp: 16 queries and up to 128 keys, of one head. A thread has two queries (h), and of 8 keys two.
template <int D, bool BIASED> struct Warp {
  static constexpr int CHUNKS = D / 16, PARTS = D / 32;  // of 16 bytes; of the inner product
  int s[KEYS / 8][4], o[CHUNKS][2][4];
  u32 q[PARTS][4];
  float most[2], sum[2], shift[2], unit[2];
  u32 codes[2];  // sum of P, where it is not over the sum of its row
  int lane, quad, t;
  const float* bias;  // of the first query and the key 0
  int key;            // of a step: its first

  static __device__ inline u32 row_of(const i8* rows, int row, int chunk) {  // swizzled: eight rows are in all banks
    return shared_address(rows + row * D + 16 * (chunk ^ row / (128 / D) % CHUNKS));
  }
  __device__ inline void start(const i8* queries) {
#pragma unroll
    for (int p = 0; p < PARTS; p++) load_matrices(q[p], row_of(queries, lane % 16, 2 * p + lane / 16));
#pragma unroll
    for (int h = 0; h < 2; h++) {
      most[h] = BIASED ? -1e30f : 12582912.0f - 128 * 128 * D;  // no score is smaller
      sum[h] = 0, shift[h] = BIASED ? -most[h] * LOG2E : 0;
    }
  }
  // s = S, or -infinity for keys outside [low, high) of a query.
  template <int GROUPS> __device__ inline void score(float scale, const i8* keys, int at, const int (&low)[2], const int (&high)[2]) {
    constexpr int BOTH = PARTS == 1 ? 2 : 1;  // times 8 keys of a load of four matrices, which have two parts
    u32 from[(PARTS + 1) / 2];
#pragma unroll
    for (int p = 0; p < PARTS; p += 2)
      from[p / 2] = row_of(keys, at + lane / 8 / CHUNKS * 8 + lane % 8, lane / 8 % CHUNKS + 2 * p);
#pragma unroll
    for (int j = 0; j < 4 * GROUPS; j += BOTH) {
#pragma unroll
      for (int p = 0; p < PARTS; p += 2) {
        u32 b[4];
        load_matrices(b, from[p / 2] + 8 * j * D);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const u32(&a)[4] = q[BOTH == 2 ? 0 : p + i];
          if (BOTH == 2 || p + i == 0) mma<true>(s[j + i], a[0], a[1], a[2], a[3], b[2 * i], b[2 * i + 1]);
          else mma<false>(s[j], a[0], a[1], a[2], a[3], b[2 * i], b[2 * i + 1]);
        }
      }
    }
    bool whole = low[0] <= 0 && low[1] <= 0 && high[0] >= 32 * GROUPS && high[1] >= 32 * GROUPS;
    if (!BIASED && __all_sync(~0u, whole)) return;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      u32 own = ones(high[h]) & ~ones(low[h]);
#pragma unroll
      for (int i = 0; i < 8 * GROUPS; i++)
        if (!(own >> i & 1)) s[i / 2][2 * h + i % 2] = 0xFF800000;
        else if constexpr (BIASED) {
          float x = __int_as_float(s[i / 2][2 * h + i % 2]) - 12582912.0f;
          s[i / 2][2 * h + i % 2] = __float_as_int(fmaf(x, scale, bias[key + 2 * t - 8 * h + i / 2 * 8 + i % 2]));
        }
    }
  }
  __device__ inline u32 ones(int key) const {  // a bit for each of the thread's keys before this one
    int at = key - 2 * t;
    return __funnelshift_lc(~0u, 0, max(0, (at >> 3) * 2 + min(at & 7, 2)));
  }
  template <int GROUPS> __device__ inline void raise(int h, float scale) {  // the maximum so far
    float m = most[h];
#pragma unroll
    for (int j = 0; j < 4 * GROUPS; j++) m = fmaxf(m, fmaxf(__int_as_float(s[j][2 * h]), __int_as_float(s[j][2 * h + 1])));
    most[h] = m = over_quad(m, true);
    shift[h] = -m * scale;
  }
  template <int GROUPS> __device__ inline void weigh(float scale) {  // s = exp(S - maximum so far); sums go on
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float before = shift[h];  // its rounding is in what was summed, so it is in what that is multiplied by
      raise<GROUPS>(h, scale);
      float l = sum[h] * exp2_of(shift[h] - before);
#pragma unroll
      for (int i = 0; i < 8 * GROUPS; i++) {
        int& x = s[i / 2][2 * h + i % 2];
        x = power(x, scale, h), l += __int_as_float(x);
      }
      sum[h] = l;
    }
  }
  template <int GROUPS> __device__ inline void weigh_again(float scale) {
#pragma unroll
    for (int i = 0; i < 16 * GROUPS; i++) s[i / 4][i % 4] = power(s[i / 4][i % 4], scale, i / 2 % 2);
  }
  __device__ inline int power(int x, float scale, int h) const {
    return __float_as_int(exp2_of(fmaf(__int_as_float(x), scale, shift[h])));
  }
  template <Form FORM> __device__ inline void finish(float steps) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float all = FORM == ROW_MAX ? 1.0f : over_quad(sum[h], false);
      unit[h] = all > 0 ? __fdividef(steps, all) : 0.0f, codes[h] = 0;
    }
#pragma unroll
    for (int i = 0; i < 8 * CHUNKS; i++) o[i / 8][i / 4 % 2][i % 4] = 0;
  }
  template <int GROUPS, Form FORM> __device__ inline void add(const i8* values, int at) {  // P . v, P = round(s * unit)
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      u32 a[4];
#pragma unroll
      for (int part = 0; part < 4; part++) {
        u32 c[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float p = __int_as_float(s[4 * g + part / 2 * 2 + i / 2][2 * (part % 2) + i % 2]), u = unit[part % 2];
          c[i] = __float_as_uint(FORM == CLAMPED ? fminf(p * u, 127.0f) + 12582912.0f : fmaf(p, u, 12582912.0f));
        }
        a[part] = low_bytes(c[0], c[1], c[2], c[3]);
        if (FORM == ROW_MAX) codes[part % 2] = __dp4a(a[part], 0x01010101u, codes[part % 2]);
      }
#pragma unroll
      for (int d = 0; d < CHUNKS; d++) {
        u32 r[4];
        load_transposed(r, row_of(values, at + lane, d) + 32 * g * D);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          u32 order = i ? 0x7531 : 0x6420, low = __byte_perm(r[0], r[1], order), high = __byte_perm(r[2], r[3], order);
          if (FORM == ROW_MAX) mma_unsigned(o[d][i], a[0], a[1], a[2], a[3], low, high);
          else mma<false>(o[d][i], a[0], a[1], a[2], a[3], low, high);
        }
      }
    }
  }
  template <bool CODED, Form FORM> __device__ inline void write(const AttentionArguments& call, const i8* scales, int first, int head) const {
    const float4* factors = (const float4*)scales + t;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float share = FORM == ROW_MAX ? __fdividef(1.0f, over_quad(float(codes[h]), false)) : 1.0f;
      int row = first + quad + 8 * h;
      if (row >= call.tokens) break;
      char* out = (char*)call.out + (CODED ? 1 : 2) * (size_t(row) * call.hidden + head * D + 4 * t);
#pragma unroll
      for (int d = 0; d < CHUNKS; d++) {
        float4 factor = factors[4 * d];
        if (FORM == ROW_MAX) factor = {factor.x * share, factor.y * share, factor.z * share, factor.w * share};
        const int *even = &o[d][0][2 * h], *odd = &o[d][1][2 * h];
        float x0 = float(even[0]) * factor.x, x1 = float(odd[0]) * factor.y;
        float x2 = float(even[1]) * factor.z, x3 = float(odd[1]) * factor.w;
        if constexpr (CODED) *(u32*)(out + 16 * d) = codes_of(x0, x1, x2, x3);
        else *(uint2*)(out + 32 * d) = {half2_of(x0, x1), half2_of(x2, x3)};
      }
    }
  }
  // PASS 0: maximum and sum; 2: P . v with them; 1: both, of keys that are one step.
  template <int GROUPS, int PASS, Form FORM>
  __device__ inline void step(const AttentionArguments& call, const i8* keys, const i8* values, int at, const int (&low)[2], const int (&high)[2]) {
    score<GROUPS>(call.scale, keys, at, low, high);
    float scale = BIASED ? LOG2E : call.scale;
    if constexpr (PASS < 2 && FORM == ROW_MAX) raise<GROUPS>(0, scale), raise<GROUPS>(1, scale);
    else if constexpr (PASS < 2) weigh<GROUPS>(scale);
    if constexpr (PASS == 2 || (PASS == 1 && FORM == ROW_MAX)) weigh_again<GROUPS>(scale);
    if constexpr (PASS == 1) finish<FORM>(call.unit);
    if constexpr (PASS > 0) add<GROUPS, FORM>(values, at);
  }
};

template <int D, bool ONE, bool CODED, Form FORM, bool BIASED> __device__ inline void attention_body(const AttentionArguments& call) {
  constexpr int CHUNKS = D / 16, STEP = 128 / CHUNKS;  // of 16 bytes; rows a copy
  extern __shared__ __align__(128) i8 memory[];
  int buffer = (QUERIES + 2 * call.most + 4) * D;  // queries, keys, values, factors
  int thread = threadIdx.x, warp = thread / 32;
  int window = blockIdx.x * QUERIES, head0 = blockIdx.y * call.heads, first = window + 16 * warp;
  int heads = min(call.heads, call.hidden / D - head0);
  Warp<D, BIASED> w;
  w.lane = thread % 32, w.quad = w.lane / 4, w.t = w.lane % 4;
  launch_next();
  wait_previous();
  auto begin_of = [&](int token) { return BIASED ? call.start[token] : max(call.start[token], token - call.sight); };
  auto end_of = [&](int token) { return BIASED ? call.end[token] : min(call.end[token], token + call.sight + 1); };
  int from = begin_of(window), to = end_of(min(window + QUERIES, call.tokens) - 1);
  int low = 1 << 30, high = 0, begin[2], end[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    int row = min(first + w.quad + 8 * h, call.tokens - 1);
    begin[h] = begin_of(row), end[h] = end_of(row);
    if (BIASED && first + w.quad + 8 * h >= call.tokens) end[h] = 0;  // no distances
  }
  if (first < call.tokens) low = begin_of(first), high = end_of(min(first + 15, call.tokens - 1));
  bool whole_range = ONE || to - from <= call.most, once = whole_range && high - low <= KEYS;  // one load, one pass

  // Rows of a copy are STEP apart, so the swizzle is the same in all rows of a thread.
  int copied = thread / CHUNKS, chunk = thread % CHUNKS, swizzled = chunk ^ copied / (128 / D) % CHUNKS;
  auto load_keys = [&](int head, u32 at, int base) {
    u32 k = at + (QUERIES + copied) * D + 16 * swizzled, v = k + call.most * D;
    size_t source = size_t(base + copied) * call.pitch + head * D + 16 * chunk;
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
      copy16(at + (copied + i * STEP) * D + 16 * swizzled, call.q + size_t(token) * call.pitch + head * D + 16 * chunk);
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
    w.start(qs + 16 * warp * D);
    if constexpr (BIASED) w.bias = call.bias + (head0 + n) * (2 * call.span - 1) + call.span - 1 - first - w.quad;

    // Steps of the keys from key0 on. They lie `at` after the buffer's first, `base`; earlier ones were in a step.
    int at, lows[2], highs[2];
    auto place = [&](int key0, int base) {
      at = min(key0 - base, call.most - KEYS);
      if constexpr (BIASED) w.key = base + at;
#pragma unroll
      for (int h = 0; h < 2; h++)
        lows[h] = max(begin[h], key0) - base - at, highs[h] = min(end[h], base + call.most) - base - at;
      return min(high, base + call.most) - base - at <= 64;
    };
    if (ONE || once) {
      if (high > low) {
        if (place(low, from)) w.template step<2, 1, FORM>(call, ks, vs, at, lows, highs); else w.template step<4, 1, FORM>(call, ks, vs, at, lows, highs);
      }
    } else {
      for (int pass = 0; pass < 4; pass += 2) {
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
            bool few = place(key0, base);
            if (pass) {
              if (few) w.template step<2, 2, FORM>(call, ks, vs, at, lows, highs); else w.template step<4, 2, FORM>(call, ks, vs, at, lows, highs);
            } else {
              if (few) w.template step<2, 0, FORM>(call, ks, vs, at, lows, highs); else w.template step<4, 0, FORM>(call, ks, vs, at, lows, highs);
            }
          }
        }
        if (pass == 0) w.template finish<FORM>(call.unit);
      }
    }
    w.template write<CODED, FORM>(call, qs + (QUERIES + 2 * call.most) * D, first, head0 + n);
    __syncthreads();
    if (n + 1 < heads && !whole_range) load_head(n + 1);
  }
}

// One step of keys is enough for all rows of all blocks, or any number of steps.
#define ATTENTION_OF(NAME, D, ONE, ...)                                                                               \
  extern "C" __global__ void __launch_bounds__(128, D > 64 ? 2 : 3) attention_##NAME(const AttentionArguments call) { \
    attention_body<D, ONE, __VA_ARGS__>(call);                                                                        \
  }
#define ATTENTION(NAME, D, ...)                    \
  ATTENTION_OF(NAME##_short, D, true, __VA_ARGS__) \
  ATTENTION_OF(NAME##_long, D, false, __VA_ARGS__)
