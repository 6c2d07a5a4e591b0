// INT8 GEMM of Hopper (wgmma, TMA, warp-specialized) with the epilogues that an INT8 encoder needs, from CUTLASS's
// headers. One library a tile: the macros TILE_M, TILE_N, TILE_K, CLUSTER_M, CLUSTER_N, PINGPONG and STREAM_K say which.
//
// D[M, N] = epilogue(A[M, K] . B[N, K]^T), codes int8, sums int32, all row-major. With x = sum * scale[n] + bias[n]:
// 0 half(x); 1 int8(x) (q, k, v: the scale holds the next quantizer's); 2 int8(gelu(x) * next); 3 half(x + C[M, N]).
#include <cuda_fp16.h>

#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "cutlass/epilogue/thread/activation.h"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/util/packed_stride.hpp"

using cute::_1;
using cute::Int;
using cute::Shape;
namespace fusion = cutlass::epilogue::fusion;

using Tile = Shape<Int<TILE_M>, Int<TILE_N>, Int<TILE_K>>;
using Cluster = Shape<Int<CLUSTER_M>, Int<CLUSTER_N>, _1>;
#if PINGPONG
using MainSchedule = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecialized;
#else
using MainSchedule = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecializedCooperative;
#endif
#if STREAM_K
using Scheduler = cutlass::gemm::StreamKScheduler;
#else
using Scheduler = cutlass::gemm::PersistentScheduler;
#endif

constexpr auto kRound = cutlass::FloatRoundStyle::round_to_nearest;
template <template <class> class Operation, class Output>
using Compute = fusion::Sm90Compute<Operation, Output, float, kRound>;
using Column = fusion::Sm90RowBroadcast<0, Tile, float>;  // one value per output channel
template <class Output>
using Linear =
    fusion::Sm90EVT<Compute<cutlass::homogeneous_multiply_add, Output>, Column, fusion::Sm90AccFetch, Column>;
using Gelu = fusion::Sm90EVT<Compute<cutlass::epilogue::thread::GELU_taylor, float>, Linear<float>>;
using GeluCodes = fusion::Sm90EVT<Compute<cutlass::multiplies, int8_t>, fusion::Sm90ScalarBroadcast<float>, Gelu>;
using Residual =
    fusion::Sm90EVT<Compute<cutlass::plus, cutlass::half_t>, fusion::Sm90SrcFetch<cutlass::half_t>, Linear<float>>;

template <class Fusion, class Output, class Source>
struct Kernel {
  static constexpr int kAlign = 16, kAlignD = 128 / cutlass::sizeof_bits<Output>::value;
  static constexpr int kAlignC = cute::is_void_v<Source> ? kAlignD : 8;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, int32_t, float, Source, cutlass::layout::RowMajor, kAlignC, Output,
      cutlass::layout::RowMajor, kAlignD, EpilogueSchedule, Fusion>::CollectiveOp;
  using Stages = cutlass::gemm::collective::StageCountAutoCarveout<sizeof(typename Epilogue::SharedStorage)>;
  using Main = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, int8_t, cutlass::layout::RowMajor, kAlign, int8_t,
      cutlass::layout::ColumnMajor, kAlign, int32_t, Tile, Cluster, Stages, MainSchedule>::CollectiveOp;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<
      cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, Main, Epilogue, Scheduler>>;
};

struct Call {
  const int8_t *a, *b;
  const cutlass::half_t* c;
  const float *scale, *bias;
  float next;
  void* d;
  int m, n, k, swizzle, multiprocessors;
  void* workspace;
  size_t workspace_bytes;
  cudaStream_t stream;
};

static Column::Arguments column(const float* values) { return {values, 0.0f, {}}; }
template <class Output>
static typename Linear<Output>::Arguments linear(const Call& call) {
  return {column(call.scale), {}, column(call.bias), {}};
}

template <class K, class Output, class FusionArguments>
static int launch(const Call& call, FusionArguments fused) {
  using Gemm = typename K::Gemm;
  using G = typename Gemm::GemmKernel;
  auto stride_a = cutlass::make_cute_packed_stride(typename G::StrideA{}, {call.m, call.k, 1});
  auto stride_b = cutlass::make_cute_packed_stride(typename G::StrideB{}, {call.n, call.k, 1});
  auto stride_c = cutlass::make_cute_packed_stride(typename G::StrideC{}, {call.m, call.n, 1});
  auto stride_d = cutlass::make_cute_packed_stride(typename G::StrideD{}, {call.m, call.n, 1});
  typename Gemm::Arguments arguments{};
  arguments.problem_shape = {call.m, call.n, call.k, 1};
  arguments.mainloop.ptr_A = call.a;
  arguments.mainloop.dA = stride_a;
  arguments.mainloop.ptr_B = call.b;
  arguments.mainloop.dB = stride_b;
  arguments.epilogue.thread = fused;
  if constexpr (!cute::is_void_v<typename G::ElementC>) arguments.epilogue.ptr_C = call.c;
  arguments.epilogue.dC = stride_c;
  arguments.epilogue.ptr_D = static_cast<Output*>(call.d);
  arguments.epilogue.dD = stride_d;
  arguments.hw_info.device_id = 0;
  arguments.hw_info.sm_count = call.multiprocessors;
  arguments.scheduler.max_swizzle_size = call.swizzle;
  if (Gemm::get_workspace_size(arguments) > call.workspace_bytes) return 1000;
  Gemm gemm;
  if (auto status = gemm.can_implement(arguments); status != cutlass::Status::kSuccess) return 2000 + int(status);
  if (auto status = gemm.initialize(arguments, call.workspace, call.stream); status != cutlass::Status::kSuccess) {
    return 3000 + int(status);
  }
  return int(gemm.run(call.stream));
}

// Returns 0, or CUTLASS's status with where it came from: 1000 workspace too small, 2000 shape, 3000 initialize.
extern "C" int native_gemm(int epilogue, const void* a, const void* b, const void* c, const float* scale, const float* bias,
                           float next, void* d, int m, int n, int k, int swizzle, int multiprocessors, void* workspace,
                           size_t workspace_bytes, void* stream) {
  using cutlass::half_t;
  Call call{static_cast<const int8_t*>(a), static_cast<const int8_t*>(b), static_cast<const half_t*>(c), scale, bias, next,
            d, m, n, k, swizzle, multiprocessors, workspace, workspace_bytes, static_cast<cudaStream_t>(stream)};
  switch (epilogue) {
    case 0: return launch<Kernel<Linear<half_t>, half_t, void>, half_t>(call, linear<half_t>(call));
    case 1: return launch<Kernel<Linear<int8_t>, int8_t, void>, int8_t>(call, linear<int8_t>(call));
    case 2: return launch<Kernel<GeluCodes, int8_t, void>, int8_t>(
        call, GeluCodes::Arguments{{{call.next}}, {linear<float>(call), {}}, {}});
    case 3: return launch<Kernel<Residual, half_t, half_t>, half_t>(call, Residual::Arguments{{}, linear<float>(call), {}});
  }
  return -1;
}
