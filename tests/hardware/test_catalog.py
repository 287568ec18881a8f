"""The catalog: names, product names and plausible figures."""

from dataclasses import replace
from pathlib import Path

import pytest

from weft.hardware.catalog import DEVICES, DTYPES, NETWORKS, device_by_product, find_device, find_network, read_catalog
from weft.job.errors import JobError


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA H800", "h800-sxm"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B200", "b200-sxm"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B300 SXM6 AC", "b300-sxm"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA L4", "l4"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("Tesla V100-SXM2-16GB", "v100-sxm-16gb"),
        ("Tesla V100-SXM2-32GB", "v100-sxm-32gb"),
        ("AMD Instinct MI250X", "mi250x"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI325X", "mi325x"),
    ],
)
def test_a_product_name_finds_its_entry(product: str, name: str) -> None:
    device = device_by_product(product)
    assert device is not None
    assert device.name == name


@pytest.mark.parametrize(
    "product",
    ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H200 NVL", "NVIDIA L40", "llvmpipe", ""],
)
def test_similar_product_names_do_not_match(product: str) -> None:
    assert device_by_product(product) is None


@pytest.mark.parametrize("name", ["h100-sxm", "H100-SXM", "h100", "H100 SXM 80GB", "h100_sxm"])
def test_device_names_are_normalized(name: str) -> None:
    assert find_device(name).name == "h100-sxm"


@pytest.mark.parametrize("name", ["V100-SXM2-32GB", "GH200-144GB", "H800-SXM-80GB", "B300-SXM-288GB", "RTX-A6000"])
def test_names_of_published_tables(name: str) -> None:
    assert find_device(name).name.split("-")[0] == name.lower().split("-")[0]


def test_an_unknown_device_is_refused_with_the_nearest() -> None:
    with pytest.raises(JobError, match=r"unknown device 'h100-smx'; did you mean h100-sxm\?"):
        find_device("h100-smx")
    with pytest.raises(JobError, match=r"unknown device 'zzz'; known: .*mi300x.*cpu"):
        find_device("zzz")


def test_an_unknown_network_is_refused_with_the_nearest() -> None:
    assert find_network("IB-NDR").gb_s == 50.0
    with pytest.raises(JobError, match=r"unknown network 'ib-nrd'; did you mean ib-ndr\?"):
        find_network("ib-nrd")


def test_device_figures_are_plausible() -> None:
    for name, device in ((device.name, device) for device in DEVICES):
        assert device.name == name
        assert set(device.peak_tflops) == {"fp32", "bf16", "fp16", "fp8"}
        assert 0 < device.memory_gib < 400
        assert 0.01 < device.memory_tb_s < 20
        assert 1 < device.link_gb_s < 2000
        assert 50 < device.tdp_w < 2000
        fp32, bf16, fp16, fp8 = (device.peak_tflops[d] for d in ("fp32", "bf16", "fp16", "fp8"))
        if device.kind == "cpu":
            assert (fp32, bf16, fp16, fp8) == (None,) * 4
            continue
        assert fp32 is not None
        assert fp16 is not None
        assert fp32 < fp16
        assert bf16 in (None, fp16)
        assert fp8 is None or 1.9 < fp8 / fp16 < 2.1
        assert hash(device) == hash(find_device(name))


def test_the_networks_are_line_rates() -> None:
    assert all(0.1 <= n.gb_s <= 100 and n.latency_us > 0 and n.name == key for key, n in NETWORKS.items())
    assert NETWORKS["ethernet-100"].gb_s == NETWORKS["ib-edr"].gb_s == 12.5


def test_the_speed_of_a_precision_that_a_device_lacks() -> None:
    t4, a100 = find_device("t4"), find_device("a100")
    assert [t4.tflops_of(name) for name in DTYPES] == [8.1, 8.1, 65, 65] and t4.emulates_bf16
    assert [a100.tflops_of(name) for name in DTYPES] == [19.5, 312, 312, 312] and not a100.emulates_bf16
    half_alone = replace(a100, peak_tflops={"bf16": 800.0})
    assert [half_alone.tflops_of(name) for name in DTYPES] == [100, 800, 800, 800]
    assert find_device("cpu").tflops_of("bf16") is None


def test_a_catalog_that_is_nested_too_deeply(tmp_path: Path) -> None:
    """libyaml would exhaust the stack, which ends the process without a word."""
    path = tmp_path / "catalog.yaml"
    path.write_text("devices: " + "[" * 10**5 + "]" * 10**5, encoding="utf-8")
    with pytest.raises(JobError, match="is not YAML: it is nested deeper than 50 levels"):
        read_catalog(path)
