"""Kernels: tensors in, tensors out. They have no policy, no state and no autograd.

`ops` declares every operation once. `reference/` is its specification in plain torch, `numba/` is
for CPUs, and `triton/` is for GPUs, all with the same names and signatures. Callers use only
`elbowroom.kernels.ops`.
"""
