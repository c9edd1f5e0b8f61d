"""The whole model gives a token the same bits whatever else a step computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from quire.kernels.activation import ACTIVATIONS
from quire.kernels.matmul import row_linear
from tests.closing_words import say
from tests.long import all_but_long
from tests.models.conftest import SavedModel
from tests.models.harness import PagedRunner, chunked_logits, load, random_prompts

SavedModels = Callable[[str], SavedModel]
MODELS = ["gpt2-variant", "opt-350m", "llama", "mistral", "qwen3-window"]


@pytest.mark.usefixtures("fixed_order")
@pytest.mark.parametrize(
    ("name", "dtype"),
    all_but_long(
        [(name, "float32") for name in MODELS] + [("opt-350m", "bfloat16"), ("llama", "bfloat16")],
        [("gpt2-variant", "float32"), ("qwen3-window", "float32"), ("llama", "bfloat16")],
    ),
)
def test_same_bits_whatever_the_chunks_and_the_block_size(name: str, dtype: str, saved_model: SavedModels) -> None:
    _, model = load(saved_model(name).directory, dtype=dtype)
    prompts = random_prompts([70], 97)
    (expected,) = chunked_logits(PagedRunner(model), prompts, chunk=70)
    for chunk, block_size in ((1, 16), (7, 8), (64, 32)):
        (logits,) = chunked_logits(PagedRunner(model, block_size=block_size), prompts, chunk)
        assert torch.equal(logits, expected), (chunk, block_size)


@pytest.mark.usefixtures("fixed_order")
@pytest.mark.parametrize("name", all_but_long(MODELS, ["llama", "qwen3-window"]))
def test_same_bits_alone_and_in_a_batch_of_32(name: str, saved_model: SavedModels) -> None:
    _, model = load(saved_model(name).directory)
    prompts = random_prompts([1 + 3 * index for index in range(32)], 97)
    together = chunked_logits(PagedRunner(model, max_rows=32), prompts, chunk=11)
    for index in (0, 1, 15, 31):
        (alone,) = chunked_logits(PagedRunner(model), [prompts[index]], chunk=1000)
        assert torch.equal(together[index], alone)


@pytest.mark.usefixtures("fixed_order")
@pytest.mark.parametrize("name", MODELS)
def test_same_bits_when_only_the_last_rows_are_read(name: str, saved_model: SavedModels) -> None:
    _, model = load(saved_model(name).directory)
    whole, last = PagedRunner(model), PagedRunner(model)
    prompts = random_prompts([40, 1, 17], 97)
    work = [(whole.add(prompt), len(prompt)) for prompt in prompts]
    assert work == [(last.add(prompt), len(prompt)) for prompt in prompts]
    for every, one in zip(whole.step(work), last.step(work, last_only=True), strict=True):
        assert torch.equal(every[-1:], one)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(33, 97), (64, 192), (257, 1000), (576, 64)]
PARTS = [(0, 1), (3, 5), (7, 14), (1, 9), (100, 163), (0, 299)]


def operands(
    dtype: torch.dtype, in_features: int, out_features: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    bias = torch.randn(out_features, generator=generator).to(dtype)
    return torch.randn(300, in_features, generator=generator).to(dtype), weight, bias


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_rows_of_a_product_do_not_depend_on_their_number(
    dtype: torch.dtype, in_features: int, out_features: int, fixed_order: None
) -> None:
    x, weight, bias = operands(dtype, in_features, out_features)
    expected = row_linear(x, weight, bias)
    for first, last in PARTS:
        assert torch.equal(row_linear(x[first:last], weight, bias), expected[first:last])


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_rows_mean_what_torch_means(dtype: torch.dtype) -> None:
    x, weight, bias = operands(dtype, 257, 1000)
    exact = F.linear(x.double(), weight.double(), bias.double())
    eps = torch.finfo(dtype).eps  # sums of 257 products of some 16 in all, rounded before the bias is added
    tolerance = {"rtol": 2 * eps, "atol": max(64 * eps, 5e-4)}
    for first, last in PARTS:
        torch.testing.assert_close(row_linear(x[first:last], weight, bias).double(), exact[first:last], **tolerance)


def test_what_torch_itself_does_on_this_machine_is_said(request: pytest.FixtureRequest) -> None:
    """Its BLAS promises nothing, and is no reason for a test to fail; but a reader may want to know."""
    same = []
    for dtype in DTYPES:
        for shape in SHAPES:
            x, weight, bias = operands(dtype, *shape)
            expected = row_linear(x, weight, bias)
            same += [torch.equal(row_linear(x[a:b], weight, bias), expected[a:b]) for a, b in PARTS]
    for activation in ACTIVATIONS.values():
        values = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 3
        same.append(torch.equal(torch.cat([activation(part) for part in values.split(17)]), activation(values)))
    if not all(same):
        say(request.config, "on this machine torch's own products or functions give a row other bits in another batch")


@pytest.mark.usefixtures("fixed_order")
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_elements_of_an_activation_do_not_depend_on_their_place(name: str) -> None:
    activation = ACTIVATIONS[name]
    x = torch.randn(600, generator=torch.Generator().manual_seed(0)) * 3
    expected = activation(x)
    for size in (1, 3, 17, 33, 100):
        assert torch.equal(torch.cat([activation(part) for part in x.split(size)]), expected)
        assert torch.equal(torch.cat([activation(part.clone()) for part in x.split(size)]), expected)


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("silu", F.silu),
        ("gelu", F.gelu),
        ("gelu_new", lambda x: F.gelu(x, approximate="tanh")),
        ("quick_gelu", lambda x: x * torch.sigmoid(1.702 * x)),
    ],
)
def test_activations_mean_what_torch_means(name: str, reference: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.cat((torch.linspace(-12, 12, 1001), torch.tensor([-200.0, 200.0])))
    torch.testing.assert_close(ACTIVATIONS[name](x), reference(x), rtol=2e-6, atol=1e-6)
