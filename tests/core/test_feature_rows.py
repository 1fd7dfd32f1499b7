"""Feature rows on a plain pair of features and head."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers import close, random_rows
from wfilter.core.feature_rows import FeatureRows

CLASSES, WIDTH = 4, 6


def make(seed: int = 0, *, shared: bool = False) -> FeatureRows:
    return random_rows(CLASSES, WIDTH, seed=seed, shared=shared)


def head() -> nn.Linear:
    return nn.Linear(WIDTH, CLASSES, dtype=torch.float64).requires_grad_(False)


def features(batch: int = 9, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, WIDTH, generator=generator, dtype=torch.float64)


def by_hand(rows: FeatureRows, h: Tensor, forgotten: set[int], layer: nn.Linear) -> Tensor:
    """The formula of the class, one sample at a time and in loops."""
    logits = layer(h).tolist()
    k = max(range(CLASSES), key=lambda c: logits[c])
    j = max((c for c in range(CLASSES) if c not in forgotten), key=lambda c: logits[c])
    if k not in forgotten:
        return h
    waves = [math.cos(float(phase @ h)) for phase in rows.phases]
    noise = sum(wave * mixed for wave, mixed in zip(waves, rows.mixing))
    own = rows.factors[0 if len(rows.factors) == 1 else j]
    drawn = rows.means[j] + rows.rests[j] * noise[rows.rank :]
    for amount, factor in zip(noise[: rows.rank], own):
        drawn = drawn + amount * factor
    return drawn


def sets_of(seed: int, batch: int = 9) -> Tensor:
    sets = torch.rand(batch, CLASSES, generator=torch.Generator().manual_seed(seed)) < 0.4
    sets[:, 3] = False  # a class always remains
    return sets


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 99), st.booleans())
def test_a_mixed_batch_of_sets_equals_the_formula_one_sample_at_a_time(seed, shared):
    rows, layer, h = make(seed, shared=shared), head(), features()
    sets = sets_of(seed)
    wanted = [set(row.nonzero().flatten().tolist()) for row in sets]
    expected = torch.stack([by_hand(rows, x, s, layer) for x, s in zip(h, wanted)])
    close(rows.edited(h, sets, layer(h)), expected)


def test_a_sample_that_forgets_nothing_keeps_features_and_logits_bit_for_bit():
    rows, layer, h = make(), head(), features()
    nothing = torch.zeros(len(h), CLASSES, dtype=torch.bool)
    assert torch.equal(rows.edited(h, nothing, layer(h)), h)
    assert torch.equal(rows(h, nothing, layer)[1], layer(h))


def test_logits_of_draws_are_as_sure_as_their_class_says():
    rows, layer, h = make(), head(), features()
    sets = sets_of(1)
    edited, logits = rows(h, sets, layer)
    drawn = (edited != h).any(1)
    assert 0 < int(drawn.sum()) < len(h)
    routes = layer(h).masked_fill(sets, -torch.inf).argmax(1)
    for plain, kept, told, moved, route in zip(layer(edited), ~sets, logits, drawn, routes):
        factor = rows.sureness[route] if moved else 1.0
        close(told[kept], factor * plain[kept])


def test_one_set_for_all_equals_the_same_set_for_each_sample():
    rows, layer, h = make(), head(), features()
    one = torch.tensor([True, False, True, False])
    close(rows(h, one, layer)[1], rows(h, one.expand(len(h), -1), layer)[1])


def test_a_forgotten_class_is_never_the_answer_and_has_no_chance():
    rows, layer, h = make(), head(), features(200)
    sets = sets_of(3, 200)
    _, logits = rows(h, sets, layer)
    assert not bool(sets[torch.arange(200), logits.argmax(1)].any())
    assert float(logits.float().softmax(1)[sets].max()) < 1e-30
    assert bool(logits.isfinite().all())


def test_rows_follow_the_dtype_of_the_features():
    rows, layer, h = make(), head(), features()
    low = rows.edited(h.bfloat16(), sets_of(1), layer(h).bfloat16())
    assert low.dtype == torch.bfloat16


def test_gradients_reach_the_features():
    rows, layer, h = make(), head(), features().requires_grad_()
    rows(h, sets_of(1), layer)[1].logsumexp(1).sum().backward()
    assert h.grad is not None
    assert bool(h.grad.isfinite().all())


def test_features_that_are_not_forgotten_stay_bit_for_bit():
    rows, layer, h = make(), head(), features(200)
    forget = torch.tensor([True, False, False, False])
    kept = layer(h).argmax(1) != 0
    edited = rows.edited(h, forget, layer(h))
    assert torch.equal(edited[kept], h[kept])
    assert not bool((edited[~kept] == h[~kept]).all(1).any())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"means": torch.ones(1, 6)}, "two classes"),
        ({"means": torch.ones(4)}, "two classes"),
        ({"rests": -torch.ones(4, 6)}, "rests must not be negative"),
        ({"rests": torch.ones(4, 5)}, r"rests has shape \(4, 5\); expected \(4, 6\)"),
        ({"factors": torch.ones(3, 2, 6)}, r"factors has shape \(3, 2, 6\); expected \(4, 2, 6\)"),
        ({"factors": torch.ones(4, 6)}, "factors has shape"),
        ({"mixing": torch.ones(5, 6)}, r"mixing has shape \(5, 6\); expected \(5, 8\)"),
        ({"phases": torch.full((5, 6), torch.nan)}, "phases contains NaN"),
    ],
)
def test_rows_that_would_be_silently_wrong_are_refused(change, message):
    good = {"means": torch.randn(4, 6), "factors": torch.ones(4, 2, 6), "rests": torch.ones(4, 6)}
    good |= {"phases": torch.ones(5, 6), "mixing": torch.ones(5, 8)}
    with pytest.raises(ValueError, match=message):
        FeatureRows(**{**good, **change})
