// In the place of kernels/ptx.cuh: what the kernels use of CUDA and of Hopper, on a CPU, one block after the other.
// A thread of a block is a fiber (machine.cpp) that runs until it waits for others. Copies of cp.async are done when
// `copies_wait` waits for them, and in every other block at once too, so that a kernel that counts on either fails.
// Threads take turns forwards in some blocks and backwards in others.
// Tiles of TMA and sums of wgmma are done at once.
#pragma once
#ifndef AMPERE
#define AMPERE 1  // else Turing's way
#endif
#define EARLY 1
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
using std::max, std::min;
using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;
using i8 = signed char;
struct float2 { float x, y; };
inline float __fmul_rn(float x, float y) { return x * y; }
struct float4 { float x, y, z, w; };
struct int4 { int x, y, z, w; };
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct Index { int x, y; };
struct alignas(64) TensorMap {  // of an INT8 matrix, by tiles of `box` rows and 128 columns
  const u8* data;
  u64 pitch;
  int rows, columns, box;
  char spare[128 - 28];
};

extern Index threadIdx, blockIdx, blockDim, gridDim;
extern u32 mail[32][32][8];  // of a warp: what each lane shows to the others
u8* shared_bytes(u32 at, int bytes);
u32 shared_address(const void* p);
void join(int name, int count);    // a barrier: 0 to 15 of the block, 16 and more of a warp
void arrive(int name, int count);  // the same without waiting
void copy16(u32 to, const void* from);
void copy16_or_zeros(u32 to, const void* from, bool there);
void copies_commit();
void copies_done(int but);
void barrier_init(u32 bar, int count);
void barrier_expect(u32 bar, int bytes);
void barrier_arrive(u32 bar);
void barrier_got(u32 bar, int bytes);
void barrier_wait(u32 bar, u32 parity);

inline int of_warp(int x) { return x; }
inline void __syncthreads() { join(0, blockDim.x); }
inline void turn_wait(int name) { join(name, 256); }
inline void turn_give(int name) { arrive(name, 256); }
inline void barriers_ready() {}
inline void prefetch_map(const TensorMap*) {}
inline void launch_next() {}
inline void wait_previous() {}
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int N> void wgmma_wait() {}
inline void pin(int&) {}
template <int N> void fewer_registers() {}
template <int N> void more_registers() {}
template <int N> void copies_wait() { copies_done(N); }

// What the lanes of a warp show: `use` reads it before any of them goes on.
template <class Use> auto together(std::initializer_list<u32> shown, Use use) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  std::copy(shown.begin(), shown.end(), mail[warp][lane]);
  join(16 + warp, 32);
  auto result = use(mail[warp], lane);
  join(16 + warp, 32);
  return result;
}
template <class To, class From> To bits_of(From x) { To y; std::memcpy(&y, &x, 4); return y; }
inline float __int_as_float(int x) { return bits_of<float>(x); }
inline int __float_as_int(float x) { return bits_of<int>(x); }
inline u32 __float_as_uint(float x) { return bits_of<u32>(x); }
inline float __shfl_xor_sync(u32, float x, int other) {
  return together({__float_as_uint(x)}, [=](auto& lanes, int lane) { return bits_of<float>(lanes[lane ^ other][0]); });
}
inline bool __all_sync(u32, bool x) {
  return together({x}, [](auto& lanes, int) { return std::all_of(lanes, lanes + 32, [](auto& each) { return each[0]; }); });
}
inline u32 __byte_perm(u32 low, u32 high, u32 order) {
  u64 bytes = u64(high) << 32 | low;
  u32 r = 0;
  for (int i = 0; i < 4; i++) r |= u32(u8(bytes >> 8 * (order >> 4 * i & 7))) << 8 * i;
  return r;
}
inline u32 __funnelshift_lc(u32 low, u32 high, int by) { return u32((u64(high) << 32 | low) << min(by, 32) >> 32); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline float tanh_of(float x) { return std::tanh(x); }
inline float exp2_of(float x) { return x < -126 ? 0 : std::exp2(x); }
inline u32 half2_of(float low, float high) {
  _Float16 both[2] = {_Float16(low), _Float16(high)};
  u32 r; std::memcpy(&r, both, 4); return r;
}
inline float2 floats_of(u32 h) { _Float16 both[2]; std::memcpy(both, &h, 4); return {float(both[0]), float(both[1])}; }
inline u32 codes_of(float a, float b, float c, float d) {
  u32 r = 0, at = 0;
  for (float x : {a, b, c, d}) r |= u32(u8(int(min(max(std::nearbyint(x), -128.0f), 127.0f)))) << at, at += 8;
  return r;
}

inline void put16(u32 to, uint4 v) { std::memcpy(shared_bytes(to, 16), &v, 16); }
inline void __threadfence() {}
inline u32 atomicAdd(u32* to, u32 by) { return std::exchange(*to, *to + by); }
inline void load_tile(u32 to, const TensorMap* map, int x, int y, u32 bar) {
  for (int r = 0; r < map->box; r++)
    for (int chunk = 0; chunk < 8; chunk++) {
      u8* at = shared_bytes(to + 128 * r + 16 * (chunk ^ r % 8), 16);
      int column = x + 16 * chunk, there = y + r < map->rows ? min(max(map->columns - column, 0), 16) : 0;
      std::memset(at, 0, 16);
      std::memcpy(at, map->data + (y + r) * map->pitch + column, there);
    }
  barrier_got(bar, 128 * map->box);
}
inline void read_row(i8 (&to)[32], u64 tile, int row) {  // 32 bytes, swizzled by 128
  for (int half = 0; half < 2; half++) {
    u32 at = u32(tile & 0x3FFF) * 16 + 128 * row + 16 * half;
    std::memcpy(to + 16 * half, shared_bytes(at ^ (at >> 7 & 7) << 4, 16), 16);
  }
}
inline int product(const i8* a, const i8* b, int count) {
  int sum = 0;
  for (int i = 0; i < count; i++) sum += a[i] * b[i];
  return sum;
}
template <int N> void wgmma(int (&d)[N / 2], u64 a, u64 b, bool add) {
  int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
  i8 rows[2][32], columns[32];
  for (int h = 0; h < 2; h++) read_row(rows[h], a, row + 8 * h);
  for (int eight = 0; eight < N / 8; eight++)
    for (int i = 0; i < 2; i++) {
      read_row(columns, b, 8 * eight + lane % 4 * 2 + i);
      for (int h = 0; h < 2; h++) {
        int& sum = d[4 * eight + 2 * h + i];
        sum = (add ? sum : 0) + product(rows[h], columns, 32);
      }
    }
}

inline u32 __dp4a(u32 a, u32 b, u32 sum) {
  for (int byte = 0; byte < 32; byte += 8) sum += (a >> byte & 255) * (b >> byte & 255);
  return sum;
}
constexpr u32 MAGIC = 0x4B400000;
inline void mma_unsigned(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  together({a0, a1, a2, a3, b0, b1}, [&](auto& lanes, int lane) {
    for (int i = 0; i < 4; i++)
      for (int k = 0; k < 32; k++) {
        const u32 *row = lanes[lane / 4 * 4 + k / 4 % 4], *column = lanes[(lane % 4 * 2 + i % 2) * 4 + k / 4 % 4];
        d[i] += ((const u8*)&row[i / 2 + k / 16 * 2])[k % 4] * ((const i8*)&column[4 + k / 16])[k % 4];
      }
    return 0;
  });
}
template <bool FIRST> void mma(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  together({a0, a1, a2, a3, b0, b1}, [&](auto& lanes, int lane) {
    for (int i = 0; i < 4; i++) {
      int sum = FIRST ? MAGIC : d[i];
      for (int k = 0; k < 8; k++) {  // four bytes at a time
        const u32 *row = lanes[lane / 4 * 4 + k % 4], *column = lanes[(lane % 4 * 2 + i % 2) * 4 + k % 4];
        sum += product((const i8*)&row[i / 2 + k / 4 * 2], (const i8*)&column[4 + k / 4], 4);
      }
      d[i] = sum;
    }
    return 0;
  });
}
inline void mma(float4& sums, u32 a, u32 below, u32 next, u32 below_next, u32 b, u32 b_next) {
  together({a, below, next, below_next, b, b_next}, [&](auto& lanes, int lane) {
    float* all[] = {&sums.x, &sums.y, &sums.z, &sums.w};
    for (int i = 0; i < 4; i++)
      for (int k = 0; k < 8; k++) {  // two halves at a time
        const u32 *row = lanes[lane / 4 * 4 + k % 4], *column = lanes[(lane % 4 * 2 + i % 2) * 4 + k % 4];
        float2 x = floats_of(row[i / 2 + k / 4 * 2]), y = floats_of(column[4 + k / 4]);
        *all[i] += x.x * y.x + x.y * y.y;
      }
    return 0;
  });
}
inline void load_matrices(u32 (&r)[4], u32 from) {
  together({from}, [&](auto& lanes, int lane) {
    for (int j = 0; j < 4; j++) std::memcpy(&r[j], shared_bytes(lanes[8 * j + lane / 4][0], 16) + lane % 4 * 4, 4);
    return 0;
  });
}
inline void load_transposed(u32 (&r)[4], u32 from) {
  together({from}, [&](auto& lanes, int lane) {
    for (int j = 0; j < 4; j++)
      for (int i = 0; i < 2; i++)
        std::memcpy((char*)&r[j] + 2 * i, shared_bytes(lanes[8 * j + lane % 4 * 2 + i][0], 16) + lane / 4 * 2, 2);
    return 0;
  });
}

template <class... T> void call(void (*kernel)(T...), void** arguments) {
  [&]<std::size_t... I>(std::index_sequence<I...>) { kernel(*(T*)arguments[I]...); }(std::index_sequence_for<T...>());
}
