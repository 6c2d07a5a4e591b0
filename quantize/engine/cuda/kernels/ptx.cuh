// The PTX instructions of Hopper that the kernels share.
#pragma once
using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;
using i8 = signed char;
struct alignas(64) TensorMap { char bytes[128]; };

__device__ inline u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }
__device__ inline void barrier_init(u32 bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ inline void barrier_expect(u32 bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ inline void barrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ inline void barrier_wait(u32 bar, u32 parity) {
  asm volatile("{ .reg .pred p;\n"
               "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
               "@p bra done;\nbra again;\ndone: }" ::"r"(bar), "r"(parity) : "memory");
}
__device__ inline void load_tile(u32 to, const TensorMap* map, int x, int y, u32 bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(bar) : "memory");
}
__device__ inline void turn_wait(int name) { asm volatile("bar.sync %0, 256;" ::"r"(name) : "memory"); }
__device__ inline void turn_give(int name) { asm volatile("bar.arrive %0, 256;" ::"r"(name) : "memory"); }
// Programmatic dependent launch: the next kernel's blocks may start; wait for what the previous kernels wrote.
__device__ inline void launch_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ inline void wait_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ inline u32 half2_of(float low, float high) {
  u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r;
}
__device__ inline float2 floats_of(u32 h) {
  float2 f;
  asm("{ .reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" : "=f"(f.x), "=f"(f.y) : "r"(h));
  return f;
}
__device__ inline int rounded(float x) { int r; asm("cvt.rni.s32.f32 %0, %1;" : "=r"(r) : "f"(x)); return r; }
__device__ inline u32 codes_of(float a, float b, float c, float d) {  // four codes, saturated to [-128, 127]
  u32 r;
  asm("{ .reg .b32 t; cvt.pack.sat.s8.s32.b32 t, %4, %3, 0; cvt.pack.sat.s8.s32.b32 %0, %2, %1, t; }"
      : "=r"(r) : "r"(rounded(a)), "r"(rounded(b)), "r"(rounded(c)), "r"(rounded(d)));
  return r;
}
__device__ inline float tanh_of(float x) { float r; asm("tanh.approx.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
__device__ inline float exp2_of(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
