"""The z-loss and the softcap of logits, compared with plain autograd on float32 logits."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from models.cache import KeyValueCache
from models.decoder import Decoder
from models.loss import EAGER, IGNORED, Kernels, SummedLoss, cross_entropy_sum
from models.sizes import SIZES
from parallel.kernels import compiled_loss_kernels
from parallel.passes import backward

TERMS = {"z-loss": (0.0, 0.1), "softcap": (3.0, 0.0), "both": (3.0, 0.1)}
"""softcap and z_loss, large enough to matter."""
SCALES = torch.tensor([0.3, 0.7])
"""Of cross-entropy and z-loss: they may be scaled by themselves."""
TINY = replace(SIZES["smollm3_debug"], layers=1, vocabulary=112, init_std=0.5)


@pytest.fixture(autouse=True)
def _compiled_anew() -> None:
    """So many kinds of one function are compiled here that torch would refuse the next."""
    torch._dynamo.reset()


def batch() -> tuple[Tensor, Tensor]:
    """Logits (3, 13, 112) and targets, some of them ignored."""
    generator = torch.Generator().manual_seed(2)
    targets = torch.randint(0, 112, (3, 13), generator=generator)
    targets[0] = targets[2, 4] = IGNORED
    return 3 * torch.randn(3, 13, 112, generator=generator), targets


def plain(logits: Tensor, targets: Tensor, softcap: float, z_loss: float) -> Tensor:
    """Cross-entropy and z-loss (2,), by definition, in float32."""
    values = logits.to(torch.float32)
    if softcap:
        values = softcap * torch.tanh(values / softcap)
    loss = cross_entropy(values.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    log_z = values.exp().sum(-1).log()[targets != IGNORED]
    return torch.stack([loss, z_loss * (log_z**2).sum()])


def scaled(losses: Tensor) -> Tensor:
    return (losses * SCALES).sum() if losses.dim() else losses * SCALES[0]


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return compiled_loss_kernels() if request.param == "compiled" else EAGER


both = pytest.mark.parametrize("kernels", ["eager", "compiled"], indirect=True)


@pytest.mark.slow
@both
@pytest.mark.parametrize("terms", TERMS)
def test_both_terms_and_their_gradient_are_those_of_the_definition(terms: str, kernels: Kernels) -> None:
    softcap, z_loss = TERMS[terms]
    for dtype, chunks in product((torch.float32, torch.bfloat16), (1, 3, 39)):
        logits, targets = batch()
        ours, theirs = (logits.to(dtype).requires_grad_() for _ in range(2))
        options = {"chunks": chunks, "kernels": kernels, "softcap": softcap, "z_loss": z_loss}
        found, expected = cross_entropy_sum(ours * 1, targets, **options), plain(theirs, targets, softcap, z_loss)
        torch.testing.assert_close(found, expected if z_loss else expected[0], rtol=1e-6, atol=0)
        scaled(found).backward()
        scaled(expected).backward()
        limits = {"rtol": 2e-5, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-7}
        torch.testing.assert_close(ours.grad, theirs.grad, **limits)
        assert not ours.grad[0].any()  # ignored targets


def test_capped_logits_of_any_size_have_finite_losses_and_gradients() -> None:
    logits = torch.tensor([[[1e30, -1e30, 0.0]]], requires_grad=True)
    losses = cross_entropy_sum(logits * 1, torch.tensor([[1]]), softcap=30.0, z_loss=1e-4)
    losses.sum().backward()
    assert losses[0].item() == pytest.approx(60) and logits.grad.isfinite().all()


def test_a_logit_that_is_nan_makes_both_terms_and_every_gradient_nan() -> None:
    logits, targets = batch()
    logits[1, 2, 3] = torch.nan
    logits.requires_grad_()
    losses = cross_entropy_sum(logits * 1, targets, chunks=3, softcap=3.0, z_loss=0.1)
    backward(losses.sum())
    assert losses.isnan().all() and logits.grad.isnan().all()


def test_a_loss_without_gradients_has_no_z_loss() -> None:
    logits, targets = batch()
    trained = SummedLoss(1, z_loss=0.1)(logits, targets)
    with torch.no_grad():
        validated = SummedLoss(1, z_loss=0.1)(logits, targets)
    assert trained.shape == (2,) and validated == cross_entropy_sum(logits, targets)
    torch.testing.assert_close(validated, trained[0])


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@torch.no_grad()
def test_a_model_with_a_softcap_returns_capped_logits_and_their_loss(tied: bool) -> None:
    torch.manual_seed(0)
    model = Decoder(replace(TINY, tied_embeddings=tied))
    for name, parameter in model.named_parameters():
        model.init_parameter(name, parameter, torch.Generator().manual_seed(1))
    model_with_cap = Decoder(replace(TINY, tied_embeddings=tied, logit_softcap=2.0))
    model_with_cap.load_state_dict(model.state_dict())
    tokens = torch.randint(0, 112, (2, 9))
    logits = 2 * torch.tanh(model(tokens[:, :-1]) / 2)
    assert logits.abs().max() > 1.5
    torch.testing.assert_close(model_with_cap(tokens[:, :-1]), logits)
    torch.testing.assert_close(model_with_cap(tokens[:, :-1], tokens[:, 1:]), cross_entropy_sum(logits, tokens[:, 1:]))
    cache = KeyValueCache(TINY, batch=2, max_length=8, dtype=torch.float32, device=torch.device("cpu"))
    torch.testing.assert_close(model_with_cap(tokens[:, :-1], cache=cache), logits)


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("chunks", [1, 4])
def test_the_losses_of_rows_are_noted_and_change_nothing(chunks: int, softcap: float, z_loss: float) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 5, 11, generator=generator)
    targets = torch.randint(0, 11, (3, 5), generator=generator)
    targets[0] = targets[1, 2] = IGNORED
    options = {"chunks": chunks, "softcap": softcap, "z_loss": z_loss}
    gradients, losses, rows = [], [], torch.full((2, 3), 9.0)
    for noted in (None, rows):
        mine = logits.clone().requires_grad_()
        losses.append(cross_entropy_sum(mine * 1, targets, rows=noted, **options))
        losses[-1].sum().backward()
        gradients.append(mine.grad)
    assert torch.equal(*losses) and torch.equal(*gradients)
    expected = [cross_entropy_sum(logits[[row]], targets[[row]], softcap=softcap) for row in range(3)]
    torch.testing.assert_close(rows[0], torch.stack(expected))
    assert rows[1].tolist() == [0, 4, 5]


def test_the_loss_at_once_is_torchs_own_to_the_bit() -> None:
    logits = torch.randn(2, 7, 13, requires_grad=True)
    targets = torch.tensor([[1, IGNORED, 3, 4, 5, 6, 12], [IGNORED] * 7])
    ours, theirs = (
        cross_entropy_sum(logits, targets),
        cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"),
    )
    assert torch.equal(ours, theirs)
    assert torch.equal(*(torch.autograd.grad(one, logits)[0] for one in (ours, theirs)))
