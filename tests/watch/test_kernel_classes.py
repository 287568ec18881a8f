"""The class of a kernel, by the names of torch, its compiler and the vendors' libraries."""

import pytest

from weft.watch.kernel_classes import attention_flops, classify, moved_bytes, product_flops
from weft.watch.profiler_trace import TraceEvent

BLOCK = ["cuLaunchKernelEx", "CompiledFunctionBackward", "weft.gradients", "weft.window"]
UPDATE = ["cudaLaunchKernel", "weft.update", "weft.window"]
LOSS = ["cudaLaunchKernel", "aten::exp_", "weft.loss", "weft.gradients", "weft.window"]


@pytest.mark.parametrize(
    ("name", "stack", "label"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN", BLOCK, "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas", BLOCK, "matmul"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<...>>", BLOCK, "matmul"),
        ("triton_tem_fused_mm_12", BLOCK, "matmul"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTT", LOSS, "matmul"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x128_4x1x1", BLOCK, "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7", BLOCK, "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16>", BLOCK, "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", BLOCK, "attention"),
        ("triton_tem_fused_flex_attention_1", BLOCK, "attention"),
        ("sm80_xmma_gemm_f32f32", ["aten::bmm", "aten::_scaled_dot_product_attention_math"], "attention"),
        ("triton_poi_fused_mul_silu_silu_backward_5", BLOCK, "elementwise"),
        ("triton_poi_fused__scaled_dot_product_cudnn_attention_backward_transpose_3", BLOCK, "elementwise"),
        ("triton_red_fused__fused_rms_norm_mm_mul_7", BLOCK, "elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::exp_kernel_cuda>", LOSS, "loss"),
        ("weft_cross_entropy", BLOCK, "loss"),
        ("triton_red_fused__log_softmax_nll_loss_forward_0", BLOCK, "loss"),
        ("weft_adamw", BLOCK, "optimizer"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...>", UPDATE, "optimizer"),
        ("nvjet_tst_128x128_muon", UPDATE, "optimizer"),
        ("CUDAFunctor_add", ["aten::add_", "torch::autograd::AccumulateGrad", "weft.gradients"], "optimizer"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", UPDATE, "communication"),
        ("void at::native::split_with_sizes_copy", ["FSDP::all_gather_copy_out"], "communication"),
        ("Memcpy HtoD (Pinned -> Device)", ["cudaMemcpyAsync", "aten::copy_", "weft.data"], "data/host"),
        ("Memcpy DtoH (Device -> Pageable)", ["cudaMemcpyAsync", "aten::item", "weft.figures"], "data/host"),
    ],
)
def test_class_of_a_kernel(name: str, stack: list[str], label: str) -> None:
    assert classify(name, stack) == label


def op(name: str, *dims: tuple[int, ...], of: str = "c10::BFloat16") -> TraceEvent:
    return TraceEvent(name, "cpu_op", 0.0, 1.0, dims=dims, types=(of,) * len(dims))


def test_product_flops() -> None:
    assert product_flops(op("aten::mm", (8, 3), (3, 5))) == 2 * 8 * 3 * 5
    assert product_flops(op("aten::addmm", (5,), (8, 3), (3, 5))) == 2 * 8 * 3 * 5
    assert product_flops(op("aten::bmm", (4, 8, 3), (4, 3, 5))) == 2 * 4 * 8 * 3 * 5
    assert product_flops(op("aten::_scaled_mm", (16, 32), (32, 64), of="c10::Float8_e4m3fn")) == 2 * 16 * 32 * 64
    assert product_flops(op("aten::mul", (8, 3), (8, 3))) == 0


def test_attention_flops() -> None:
    q, k = (2, 32, 128, 64), (2, 8, 128, 64)
    forward = 4 * 2 * 32 * 128 * 128 * 64
    name = "aten::_scaled_dot_product_cudnn_attention"
    assert attention_flops(op(name, q, k, k), causal=False) == forward
    assert attention_flops(op(name, q, k, k), causal=True) == forward / 2
    assert attention_flops(op(name + "_backward", q, q, k, k), causal=False) == forward * 2.5
    cpu = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert attention_flops(op(cpu, q, k, k), causal=True) == forward / 2
    assert attention_flops(op(cpu + "_backward", q, q, k, k), causal=True) == forward * 1.25
    assert attention_flops(op("aten::scaled_dot_product_attention", q, k, k), causal=True) == 0


def test_moved_bytes() -> None:
    assert moved_bytes(op("aten::add", (10, 10), (10, 10))) == 3 * 200
    assert moved_bytes(op("triton_poi_fused_add_0", (10, 10), (10, 10))) == 2 * 200
    assert moved_bytes(op("aten::view", (10, 10))) == 0
    assert moved_bytes(op("aten::_foreach_mul_", (10, 10), of="TensorList")) == 0
