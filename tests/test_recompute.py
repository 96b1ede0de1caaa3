"""A part that is computed twice leaves what one forward pass leaves."""

import copy

import pytest
import torch
from torch import nn

from nbtools.train import again


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_and_gradients_are_those_of_one_pass(training):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU()).train(training)
    twice = copy.deepcopy(plain)
    x = torch.randn(4, 2, 5, 5, requires_grad=True)
    plain(x).square().sum().backward()
    once = [x.grad, *(p.grad for p in plain.parameters()), *plain.buffers()]
    x.grad = None
    again(twice, x).square().sum().backward()
    later = [x.grad, *(p.grad for p in twice.parameters()), *twice.buffers()]
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(once, later, strict=True))
