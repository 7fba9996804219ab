"""Triton kernels for the compile gate, good and bad; imported by its worker alone, with TRITON_INTERPRET unset."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import os

import torch
import triton
import triton.language as tl


@triton.jit
def product_kernel(a_ptr, b_ptr, c_ptr, rows, depth, BM: tl.constexpr, BK: tl.constexpr, SPECIALIZED: tl.constexpr):
    a = tl.make_tensor_descriptor(a_ptr, [rows, depth], [depth, 1], [BM, BK])
    b = tl.make_tensor_descriptor(b_ptr, [rows, depth], [depth, 1], [BM, BK])
    row = tl.program_id(0) * BM
    acc = tl.zeros([BM, BM], tl.float32)
    for start in tl.range(0, depth, BK, warp_specialize=SPECIALIZED):
        acc = tl.dot(a.load([row, start]), b.load([0, start]).T, acc)
    index = tl.arange(0, BM)
    tl.store(c_ptr + (row + index)[:, None] * BM + index[None, :], acc)


@triton.jit
def gather_kernel(a_ptr, rows_ptr, c_ptr, rows, WIDTH: tl.constexpr):
    a = tl.make_tensor_descriptor(a_ptr, [rows, WIDTH], [WIDTH, 1], [1, WIDTH])
    picked = tl.arange(0, 32)
    tile = a.gather(tl.load(rows_ptr + picked), 0)
    tl.store(c_ptr + picked[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], tile)


def multiply(*, specialized: bool = False, depth_block: int = 64, **options: int) -> None:
    """Launch the product of 4096 x 1024 by its transpose."""
    a = torch.empty(4096, 1024, dtype=torch.float16, device="cuda")
    c = torch.empty(4096, 128, device="cuda")
    product_kernel[(32,)](a, a, c, 4096, 1024, BM=128, BK=depth_block, SPECIALIZED=specialized, **options)


def gather() -> None:
    """Launch a gather by the copy engine, which Hopper's cannot do."""
    a = torch.empty(64, 64, dtype=torch.float16, device="cuda")
    gather_kernel[(1,)](a, torch.empty(32, dtype=torch.int32, device="cuda"), torch.empty_like(a), 64, WIDTH=64)


def nothing() -> None:
    """Launch no kernel."""


def die() -> None:
    """End as an assertion inside the compiler does."""
    os.write(2, b"/build/lib/Analysis.cpp:42: Assertion `rank > 0' failed.\n")
    os.abort()
