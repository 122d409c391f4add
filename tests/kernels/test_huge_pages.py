"""Weights lie side by side in memory that goes with the last of them."""

from __future__ import annotations

import gc
import mmap

import torch

from nanochat.kernels.native.huge_pages import Room


def test_tensors_lie_side_by_side_and_apart_from_each_other() -> None:
    room = Room()
    first, second = room.empty((3, 5)), room.empty((2, 64))
    assert second.data_ptr() - first.data_ptr() == 64
    assert first.data_ptr() % 64 == 0
    first.fill_(1)
    second.fill_(2)
    assert int(first.sum()) == 15
    assert second.shape == (2, 64)
    assert second.is_contiguous()


def test_what_does_not_fit_gets_the_next_region() -> None:
    room = Room()
    small = room.empty((100,))
    first = room._region
    assert first is not None
    other = room.empty(((16 << 20) - 64,))
    assert room._region is not first
    assert other.data_ptr() % mmap.PAGESIZE == 0  # the beginning of a mapping
    assert int(small.fill_(1).sum()) == 100
    assert room.empty((64,)).data_ptr() == other.data_ptr() + other.numel()


def test_a_large_tensor_lies_alone() -> None:
    # What lies beside it would keep all of it.
    room = Room()
    small, large = room.empty((100,)), room.empty(((40 << 20) + 1,))
    region = room._region
    assert region is not None
    assert large.data_ptr() % mmap.PAGESIZE == 0  # the beginning of a mapping
    large[-1] = 7
    assert room.empty((1000,)).data_ptr() == small.data_ptr() + 128
    assert room._region is region
    only = Room()
    assert only.empty((16 << 20,)).shape == (16 << 20,)
    assert only._region is None


def test_memory_is_given_back_with_the_last_tensor() -> None:
    room = Room()
    tensor = room.empty((1000,))
    region = room._region
    assert region is not None
    view = tensor.view(10, 100)[3:]
    del tensor
    gc.collect()
    assert region() is not None
    assert torch.equal(view.fill_(3), torch.full((7, 100), 3, dtype=torch.uint8))
    del view
    gc.collect()
    assert region() is None
    assert room.empty((10,)).numel() == 10
