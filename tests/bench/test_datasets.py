from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from quire.bench.datasets import LengthRange, PromptSpec, RandomPrompts, as_messages, as_text, read_dataset
from quire.errors import UserError


def make(**fields: int) -> RandomPrompts:
    return RandomPrompts(
        num_prompts=50,
        input_len=LengthRange(3, 9),
        output_len=LengthRange(2, 4),
        token_ids=LengthRange(10, 12),
        prefix_len=fields.get("prefix_len", 0),
    )


def test_random_prompts_keep_to_their_ranges() -> None:
    prompts = make().draw(random.Random(1))
    assert len(prompts) == 50
    assert {len(prompt.token_ids or ()) for prompt in prompts} == set(range(3, 10))
    assert {prompt.max_tokens for prompt in prompts} == {2, 3, 4}
    assert {token for prompt in prompts for token in prompt.token_ids or ()} == {10, 11, 12}


def test_the_seed_decides_everything() -> None:
    assert make().draw(random.Random(1)) == make().draw(random.Random(1))
    assert make().draw(random.Random(1)) != make().draw(random.Random(2))


def test_a_prefix_is_shared_and_comes_on_top() -> None:
    prompts = [prompt.token_ids or () for prompt in make(prefix_len=20).draw(random.Random(1))]
    assert {prompt[:20] for prompt in prompts} == {prompts[0][:20]}
    assert {len(prompt) for prompt in prompts} == set(range(23, 30))


def test_words_stand_for_tokens() -> None:
    prompts = make(prefix_len=20).draw(random.Random(1))
    texts = [as_text(prompt).text or "" for prompt in prompts]
    assert [len(text.split()) for text in texts] == [len(prompt.token_ids or ()) for prompt in prompts]
    assert len({tuple(text.split()[:20]) for text in texts}) == 1
    message = as_messages(prompts[0])
    assert message.messages == ({"role": "user", "content": texts[0]},)
    assert message.max_tokens == prompts[0].max_tokens
    assert as_text(message) is message


@pytest.mark.parametrize("text", ["128", "64:512"])
def test_length_range(text: str) -> None:
    lengths = LengthRange.parse(text, "--input-len")
    assert lengths == (LengthRange(128, 128) if text == "128" else LengthRange(64, 512))


@pytest.mark.parametrize("text", ["", "0", "x", "5:4", "1:2:3", "-3", "4:"])
def test_bad_length_range(text: str) -> None:
    with pytest.raises(UserError, match="--input-len"):
        LengthRange.parse(text, "--input-len")


def test_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "hé"}\n\n{"prompt_token_ids": [1, 2], "max_tokens": 7}\n{"messages": [{"role": "user"}]}\n'
    )
    assert read_dataset(file, workload=None, default_max_tokens=9) == [
        PromptSpec(max_tokens=9, text="hé"),
        PromptSpec(max_tokens=7, token_ids=(1, 2)),
        PromptSpec(max_tokens=9, messages=({"role": "user"},)),
    ]


def test_workloads_by_name(tmp_path: Path) -> None:
    file = tmp_path / "workloads.json"
    one = [{"prompt_token_ids": [1], "max_tokens": 2}]
    file.write_text(json.dumps({"batch": one}))
    expected = [PromptSpec(max_tokens=2, token_ids=(1,))]
    assert read_dataset(file, workload=None, default_max_tokens=9) == expected
    file.write_text(json.dumps({"batch": one, "single": []}))
    assert read_dataset(file, workload="batch", default_max_tokens=9) == expected
    with pytest.raises(UserError, match="--workload"):
        read_dataset(file, workload=None, default_max_tokens=9)
    with pytest.raises(UserError, match="did you mean 'batch'"):
        read_dataset(file, workload="bacth", default_max_tokens=9)
    with pytest.raises(UserError, match="no prompts"):
        read_dataset(file, workload="single", default_max_tokens=9)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "not valid JSON"),
        ("[1]", "expected an object"),
        ('[{"max_tokens": 3}]', "expected one of"),
        ('[{"prompt": "a", "prompt_token_ids": [1]}]', "expected one of"),
        ('[{"prompt": 5}]', "wrong type"),
        ('[{"prompt_token_ids": [true]}]', "wrong type"),
        ('[{"prompt": "a", "max_tokens": 0}]', "positive integer"),
        ('{"a": 3}', "expected a list"),
        ("[]", "no prompts"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "prompts.json"
    file.write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        read_dataset(file, workload=None, default_max_tokens=9)
    assert "prompts.json" in str(caught.value)


def test_missing_file_and_binary_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        read_dataset(tmp_path / "none.json", workload=None, default_max_tokens=9)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot read"):
        read_dataset(tmp_path / "binary.json", workload=None, default_max_tokens=9)


def test_a_workload_needs_a_file_with_names(tmp_path: Path) -> None:
    for name in ("prompts.jsonl", "prompts.json"):
        file = tmp_path / name
        file.write_text('[{"prompt": "a"}]' if name.endswith("json") else '{"prompt": "a"}')
        with pytest.raises(UserError, match="workload"):
            read_dataset(file, workload="batch", default_max_tokens=9)
