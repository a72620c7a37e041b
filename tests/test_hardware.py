"""Devices and links: what data sheets say, and what cannot be."""

import math
from dataclasses import replace

import pytest

from labkit.errors import PlanError
from labkit.spec import DEVICES, LINKS, Hardware

H100 = Hardware.preset("h100")


def test_every_device_has_sane_speeds():
    for name in DEVICES:
        device = Hardware.preset(name)
        assert device.name == name
        assert device.fp32_flops < device.bf16_flops < (device.fp8_flops or math.inf)
        assert device.network_bytes_per_s < device.link_bytes_per_s < device.memory_bytes_per_s
        assert 0 < device.link_alpha_s < device.network_alpha_s


def test_memory_tells_devices_of_one_chip_apart():
    sizes = {name: Hardware.preset(name).memory_bytes / 1e9 for name in ("a100-40", "a100-80", "h100", "h200")}
    assert sizes == {"a100-40": 40, "a100-80": 80, "h100": 80, "h200": 141}
    assert Hardware.preset("a100") == Hardware.preset("a100-80")
    assert H100.peak_flops("fp8") == 2 * H100.peak_flops("bf16")


def test_drivers_names_lead_to_devices():
    names = {"NVIDIA B200": "b200", "NVIDIA GB200": "gb200", "NVIDIA GeForce RTX 4090": "rtx4090"}
    assert {text: Hardware.find(text).name for text in names} == names
    for text in (
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A100 80GB PCIe",
        "NVIDIA H100 NVL",
        "Tesla V100-SXM2-16GB",
    ):
        assert Hardware.find(text) is None


def test_links_are_chosen_by_name():
    slow = Hardware.preset("h100", link="pcie5", network="ethernet-10")
    assert (slow.link_bytes_per_s, slow.network_bytes_per_s) == (63e9, 1.25e9)
    assert slow.network_alpha_s == LINKS["ethernet-10"].alpha_s
    with pytest.raises(PlanError, match=r"network='ib-ndx' is unknown: .* Did you mean 'ib-ndr'\?"):
        Hardware.preset("h100", network="ib-ndx")


@pytest.mark.parametrize(
    "field", ["fp32_flops", "bf16_flops", "fp8_flops", "memory_bytes_per_s", "link_bytes_per_s", "network_bytes_per_s"]
)
def test_a_rate_of_zero_is_refused_with_one_that_is_not(field):
    with pytest.raises(
        PlanError, match=rf"{field}=0: at less than 1 a second nothing ever ends.* An H100 has {field}=\d"
    ):
        replace(H100, **{field: 0})
    with pytest.raises(PlanError, match=f"{field}=1e-300"):
        replace(H100, **{field: 1e-300})
    for value in (-1.0, math.nan, math.inf, "fast", None if field != "fp8_flops" else "none", True):
        with pytest.raises(PlanError, match=field):
            replace(H100, **{field: value})


def test_what_no_device_can_do_is_refused():
    with pytest.raises(PlanError, match=r"product_efficiency=85 is above 1: it is a share.* Use .*=0\.85\."):
        replace(H100, product_efficiency=85)
    with pytest.raises(PlanError, match="memory_efficiency=0"):
        replace(H100, memory_efficiency=0)
    with pytest.raises(PlanError, match="network_efficiency=5e-324"):
        replace(H100, network_efficiency=5e-324)
    with pytest.raises(PlanError, match=r"link='' is unknown"):
        Hardware.preset("h100", link="")
    with pytest.raises(PlanError, match="device_name=None is no text"):
        Hardware.find(None)
    with pytest.raises(PlanError, match="link_alpha_s=-1"):
        replace(H100, link_alpha_s=-1)
    with pytest.raises(PlanError, match="memory_bytes=0 is below 1"):
        replace(H100, memory_bytes=0)
    with pytest.raises(PlanError, match=r"device 'h1000' is unknown: .* Did you mean 'h100'\?"):
        Hardware.preset("h1000")
