"""What moves the alphas."""

import torch
from torch import nn

from wfilter.untraining.optimiser import RowAdam


def test_row_adam_treats_sparse_and_dense_gradients_of_touched_rows_alike():
    torch.manual_seed(0)
    dense, sparse = (nn.Parameter(torch.zeros(5, 3)) for _ in range(2))
    rows = torch.tensor([1, 4])
    values = torch.randn(2, 3)
    optimisers = RowAdam([dense], 0.1), RowAdam([sparse], 0.1)
    for _ in range(3):
        dense.grad = torch.zeros(5, 3).index_copy(0, rows, values)
        sparse.grad = torch.sparse_coo_tensor(rows[None], values, (5, 3), check_invariants=True)
        for optimiser in optimisers:
            optimiser.step()
    torch.testing.assert_close(dense, sparse)
    assert (sparse[[0, 2, 3]] == 0).all()
