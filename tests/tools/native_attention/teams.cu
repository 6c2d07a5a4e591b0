// A candidate for attention over more than 128 keys, behind the text of kernels/attention.cu: SIZE warps share 16
// queries. Each takes every SIZE-th 128 keys, they exchange maximum and sum once, and add their P . v. Rows of up to
// SIZE * 128 keys are gone over once, where the shipped kernel goes over them twice.

__device__ inline void team_wait(int team, int threads) { named_wait(1 + team, threads); }

template <int D, int SIZE, int WARPS, bool CODED, bool CLAMP>
__device__ inline void teams_body(const AttentionArguments& call) {
  constexpr int TEAMS = WARPS / SIZE, ROWS = 16 * TEAMS, CHUNKS = D / 16, STEP = 32 * WARPS / CHUNKS;
  extern __shared__ __align__(128) i8 memory[];
  int buffer = (ROWS + 2 * call.most + 4) * D;  // queries, keys, values, factors
  int thread = threadIdx.x, warp = thread / 32, team = warp / SIZE, part = warp % SIZE;
  int window = blockIdx.x * ROWS, head0 = blockIdx.y * call.heads, first = window + 16 * team;
  int heads = min(call.heads, call.hidden / D - head0);
  int4* sums = (int4*)(memory + (call.heads > 1 ? 2 : 1) * buffer);          // [SIZE - 1][TEAMS][2 * CHUNKS][32]
  float2* shown = (float2*)(sums + (SIZE - 1) * TEAMS * 2 * CHUNKS * 32);    // [SIZE][ROWS] shift and sum
  Warp<D> w;
  w.lane = thread % 32, w.quad = w.lane / 4, w.t = w.lane % 4;
  launch_next();
  wait_previous();
  if (window >= call.tokens) return;
  int from = call.start[window], to = call.end[min(window + ROWS, call.tokens) - 1];
  int low = 1 << 30, high = 0, begin[2], end[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    int row = min(first + w.quad + 8 * h, call.tokens - 1);
    begin[h] = call.start[row], end[h] = call.end[row];
  }
  if (first < call.tokens) low = call.start[first], high = call.end[min(first + 15, call.tokens - 1)];
  bool whole_range = to - from <= call.most, once = whole_range && high - low <= SIZE * KEYS;

  int copied = thread / CHUNKS, chunk = thread % CHUNKS, swizzled = chunk ^ copied / (128 / D) % CHUNKS;
  auto load_keys = [&](int head, u32 at, int base) {
    u32 k = at + (ROWS + copied) * D + 16 * swizzled, v = k + call.most * D;
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
    for (int i = 0; i < (ROWS + STEP - 1) / STEP; i++) {
      int row = copied + i * STEP, token = min(window + row, call.tokens - 1);
      if (row < ROWS) copy16(at + row * D + 16 * swizzled, call.q + size_t(token) * call.pitch + head * D + 16 * chunk);
    }
    if (thread < D / 4) copy16(at + (ROWS + 2 * call.most) * D + 16 * thread, call.factor + head * D + 4 * thread);
    load_keys(head, at, from);
    copies_commit();
  };
  auto exchange = [&](bool again) {  // again: P is made of scores that are computed a second time
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float all = over_quad(w.sum[h], false);
      if (w.t == 0) shown[part * ROWS + 16 * team + w.quad + 8 * h] = {w.shift[h], all};
    }
    team_wait(team, 32 * SIZE);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float2 found[SIZE];
      float least = 0, total = 0;
#pragma unroll
      for (int i = 0; i < SIZE; i++) found[i] = shown[i * ROWS + 16 * team + w.quad + 8 * h], least = fminf(least, found[i].x);
#pragma unroll
      for (int i = 0; i < SIZE; i++) total += found[i].y * exp2_of(least - found[i].x);
      float unit = total > 0 ? __fdividef(call.unit, total) : 0.0f;
      w.unit[h] = again ? unit : unit * exp2_of(least - w.shift[h]);
      w.shift[h] = least;
    }
#pragma unroll
    for (int i = 0; i < 8 * CHUNKS; i++) w.o[i / 8][i / 4 % 2][i % 4] = 0;
  };

  load_head(0);
  for (int n = 0; n < heads; n++) {
    const i8 *qs = memory + n % 2 * buffer, *ks = qs + ROWS * D, *vs = ks + call.most * D;
    if (n + 1 < heads && whole_range) load_head(n + 1), copies_wait<1>(); else copies_wait<0>();
    __syncthreads();
    w.start(qs + 16 * team * D);

    int at, lows[2], highs[2];
    auto place = [&](int key0, int base) {
      at = min(key0 - base, call.most - KEYS);
#pragma unroll
      for (int h = 0; h < 2; h++)
        lows[h] = max(begin[h], key0) - base - at, highs[h] = min(end[h], base + call.most) - base - at;
      return min(high, base + call.most) - base - at <= 64;
    };
    if (once) {
      int key0 = low + part * KEYS;
      bool mine = key0 < high, few = mine && place(key0, from);
      if (mine) {
        if (few) w.template score<2>(ks, at, lows, highs), w.template weigh<2>(call.scale);
        else w.template score<4>(ks, at, lows, highs), w.template weigh<4>(call.scale);
      }
      exchange(false);
      if (mine) {
        if (few) w.template add<2, CLAMP>(vs, at); else w.template add<4, CLAMP>(vs, at);
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
          for (int key0 = max(low, base) + part * KEYS; key0 < last; key0 += SIZE * KEYS) {
            bool few = place(key0, base);
            if (pass) {
              if (few) w.template step<2, 2, CLAMP>(call, ks, vs, at, lows, highs); else w.template step<4, 2, CLAMP>(call, ks, vs, at, lows, highs);
            } else {
              if (few) w.template step<2, 0, CLAMP>(call, ks, vs, at, lows, highs); else w.template step<4, 0, CLAMP>(call, ks, vs, at, lows, highs);
            }
          }
        }
        if (pass == 0) exchange(true);
      }
    }
    if (part > 0) {
#pragma unroll
      for (int i = 0; i < 2 * CHUNKS; i++) {
        const int* o = w.o[i / 2][i % 2];
        sums[(((part - 1) * TEAMS + team) * 2 * CHUNKS + i) * 32 + w.lane] = {o[0], o[1], o[2], o[3]};
      }
    }
    team_wait(team, 32 * SIZE);
    if (part == 0) {
#pragma unroll
      for (int i = 0; i < 2 * CHUNKS; i++) {
        int* o = w.o[i / 2][i % 2];
#pragma unroll
        for (int p = 0; p < SIZE - 1; p++) {
          int4 x = sums[((p * TEAMS + team) * 2 * CHUNKS + i) * 32 + w.lane];
          o[0] += x.x, o[1] += x.y, o[2] += x.z, o[3] += x.w;
        }
      }
      w.template write<CODED>(call, qs + (ROWS + 2 * call.most) * D, first, head0 + n);
    }
    __syncthreads();
    if (n + 1 < heads && !whole_range) load_head(n + 1);
  }
}

#define TEAM(NAME, D, SIZE, WARPS, CODED, CLAMP)                                                                 \
  extern "C" __global__ void __launch_bounds__(32 * WARPS, 12 / WARPS) NAME(const AttentionArguments call) { \
    teams_body<D, SIZE, WARPS, CODED, CLAMP>(call);                                                              \
  }
