"""Arrays that travel together arrive as they were, each aligned."""

from __future__ import annotations

import numpy as np
import torch

from nanochat.engine.packing import Packing, upload


def test_upload_keeps_shapes_types_and_values() -> None:
    arrays = [
        np.arange(5, dtype=np.int64),
        np.array([], dtype=np.int64),
        np.array([[1.5, -2.0, 3.25]], dtype=np.float32),
        np.arange(6, dtype=np.int32).reshape(2, 3),
    ]
    tensors = upload(arrays, torch.device("cpu"))
    for array, tensor in zip(arrays, tensors, strict=True):
        assert tensor.data_ptr() % 16 == 0 or not tensor.numel()
        assert tensor.is_contiguous()
        np.testing.assert_array_equal(tensor.numpy(), array, strict=True)


def test_nothing_takes_no_bytes() -> None:
    assert upload([], torch.device("cpu")) == []
    assert Packing([((0,), torch.int64)]).num_bytes == 0


def test_fields_do_not_overlap() -> None:
    packing = Packing([((3,), torch.float32), ((1,), torch.int64), ((2, 2), torch.int32)])
    buffer = torch.zeros(packing.num_bytes, dtype=torch.uint8)
    for number, view in enumerate(packing.views(buffer), start=1):
        view.fill_(number)
    assert [view.unique().tolist() for view in packing.views(buffer)] == [[1], [2], [3]]


def test_arrays_and_views_are_the_same_bytes() -> None:
    packing = Packing([((3,), torch.float32), ((2,), torch.int64), ((2, 2), torch.int32)])
    buffer = torch.randint(0, 100, (packing.num_bytes,), dtype=torch.uint8)
    for view, array in zip(packing.views(buffer), packing.arrays(buffer.numpy()), strict=True):
        np.testing.assert_array_equal(view.numpy(), array, strict=True)
