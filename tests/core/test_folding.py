"""A feature row as plain linear layers."""

import pytest
import torch
from torch import Tensor, nn

from helpers import close, random_rows
from wfilter.core.feature_rows import FeatureRows
from wfilter.core.folding import detectors, folded

CLASSES, WIDTH = 4, 6


def make() -> FeatureRows:
    return random_rows(CLASSES, WIDTH)


def head() -> nn.Linear:
    return nn.Linear(WIDTH, CLASSES, dtype=torch.float64).requires_grad_(False)


def features(batch: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(batch, WIDTH, generator=generator, dtype=torch.float64)


def test_detectors_are_1_on_their_class_and_0_on_all_others():
    rows = make()
    weights, offsets = detectors(rows)
    close(rows.means @ weights.T - offsets, torch.eye(CLASSES, dtype=torch.float64))


def test_detectors_have_the_least_variance_of_all_that_are():
    rows = make()
    weights, _ = detectors(rows)
    within = sum(f.T @ f for f in rows.factors) / CLASSES + torch.diag((rows.rests**2).mean(0))
    within.diagonal().add_(0.01 * within.diagonal().mean())
    for c in range(CLASSES):
        constraints = rows.means[c] - rows.means[[k for k in range(CLASSES) if k != c]]
        inverse = torch.linalg.solve(within, constraints.T)
        amounts = torch.linalg.solve(constraints @ inverse, torch.ones(3, dtype=torch.float64))
        close(weights[c], inverse @ amounts)


def test_a_folded_class_is_moved_to_the_nearest_mean_by_a_plain_layer():
    rows, layer = make(), head()
    edit, rest = folded(rows, layer, torch.tensor([True, False, False, False]))
    distances = (rows.means[1:] - rows.means[0]).norm(dim=1)
    close(edit(rows.means[0]), rows.means[1 + int(distances.argmin())])
    close(edit(rows.means[1:]), rows.means[1:])
    close(rest(features())[:, 1:], layer(features())[:, 1:])


def test_a_folded_edit_cannot_be_undone_along_the_direction_of_the_class():
    edit, _ = folded(make(), head(), torch.tensor([True, False, True, False]))
    assert int(torch.linalg.matrix_rank(edit.weight, rtol=1e-9)) == WIDTH - 2


def test_a_folded_head_has_lost_the_weights_of_its_forgotten_classes():
    rows, layer = make(), head()
    _, rest = folded(rows, layer, torch.tensor([True, False, True, False]))
    assert not rest.weight[[0, 2]].any()
    assert set(rest(features(100)).argmax(1).tolist()) <= {1, 3}


def test_more_classes_than_features_fold_to_a_head_that_answers_as_the_rows_do():
    rows, layer = random_rows(8, 4), nn.Linear(4, 8, dtype=torch.float64)
    h = torch.randn(100, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    forget = torch.arange(8) < 2
    alone = folded(rows, layer, forget)
    assert type(alone) is nn.Linear
    assert not alone.weight[:2].any()
    assert torch.equal(alone(h).argmax(1), layer(h).masked_fill(forget, -torch.inf).argmax(1))


def test_a_set_of_all_classes_cannot_be_folded():
    with pytest.raises(ValueError, match="no class to move features to"):
        folded(make(), head(), torch.ones(CLASSES, dtype=torch.bool))
