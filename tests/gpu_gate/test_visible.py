"""An outer CUDA_VISIBLE_DEVICES bounds the set, and nothing is guessed."""

import pytest

from draftmill.gpu.probe import Device
from draftmill.gpu.record import Fault
from draftmill.gpu.visible import resolve

A, B, C = (f"GPU-{letter * 8}-0000-4000-8000-000000000000" for letter in "abc")


def device(index: int, uuid: str | None, name: str = "H200", code: int = 15) -> Device:
    errors = {} if uuid else {"handle": Fault(code=code, name="X")}
    return Device(index=index, uuid=uuid, name=name, pci=None, errors=errors)


THREE = [device(0, A), device(1, B), device(2, C)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, (A, B, C)),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("2,0", (C, A)),
        ("1,-1,0", (B,)),
        (f"{C},{A}", (C, A)),
        ("GPU-b", (B,)),
        (" 1 , 2 ", (B, C)),
    ],
)
def test_the_set_that_cuda_would_see(value: str | None, expected: tuple[str, ...]) -> None:
    found = resolve(THREE, {} if value is None else {"CUDA_VISIBLE_DEVICES": value})
    assert (found.uuids, found.reasons) == (expected, ())


@pytest.mark.parametrize(
    ("value", "number"),
    [("7", 0), ("0,9", 1), ("GPU-", 0), ("GPU-d", 0), ("MIG-1/2/3", 0), ("1,1", 1), ("x", 0), ("0,,1", 1)],
)
def test_what_is_unclear_is_a_reason(value: str, number: int) -> None:
    reasons = resolve(THREE, {"CUDA_VISIBLE_DEVICES": value}).reasons
    assert [(r.code, r.value) for r in reasons] == [("visible_devices_unclear", number)]


def test_an_index_over_cards_of_two_names_needs_the_bus_order() -> None:
    mixed = [device(0, A, "L4"), device(1, B, "H200")]
    assert resolve(mixed, {"CUDA_VISIBLE_DEVICES": "0"}).reasons
    ordered = resolve(mixed, {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert ordered.uuids == (A,)
    assert resolve(mixed, {"CUDA_VISIBLE_DEVICES": B}).uuids == (B,)


def test_devices_of_another_cgroup_are_not_counted() -> None:
    confined = [device(0, None, code=4), device(1, B), device(2, C)]
    assert resolve(confined, {"CUDA_VISIBLE_DEVICES": "0,1"}).uuids == (B, C)


def test_a_lost_device_leaves_indices_open_and_uuids_clear() -> None:
    lost = [device(0, None), device(1, B), device(2, C)]
    assert resolve(lost, {"CUDA_VISIBLE_DEVICES": "0"}).reasons
    assert resolve(lost, {"CUDA_VISIBLE_DEVICES": C}).uuids == (C,)
    assert resolve(lost, {}).uuids == (B, C)


def test_expected_gpus_bound_the_set() -> None:
    assert resolve(THREE, {}, (B,)).uuids == (B,)
    assert resolve(THREE, {"CUDA_VISIBLE_DEVICES": "0"}, (B,)).uuids == ()
