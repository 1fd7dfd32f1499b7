"""Feature rows on a plain pair of features and head."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers import close
from wfilter.core.feature_rows import FeatureRows

CLASSES, WIDTH = 4, 6


def make(seed: int = 0, *, shifts: bool = True, detectors: bool = True) -> FeatureRows:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    spreads = draw(CLASSES, WIDTH).abs() + 0.1
    moved = draw(CLASSES, CLASSES, WIDTH) * (1 - torch.eye(CLASSES).unsqueeze(-1))
    return FeatureRows(
        draw(CLASSES, WIDTH),
        spreads,
        moved if shifts else None,
        draw(CLASSES, WIDTH) if detectors else None,
        draw(CLASSES) if detectors else None,
    )


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

    def origin(c: int) -> Tensor:
        return rows.means[c] + (0 if rows.shifts is None or c == j else rows.shifts[c, j])

    if k in forgotten:
        h = rows.means[j] + rows.spreads[j] / rows.spreads[k] * (h - origin(k))
    if rows.detectors is None or rows.offsets is None:
        return h
    found = {c: rows.detectors[c] @ h - rows.offsets[c] for c in forgotten}
    for c in forgotten:
        h = h + found[c] * (rows.means[j] - origin(c))
    return h


def sets_of(seed: int, batch: int = 9) -> Tensor:
    sets = torch.rand(batch, CLASSES, generator=torch.Generator().manual_seed(seed)) < 0.4
    sets[:, 3] = False  # a class always remains
    return sets


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 99), st.booleans(), st.booleans())
def test_a_mixed_batch_of_sets_equals_the_formula_one_sample_at_a_time(seed, shifts, detectors):
    rows, layer, h = make(seed, shifts=shifts, detectors=detectors), head(), features()
    sets = sets_of(seed)
    wanted = [set(row.nonzero().flatten().tolist()) for row in sets]
    expected = torch.stack([by_hand(rows, x, s, layer) for x, s in zip(h, wanted)])
    close(rows.edited(h, sets, layer(h)), expected)


def test_a_sample_that_forgets_nothing_keeps_features_and_logits_bit_for_bit():
    rows, layer, h = make(), head(), features()
    nothing = torch.zeros(len(h), CLASSES, dtype=torch.bool)
    assert torch.equal(rows.edited(h, nothing, layer(h)), h)
    assert torch.equal(rows(h, nothing, layer)[1], layer(h))


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


def test_a_folded_class_is_moved_to_the_nearest_mean_by_a_plain_layer():
    rows, layer = make(shifts=False), head()
    edit, rest = rows.folded(layer, torch.tensor([True, False, False, False]))
    h = features()
    distances = (rows.means[1:] - rows.means[0]).norm(dim=1)
    move = rows.means[1 + int(distances.argmin())] - rows.means[0]
    found = h @ rows.detectors[0] - rows.offsets[0]
    close(edit(h), h + found.unsqueeze(1) * move)
    close(rest(h)[:, 1:], layer(h)[:, 1:])


def test_a_folded_head_has_lost_the_weights_of_its_forgotten_classes():
    rows, layer = make(), head()
    _, rest = rows.folded(layer, torch.tensor([True, False, True, False]))
    assert not rest.weight[[0, 2]].any()
    assert set(rest(features(100)).argmax(1).tolist()) <= {1, 3}


def test_rows_without_detectors_fold_to_a_head_that_answers_as_they_do_without_the_class():
    rows, layer, h = make(detectors=False), head(), features(100)
    forget = torch.tensor([True, False, True, False])
    alone = rows.folded(layer, forget)
    assert type(alone) is torch.nn.Linear
    assert not alone.weight[[0, 2]].any()
    wanted = layer(h).masked_fill(forget, -torch.inf).argmax(1)
    assert torch.equal(alone(h).argmax(1), wanted)


def test_a_set_of_all_classes_cannot_be_folded():
    with pytest.raises(ValueError, match="no class to move features to"):
        make().folded(head(), torch.ones(CLASSES, dtype=torch.bool))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"means": torch.ones(1, 6)}, "two classes"),
        ({"means": torch.ones(4)}, "two classes"),
        ({"spreads": torch.zeros(4, 6)}, "positive"),
        ({"spreads": torch.ones(4, 5)}, r"spreads has shape \(4, 5\); expected \(4, 6\)"),
        ({"shifts": torch.full((4, 4, 6), torch.nan)}, "shifts contains NaN"),
        ({"offsets": torch.ones(4)}, "detectors and offsets go together"),
    ],
)
def test_rows_that_would_be_silently_wrong_are_refused(change, message):
    good = {"means": torch.randn(4, 6), "spreads": torch.ones(4, 6)}
    with pytest.raises(ValueError, match=message):
        FeatureRows(**{**good, **change})
