"""Kernels of peers by their names, as an H100 and an H200 show them."""

from collections import Counter

import pytest

from qdqbench.eval.bench.gpu import is_fp32_gemm, is_fused_attention, kernels_in

FUSED = [
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>, false>(Flash_fwd_params)",
    "fmha_cutlassF_f16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::half_t>::Params)",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x64_4x1x1_kernel0_0",
    "triton_tem_fused_flex_attention_0",
    "attention_64_int8_short",
]
FP16_GEMMS = [
    "gemm_128_128_gelu_none_int8",  # of backend cuda
    "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_bias_TNT",
    "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_kernel__5x_cublas",
    "ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x4_tn",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_f16_s161616gemm_f16_16x16_128x2_tn_align8>",
    "void gemv2T_kernel_val<int, int, __half, __half, float, 128, 16, 4, 4, false, false>",
]
FP32_GEMMS = [
    "ampere_sgemm_128x64_tn",
    "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize64x64x32_stage3_warpsize2x2x1_tensor16x8x8_kernel",
    "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x256_16x3_tn_align4>",
    "void gemmSN_NN_kernel<float, 128, 2, 4, 8, 9, 4, false, cublasGemvTensorStridedBatched<float const>>",
]
OTHER = [
    "triton_poi_fused__scaled_dot_product_efficient_attention_view_3",
    "triton_per_fused_add_native_layer_norm_2",
    "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>",
    "triton_tem_fused_addmm_gelu_view_4",  # Inductor's own GEMM names no type
]


@pytest.mark.parametrize("name", FUSED + FP32_GEMMS + FP16_GEMMS + OTHER)
def test_kinds_of_kernels(name):
    assert is_fused_attention(name) == (name in FUSED)
    assert is_fp32_gemm(name) == (name in FP32_GEMMS)


def test_kernels_are_counted():
    found = kernels_in(Counter({FUSED[0]: 12, FP32_GEMMS[0]: 24, "x" * 300: 3}))
    assert (found.fused_attention, found.fp32_gemms) == (12, 24)
    assert list(found.names.values()) == [24, 12, 3]
    assert max(map(len, found.names)) == 160
