from __future__ import annotations

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]


def not_negative(columns: Vector, values: Vector) -> Vector:
    """Coefficients of at least 0, with negative and empty columns left out. columns: [values, numbers]."""
    kept = [index for index in range(columns.shape[1]) if np.any(columns[:, index])]
    found = np.zeros(columns.shape[1])
    while kept:
        part = np.linalg.lstsq(columns[:, kept], values, rcond=None)[0]
        if part.min() >= 0:
            found[kept] = part
            break
        del kept[int(part.argmin())]
    return found
