"""Test pools of threads that use torch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from mcore_ckpt_ext.operations.reading import threads


def test_torch_uses_one_thread_in_a_pool_and_as_many_as_before_afterwards() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with threads(2) as pool:
            assert pool.submit(torch.get_num_threads).result() == 1
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
