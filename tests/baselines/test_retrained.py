import torch

import digits
from digits import FORGET, train
from wfilter import baselines


def test_a_retrained_model_never_saw_the_class():
    seen = []

    def factory():
        torch.manual_seed(5)
        return digits.cnn()

    class Spy(list):
        def __iter__(self):
            seen.append(True)
            return super().__iter__()

    first = baselines.retrained(
        digits.trained_cnn(), FORGET, Spy(train()), factory=factory, epochs=1
    )
    without = [(x[y != FORGET], y[y != FORGET]) for x, y in train()]
    noise = [(torch.randn_like(x[y == FORGET]), y[y == FORGET]) for x, y in train()]
    mixed = [
        (torch.cat([a, c]), torch.cat([b, d]))
        for (a, b), (c, d) in zip(without, noise, strict=True)
    ]
    second = baselines.retrained(digits.trained_cnn(), FORGET, mixed, factory=factory, epochs=1)
    assert seen
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)  # whatever the forgotten images show
