"""Codes are FSQ's digits: checked against lucidrains' implementation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bt_policy import codes

LEVELS = [[8, 5, 5, 5], [4, 4, 4], [3, 7, 10], [8, 8, 8]]


@pytest.mark.parametrize("levels", LEVELS)
def test_quantised_vectors_digits_and_indices_equal_fsq(levels):
    fsq = pytest.importorskip("vector_quantize_pytorch").FSQ(levels)
    latents = torch.randn(500, len(levels), generator=torch.Generator().manual_seed(0)) * 2
    values, indices = fsq(latents[None])
    for latent, value, place in zip(latents.numpy(), values[0].numpy(), indices[0].tolist(), strict=True):
        np.testing.assert_allclose(codes.bound(latent, levels), value, atol=1e-6)
        code = codes.to_digits(value, levels)
        assert codes.index(code, levels) == place
        np.testing.assert_allclose(codes.from_digits(code, levels), value, atol=1e-6)


@pytest.mark.parametrize("levels", LEVELS)
def test_every_code_survives_the_round_trip(levels):
    for digits in np.ndindex(*levels):
        code = "".join(map(str, digits))
        assert codes.to_digits(codes.from_digits(code, levels), levels) == code


def test_values_between_levels_go_to_the_nearest_and_outside_to_the_last():
    assert codes.to_digits([-0.8, 0.2, 7.0], [4, 4, 4]) == "023"


@pytest.mark.parametrize("code", ["44", "4444", "4a4", "٣00", "040"])
def test_what_is_no_code_is_refused(code):
    with pytest.raises(ValueError):
        codes.from_digits(code, [4, 4, 4])
