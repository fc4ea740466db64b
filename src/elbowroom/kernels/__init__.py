"""NUMBERS: tensors in, tensors out. No policy, no state, no autograd.

`ops` declares every operation once; `reference/` is its specification in plain torch, `numba/`
serves the CPU and `triton/` the GPU, all with the same names and signatures. Callers use
`elbowroom.kernels.ops` and nothing else.
"""
