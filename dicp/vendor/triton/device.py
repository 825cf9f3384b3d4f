"""Device functions that generated kernels call as `d.<name>`: PyTorch's rules in Triton's language.

A kernel file imports this module under the name `d`. The simulator loads a copy of it against its
own Triton, where `libdevice` is the host's math library.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

# ---- the math library: the compiler finds its functions only by this name, in this file ----------


@triton.jit
def exp(x):
    return libdevice.exp(x)


@triton.jit
def exp2(x):
    return libdevice.exp2(x)


@triton.jit
def expm1(x):
    return libdevice.expm1(x)


@triton.jit
def log(x):
    return libdevice.log(x)


@triton.jit
def log2(x):
    return libdevice.log2(x)


@triton.jit
def log10(x):
    return libdevice.log10(x)


@triton.jit
def log1p(x):
    return libdevice.log1p(x)


@triton.jit
def sin(x):
    return libdevice.sin(x)


@triton.jit
def cos(x):
    return libdevice.cos(x)


@triton.jit
def cospi(x):
    return libdevice.cospi(x)


@triton.jit
def tan(x):
    return libdevice.tan(x)


@triton.jit
def asin(x):
    return libdevice.asin(x)


@triton.jit
def acos(x):
    return libdevice.acos(x)


@triton.jit
def atan(x):
    return libdevice.atan(x)


@triton.jit
def atan2(x, y):
    return libdevice.atan2(x, y)


@triton.jit
def sinh(x):
    return libdevice.sinh(x)


@triton.jit
def cosh(x):
    return libdevice.cosh(x)


@triton.jit
def tanh(x):
    return libdevice.tanh(x)


@triton.jit
def asinh(x):
    return libdevice.asinh(x)


@triton.jit
def acosh(x):
    return libdevice.acosh(x)


@triton.jit
def atanh(x):
    return libdevice.atanh(x)


@triton.jit
def erf(x):
    return libdevice.erf(x)


@triton.jit
def erfc(x):
    return libdevice.erfc(x)


@triton.jit
def normal_cdf(x):
    return (erf(x * 0.7071067811865476) + 1.0) * 0.5


@triton.jit
def exp2_flushed(x):
    """2 ** x, and 0 where it is less than any normal number."""
    text: tl.constexpr = "ex2.approx.ftz.f32 $0, $1;"
    return tl.inline_asm_elementwise(text, "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def exp_short(x):
    """exp(x), the relative error of which grows with |x|: 2**-22 and 2**-24 |x|."""
    return exp2_flushed(x * 1.4426950408889634)


@triton.jit
def normal_cdf_short(x):
    """The error is at most 2**-22, the relative one 2**-16 above -5.5 and less than 1 everywhere.

    The logarithm of the tail is fitted by a polynomial on [0, 5.6]; beyond, that falls faster.
    """
    a = tl.abs(x)
    p = fma(a, -3.8490651e-07, 6.3467314e-06)
    p = fma(p, a, -8.2310207e-06)
    p = fma(p, a, -6.2489312e-04)
    p = fma(p, a, 7.7815601e-03)
    p = fma(p, a, -5.3046655e-02)
    p = fma(p, a, -4.5901126e-01)
    p = fma(p, a, -1.1511306e00)
    tail = exp2_flushed(fma(p, a, -9.9999946e-01))
    return tl.where(x < 0.0, tail, 1.0 - tail)


@triton.jit
def normal_cdf_tanh(x):
    return (tanh((x + x * x * x * 0.044715) * 0.7978845608028654) + 1.0) * 0.5


@triton.jit
def erfinv(x):
    return libdevice.erfinv(x)


@triton.jit
def lgamma(x):
    return libdevice.lgamma(x)


@triton.jit
def hypot(x, y):
    return libdevice.hypot(x, y)


@triton.jit
def nextafter(x, y):
    return libdevice.nextafter(x, y)


@triton.jit
def copysign(x, y):
    return libdevice.copysign(x, y)


@triton.jit
def rsqrt(x):
    return libdevice.rsqrt(x)


@triton.jit
def floor(x):
    return libdevice.floor(x)


@triton.jit
def ceil(x):
    return libdevice.ceil(x)


@triton.jit
def trunc(x):
    return libdevice.trunc(x)


@triton.jit
def round(x):
    return libdevice.rint(x)


# ---- rounding to 16 bits -------------------------------------------------------------------------


@triton.jit
def to_bf16(x):
    return x.to(tl.bfloat16)


@triton.jit
def round_bf16(x):
    return to_bf16(x).to(tl.float32)


@triton.jit
def round_fp16(x):
    return x.to(tl.float16).to(tl.float32)


# ---- arithmetic ----------------------------------------------------------------------------------


@triton.jit
def div(a, b):
    if a.dtype == tl.float32:
        return tl.math.div_rn(a, b)
    else:
        return a / b


@triton.jit
def reciprocal(x):
    return div(tl.full([], 1.0, x.dtype), x)


@triton.jit
def sqrt(x):
    if x.dtype == tl.float32:
        return tl.math.sqrt_rn(x)
    else:
        return tl.math.sqrt(x)


@triton.jit
def divided(a, b, inverse):
    """a / b for many a: what rounding lost of a * (1 / b) is put in again (Markstein, 1990)."""
    q = a * inverse
    return fma(fma(neg(q), b, a), inverse, q)


@triton.jit
def over(a, b, inverse):
    """The same for any a; the negative of what is lost keeps the sign of zero."""
    q = a * inverse
    r = fma(neg(fma(q, b, neg(a))), inverse, q)
    return tl.where(r == r, r, q)  # q where it is inf or NaN


@triton.jit
def inverse_above_one(y):
    """1 / y where y is at least 1: a guess and one step of Newton's."""
    one = tl.full([], 1.0, tl.float32)
    guess = libdevice.fast_dividef(one * 0.25, y * 0.25)  # it gives 0 beyond 2**126
    return tl.where(y == float("inf"), 0.0, fma(fma(neg(y), guess, one), guess, guess))


@triton.jit
def over_above_one(a, y):
    """a / y where y is at least 1."""
    inverse = inverse_above_one(y)
    q = a * inverse
    lost = fma(neg(q), y, a)
    return tl.where(tl.abs(lost) > 0.0, fma(lost, inverse, q), q)  # q where it is -0, inf or NaN


@triton.jit
def sigmoid(x):
    y = 1.0 + exp(neg(x))
    if x.dtype == tl.float32:
        return inverse_above_one(y)
    else:
        return div(tl.full([], 1.0, x.dtype), y)


@triton.jit
def fma(a, b, c):
    if a.dtype.is_floating():
        return tl.math.fma(a, b, c)
    else:
        return a * b + c


@triton.jit
def neg(x):
    if x.dtype.is_floating():
        return x * -1.0  # 0 - x would lose the sign of zero
    else:
        return 0 - x


@triton.jit
def sign(x):
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@triton.jit
def signbit(x):
    if x.dtype == tl.float32:
        return x.to(tl.int32, bitcast=True) < 0
    elif x.dtype == tl.float64:
        return x.to(tl.int64, bitcast=True) < 0
    else:
        return x < 0


@triton.jit
def maximum(a, b):
    if a.dtype == tl.float32:
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    else:
        return tl.where((a > b) | (a != a), a, b)


@triton.jit
def minimum(a, b):
    if a.dtype == tl.float32:
        return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    else:
        return tl.where((a < b) | (a != a), a, b)


@triton.jit
def fmax(a, b):
    return tl.where((b > a) | (a != a), b, a)


@triton.jit
def fmin(a, b):
    return tl.where((b < a) | (a != a), b, a)


@triton.jit
def pow(a, b):
    if a.dtype.is_floating():
        return libdevice.pow(a, b)
    else:
        return integer_pow(a, b)


@triton.jit
def integer_pow(x, n):
    """A negative exponent gives 0 but for bases 1 and -1."""
    if x.dtype == tl.uint8:
        return power(x + n * 0, n + x * 0, (x * 0 + n * 0 + 1).to(x.dtype))
    else:
        odd = (n & 1) != 0
        small = tl.where(x == 1, 1, tl.where(x == -1, tl.where(odd, -1, 1), 0))
        start = (tl.where(n < 0, small, 1) + n * 0).to(x.dtype)
        return power(x + n * 0, tl.where(n < 0, 0, n) + x * 0, start)


@triton.jit
def power(base, left, result):
    """result * base ** left, by squaring."""
    for _ in range(63):
        result = tl.where((left & 1) != 0, result * base, result).to(result.dtype)
        base = (base * base).to(base.dtype)
        left = left >> 1
    return result


@triton.jit
def lshift(x, n):
    bits: tl.constexpr = x.dtype.primitive_bitwidth
    outside = (n < 0) | (n >= bits)
    return tl.where(outside, 0, x << tl.where(outside, 0, n)).to(x.dtype)


@triton.jit
def rshift(x, n):
    most: tl.constexpr = x.dtype.primitive_bitwidth - 1
    shifted = (x >> tl.where((n < 0) | (n > most), most, n).to(x.dtype)).to(x.dtype)
    if x.dtype.is_int_unsigned():
        return tl.where(n > most, 0, shifted).to(x.dtype)
    else:
        return shifted


# ---- division ------------------------------------------------------------------------------------


@triton.jit
def divisor(b, active, site: tl.constexpr):
    """An integer divisor that must not be zero where `active`; the simulator checks it."""
    return b


@triton.jit
def trunc_div(a, b):
    if a.dtype.is_floating():
        return trunc(div(a, b))
    else:
        return a // b


@triton.jit
def fmod(a, b):
    if a.dtype.is_floating():
        return libdevice.fmod(a, b)
    else:
        return a % b


@triton.jit
def remainder(a, b):
    r = fmod(a, b)
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)


@triton.jit
def floor_div(a, b):
    if a.dtype.is_floating():
        return float_floor_div(a, b)
    else:
        q = a // b
        return q - ((a % b != 0) & ((a < 0) != (b < 0))).to(a.dtype)


@triton.jit
def float_floor_div(a, b):
    r = fmod(a, b)
    q = div(a - r, b)
    q = tl.where((r != 0) & ((r < 0) != (b < 0)), q - 1, q)
    f = floor(q)
    f = tl.where(q - f > 0.5, f + 1, f)
    f = tl.where(q == 0, copysign(q * 0, div(a, b)), f)
    return tl.where(b == 0, div(a, b), f)


# ---- indices from memory -------------------------------------------------------------------------


@triton.jit
def check_index(index, size, active, site: tl.constexpr, message: tl.constexpr):
    """`index`, which must lie in 0 .. size-1 where `active`."""
    tl.device_assert(((index >= 0) & (index < size)) | (active == 0), message)
    return index


@triton.jit
def wrap_index(index, size, active, site: tl.constexpr, message: tl.constexpr):
    """`index` counted from the start, which must lie in -size .. size-1 where `active`."""
    at = tl.where(index < 0, index + size, index)
    tl.device_assert(((at >= 0) & (at < size)) | (active == 0), message)
    return at


# ---- colliding stores ----------------------------------------------------------------------------


@triton.jit
def as_bits(x):
    if x.dtype.primitive_bitwidth == 32:
        return x.to(tl.int32, bitcast=True)
    else:
        return x.to(tl.int64, bitcast=True)


@triton.jit
def some(active):
    """Whether any lane is active, as a number."""
    if active.type.is_block():
        return tl.max(active.to(tl.int32), 0)
    else:
        return active.to(tl.int32)


@triton.jit
def atomic_prod(place, value, active=None, sem: tl.constexpr = "relaxed"):
    """Multiplies what lies at each `place`, by compare-and-swap until nothing else wrote there.

    The instruction takes no mask: a lane that has nothing to do swaps what it saw for itself.
    """
    bits = place.to(tl.pointer_type(as_bits(value).dtype), bitcast=True)
    old = tl.load(bits)
    left = old == old if active is None else active
    while some(left) != 0:
        new = as_bits(old.to(value.dtype, bitcast=True) * value)
        seen = tl.atomic_cas(bits, old, tl.where(left, new, old), sem=sem)
        left = left & (seen != old)
        old = seen


# ---- reductions along the last axis of a tile, which is kept -------------------------------------


@triton.jit
def _multiply(a, b):
    return a * b


@triton.jit
def sum(x):
    return tl.sum(x, 1, keep_dims=True)


@triton.jit
def sum_cross_row(x):
    return tl.sum(x, 0, keep_dims=True)


@triton.jit
def prod(x):
    return tl.reduce(x, 1, _multiply, keep_dims=True)


@triton.jit
def max(x):
    return tl.reduce(x, 1, maximum, keep_dims=True)


@triton.jit
def min(x):
    return tl.reduce(x, 1, minimum, keep_dims=True)


@triton.jit
def any(x):
    return tl.max((x != 0).to(tl.int32), 1, keep_dims=True) != 0


@triton.jit
def all(x):
    return tl.min((x != 0).to(tl.int32), 1, keep_dims=True) != 0


@triton.jit
def first_of(x, best, position):
    """The smallest position of an element equal to `best`, a NaN being equal to a NaN."""
    hit = (x == best) | (x != x)
    return tl.min(tl.where(hit, position, 0x7FFFFFFFFFFFFFFF), 1, keep_dims=True)


@triton.jit
def argmax(x, position):
    return first_of(x, max(x), position)


@triton.jit
def argmin(x, position):
    return first_of(x, min(x), position)


@triton.jit
def better_max(a, b):
    return (a > b) | ((a != a) & (b == b))


@triton.jit
def better_min(a, b):
    return (a < b) | ((a != a) & (b == b))


@triton.jit
def rises(x, top):
    return (x > top) | (x != x)


@triton.jit
def below(x, top):
    """The lower less the higher; 0 where they are equal, be they infinite."""
    return neg(tl.abs(tl.where(x == top, 0.0, x - top)))


@triton.jit
def fall(x, top):
    return exp(below(x, top))


@triton.jit
def fall_short(x, top):
    return exp_short(below(x, top))


@triton.jit
def shifted_exp(x, top):
    """exp(x - top), and 0 where both are -inf: nothing has been seen yet."""
    return exp(x - tl.where(top == float("-inf"), 0.0, top))


@triton.jit
def rescaled(total, old, new):
    """A sum of exp(x - old) as one of exp(x - new)."""
    return total * shifted_exp(old, new)


@triton.jit
def running_sum(x):
    return tl.cumsum(x, 1) + 0  # a sum from 0 on is never -0


@triton.jit
def running_prod(x):
    return tl.cumprod(x, 1)


# ---- special functions ---------------------------------------------------------------------------


@triton.jit
def digamma(x):
    """Recurrence up to 10, then the asymptotic series (Abramowitz and Stegun 6.3.18); reflection
    below 0."""
    z = x.to(tl.float64)
    reflected = z < 0
    whole = z == floor(z)
    turn = 3.14159265358979323846 * (z - trunc(z))
    result = tl.where(reflected, neg(3.14159265358979323846 / tan(turn)), 0.0)
    z = tl.where(reflected, 1.0 - z, z)
    for _ in range(10):
        small = z < 10.0
        result = tl.where(small, result - 1.0 / z, result)
        z = tl.where(small, z + 1.0, z)
    w = 1.0 / (z * z)
    series = 691.0 / 32760.0 - w / 12.0
    series = 1.0 / 132.0 - w * series
    series = 1.0 / 240.0 - w * series
    series = 1.0 / 252.0 - w * series
    series = 1.0 / 120.0 - w * series
    series = w * (1.0 / 12.0 - w * series)
    result = result + log(z) - 0.5 / z - series
    pole = copysign(z * 0 + float("inf"), neg(x.to(tl.float64)))
    result = tl.where(x == 0, pole, tl.where(reflected & whole, float("nan"), result))
    return result.to(x.dtype)


# ---- random numbers: Philox 4x32-7 (Salmon et al., SC 2011), as the host's ----------------------


@triton.jit
def philox(seed, site, counter):
    """Four words of 32 bits."""
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    c0 = counter.to(tl.uint32)
    c3 = c0 * 0
    c2 = site.to(tl.uint32) + c3
    if counter.dtype.primitive_bitwidth == 64:
        c1 = (counter >> 32).to(tl.uint32)
    else:
        c1 = c3
    for _ in tl.static_range(7):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = p1.to(tl.uint32)
        c3 = p0.to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


# Neighbours share a call and tell by their `place` which of its words are theirs. Every lane asks
# for itself: of equal calls in one thread the compiler makes one.


@triton.jit
def philox_word(seed, site, counter, place):
    """One of four words."""
    c0, c1, c2, c3 = philox(seed, site, counter)
    low = tl.where((place & 1) == 0, c0, c1)
    high = tl.where((place & 1) == 0, c2, c3)
    return tl.where((place & 2) == 0, low, high)


@triton.jit
def philox_pair(seed, site, counter, place):
    """One of two pairs of words."""
    c0, c1, c2, c3 = philox(seed, site, counter)
    first = (place & 1) == 0
    return tl.where(first, c0, c2), tl.where(first, c1, c3)


@triton.jit
def joined(low, high):
    return (high.to(tl.uint64) << 32) | low.to(tl.uint64)


@triton.jit
def philox_bits(seed, site, counter, place):
    low, high = philox_pair(seed, site, counter, place)
    return (joined(low, high) >> 1).to(tl.int64)


@triton.jit
def unit(bits):
    return (bits >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def unit_d(low, high):
    return (joined(low, high) >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def philox_uniform_f(seed, site, counter, place):
    return unit(philox_word(seed, site, counter, place))


@triton.jit
def philox_uniform_d(seed, site, counter, place):
    low, high = philox_pair(seed, site, counter, place)
    return unit_d(low, high)


# Box and Muller (1958): two normal numbers from two uniform ones, a quarter of a turn apart.
@triton.jit
def philox_normal_f(seed, site, counter, place):
    low, high = philox_pair(seed, site, counter, place >> 1)
    turn = unit(high) - (place & 1).to(tl.float32) * 0.25
    return tl.math.sqrt(-2.0 * log(1.0 - unit(low))) * cospi(2.0 * turn)


@triton.jit
def philox_normal_d(seed, site, counter, place):
    c0, c1, c2, c3 = philox(seed, site, counter)
    radius = sqrt(-2.0 * log(1.0 - unit_d(c0, c1)))
    return radius * cospi(2.0 * unit_d(c2, c3))
