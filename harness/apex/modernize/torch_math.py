"""The Fourier transforms and linear algebra that torch had."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

# Fourier transforms on real tensors, whose last dimension holds the real and imaginary parts


def rfft(input: Any, signal_ndim: int, normalized: bool = False, onesided: bool = True) -> Any:
    import torch

    transform = torch.fft.rfftn if onesided else torch.fft.fftn
    return torch.view_as_real(transform(input, dim=_last(signal_ndim), norm=_norm(normalized)))


def irfft(
    input: Any, signal_ndim: int, normalized: bool = False, onesided: bool = True, signal_sizes: Sequence[int] = ()
) -> Any:
    import torch

    x, dims, norm = torch.view_as_complex(input.contiguous()), _last(signal_ndim), _norm(normalized)
    if not onesided:
        return torch.fft.ifftn(x, dim=dims, norm=norm).real
    return torch.fft.irfftn(x, s=tuple(signal_sizes) or None, dim=dims, norm=norm)


def fft(input: Any, signal_ndim: int, normalized: bool = False) -> Any:
    import torch

    x = torch.view_as_complex(input.contiguous())
    return torch.view_as_real(torch.fft.fftn(x, dim=_last(signal_ndim), norm=_norm(normalized)))


def ifft(input: Any, signal_ndim: int, normalized: bool = False) -> Any:
    import torch

    x = torch.view_as_complex(input.contiguous())
    return torch.view_as_real(torch.fft.ifftn(x, dim=_last(signal_ndim), norm=_norm(normalized)))


def _last(signal_ndim: int) -> tuple[int, ...]:
    return tuple(range(-signal_ndim, 0))


def _norm(normalized: bool) -> str:
    return "ortho" if normalized else "backward"


# Linear algebra

_Symeig = namedtuple("_Symeig", "eigenvalues eigenvectors")
_Solve = namedtuple("_Solve", "solution LU")


def qr(input: Any, some: bool = True) -> Any:
    import torch

    return torch.linalg.qr(input, "reduced" if some else "complete")


def symeig(input: Any, eigenvectors: bool = False, upper: bool = True) -> Any:
    import torch

    triangle = "U" if upper else "L"
    if eigenvectors:
        return _Symeig(*torch.linalg.eigh(input, triangle))
    return _Symeig(torch.linalg.eigvalsh(input, triangle), input.new_empty(0))


def solve(input: Any, A: Any) -> Any:
    import torch

    return _Solve(torch.linalg.solve(A, input), torch.linalg.lu_factor(A).LU)


def matrix_rank(input: Any, tol: Any = None, symmetric: bool = False) -> Any:
    import torch

    options = {} if tol is None else {"tol": tol}
    return torch.linalg.matrix_rank(input, hermitian=symmetric, **options)


def cholesky(input: Any, upper: bool = False) -> Any:
    import torch

    return torch.linalg.cholesky(input, upper=upper)
