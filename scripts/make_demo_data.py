"""Make the demo's images from Fashion-MNIST's four IDX files: the first N of each class, in order.

    python scripts/make_demo_data.py DIR     DIR holds train-images-idx3-ubyte.gz and its fellows
                                             (on Debian: apt install dataset-fashion-mnist)

The same input always gives the same file, byte for byte. The images are stored one after the other
and compressed by LZMA with four bits of literal context: 374 bytes an image, against 440 with gzip;
PNG-like filters do not help.
"""

import lzma
import sys
from pathlib import Path

import numpy as np

from elbowroom.demo.data import PACKED, PACKED_FILTERS, TEST_COUNT, TRAIN_COUNT, read_idx_folder


def first_of_each_class(labels: np.ndarray, count: int) -> np.ndarray:
    """Indices of the first `count / 10` of each class, in the order of the set."""
    chosen = [np.flatnonzero(labels == label)[: count // 10] for label in range(10)]
    return np.sort(np.concatenate(chosen))


def main() -> None:
    images = read_idx_folder(Path(sys.argv[1]))
    parts = []
    for split, count in ((images.train, TRAIN_COUNT), (images.test, TEST_COUNT)):
        labels = split.labels.numpy()
        order = first_of_each_class(labels, count)
        parts += [split.images.numpy()[order].tobytes(), labels[order].astype(np.uint8).tobytes()]
    packed = lzma.compress(
        b"".join(parts), format=lzma.FORMAT_XZ, check=lzma.CHECK_SHA256, filters=PACKED_FILTERS
    )
    PACKED.write_bytes(packed)
    print(f"{PACKED}: {len(packed):,} bytes")


if __name__ == "__main__":
    main()
