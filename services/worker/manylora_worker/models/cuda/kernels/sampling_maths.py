"""The numbers behind the device's draws, the same bits in every kernel that calls them."""

# exp and log are those of Cephes (S. Moshier, expf.c and logf.c); the correction for log1p is W. Kahan's, as in fdlibm.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exp(x):
    """e^x for x <= 0, within an ulp; 0 below -87.3."""
    clamped = tl.maximum(x, -87.3)
    n = tl.floor(clamped * 1.44269504088896341 + 0.5)
    r = clamped - n * 0.693359375
    r = r + n * 2.12194440e-4
    p = 1.9875691500e-4 * r + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    y = p * (r * r) + r + 1.0
    scale = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < -87.3, 0.0, y * scale)


@triton.jit
def minus_log1p_of_minus(u):
    """-log(1 - u) for 0 < u < 1, within an ulp or two of the result however small u is."""
    w = 1.0 - u
    lost = (1.0 - w) - u  # what the subtraction rounded away: 1 - u = w + lost
    bits = w.to(tl.int32, bitcast=True)
    # w = 2^exponent * m with sqrt(1/2) <= m < sqrt(2)
    exponent = (bits - 0x3F3504F3) >> 23
    m = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    f = m - 1.0
    z = f * f
    p = 7.0376836292e-2 * f - 1.1514610310e-1
    p = p * f + 1.1676998740e-1
    p = p * f - 1.2420140846e-1
    p = p * f + 1.4249322787e-1
    p = p * f - 1.6668057665e-1
    p = p * f + 2.0000714765e-1
    p = p * f - 2.4999993993e-1
    p = p * f + 3.3333331174e-1
    e = exponent.to(tl.float32)
    y = f * z * p + e * -2.12194440e-4 - 0.5 * z
    log = f + y + e * 0.693359375
    return -(log + lost / w)


@triton.jit
def mix64(z):
    z = z + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def mix32(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)
