"""A codec without autograd: bytes, error, and what a site may tell it."""

import torch

import elbowroom as er


def main() -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).relu()
    for codec in (
        er.codec("group", bits=2),
        er.codec("dither", bits=2),
        er.codec("cast", to="fp8_e4m3"),
    ):
        encoded = codec.encode(x, seed=1)
        error = (encoded.decode() - x).square().mean().sqrt()
        print(
            f"{codec!r}: {8 * encoded.nbytes / x.numel():.2f} bits a value, rms error {error:.4f}"
        )

    aware = er.codec("dither", bits=2).encode(x, seed=1, facts=er.Facts(has_zeros=True))
    again = aware.decode()
    print(
        f"zero-aware: {8 * aware.nbytes / x.numel():.2f} bits a value, "
        f"rms error {(again - x).square().mean().sqrt():.4f}, "
        f"zeros exact: {torch.equal(again == 0, x == 0)}"
    )


if __name__ == "__main__":
    main()
