"""The constraint service: its masks are those of a matcher in this process, and it refuses, cancels, forgets."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer

from quire.decoding.masks import ConstraintSpec
from quire.errors import UserError
from quire.structured_output import mask_client, rehearsal, remote_matcher
from quire.structured_output import service as service_module
from quire.structured_output.messages import RehearsalLimits
from quire.structured_output.remote_matcher import GOES_ON, RemoteMatcher
from quire.structured_output.service import FORK_SERVER, ConstraintService
from quire.structured_output.vocabulary import make_vocabulary
from quire.tokenization.tokenizer import Tokenizer, load_tokenizer
from tests.structured_output.schemas import random_document
from tests.structured_output.services import (
    ENDS,
    VOCAB_SIZE,
    advance,
    begin,
    make_service,
    settle,
    start,
    text_of,
    wait_until,
)
from tests.structured_output.twin import Twin, follow_all, tokens_of

SLOW_SCHEMA = {"type": "integer", "multipleOf": 2147483648}


@pytest.fixture(scope="module")
def service() -> Iterator[ConstraintService]:
    service = make_service()
    yield service
    service.close()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("bundled")


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    return make_vocabulary(tokenizer, VOCAB_SIZE, ENDS)


def same(matcher: RemoteMatcher, twin: Twin) -> None:
    assert (matcher.is_finished, matcher.ends_in_text) == (twin.is_finished, twin.ends_in_text)
    if not twin.is_finished:
        assert tokens_of(matcher.mask()) == twin.allowed()


@pytest.fixture(scope="module", params=[FORK_SERVER, "tests.structured_output.slow_server"], ids=["quick", "slow"])
def either(request: pytest.FixtureRequest) -> Iterator[ConstraintService]:
    """A service whose sequences are all quick, and one whose are all slow."""
    service = make_service(module=request.param)
    yield service
    service.close()


SPECS = (ConstraintSpec(), ConstraintSpec(ignore_eos=True), ConstraintSpec(start_after=[7, 8]))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**20), num_sequences=st.integers(1, 5))
def test_masks_are_those_of_a_matcher_in_this_process(
    either: ConstraintService, vocabulary: LLTokenizer, seed: int, num_sequences: int
) -> None:
    """Random schemas and tokens, several sequences a message, copies, tokens that are not allowed."""
    rng, service = random.Random(seed), either
    text, spec = text_of(json=random_document(seed)), rng.choice(SPECS)
    try:
        matchers = [begin(service, text, spec) for _ in range(num_sequences)]
        settle(service, *matchers)
        if matchers[0].error is not None:
            return
    except UserError:
        return  # no text matches it, and that is known by now
    twins = [Twin(vocabulary, text, VOCAB_SIZE, spec) for _ in matchers]
    for _ in range(12):
        chosen = [number for number, twin in enumerate(twins) if not twin.is_finished and rng.random() < 0.8]
        for number in chosen:
            allowed = sorted(twins[number].allowed() or (7, 8, 9))
            token_ids = [rng.choice(allowed)]
            if rng.random() < 0.2:
                token_ids += [rng.randrange(VOCAB_SIZE)]
            matchers[number].advance(token_ids, 0)
            num_followed = follow_all(twins[number], token_ids)
            settle(service, matchers[number])
            assert matchers[number].num_accepted == num_followed
            if num_followed < len(token_ids):
                return
            same(matchers[number], twins[number])
        if chosen and rng.random() < 0.3:
            copy = matchers[chosen[0]].copy()
            same(copy, twins[chosen[0]])
            matchers[chosen[0]] = copy


CONSTANT: dict[str, object] = {
    "type": "object",
    "properties": {"a": {"const": "first of all, " * 40}, "b": {"type": "integer"}},
}
CONSTANT |= {"required": ["a", "b"], "additionalProperties": False}


def test_certain_tokens_are_the_same_taken_and_sampled(
    either: ConstraintService, vocabulary: LLTokenizer, tokenizer: Tokenizer
) -> None:
    service = either
    text = text_of(json=CONSTANT, disable_any_whitespace=True)
    begun = tokenizer.encode('{"', add_special_tokens=False)
    taken, halved, sampled = [start(service, text) for _ in range(3)]
    twin = Twin(vocabulary, text, VOCAB_SIZE, ConstraintSpec())
    assert follow_all(twin, begun) == len(begun)
    advance(service, taken, *begun, num_forced=10_000)
    forced = list(taken.forced)
    assert len(forced) > 100
    advance(service, halved, *begun, num_forced=len(forced) // 2)
    assert list(halved.forced) == forced[: len(forced) // 2]
    for matcher, rest in ((sampled, forced), (halved, forced[len(forced) // 2 :])):
        if matcher is sampled:
            advance(service, sampled, *begun)
        for token_id in rest:
            assert tokens_of(matcher.mask()) == {token_id}
            advance(service, matcher, token_id)
            assert not matcher.forced
    for token_id in forced:
        assert twin.certain[0] == token_id
        assert twin.follow(token_id)
    assert tokens_of(taken.mask()) == tokens_of(sampled.mask()) == tokens_of(halved.mask()) == twin.allowed()


def test_a_certain_token_that_is_not_allowed_is_not_taken(service: ConstraintService, tokenizer: Tokenizer) -> None:
    [a] = tokenizer.encode("a", add_special_tokens=False)
    matcher = start(service, text_of(regex="a(bcdefgh)"), ConstraintSpec(allowed_token_ids=[a]))
    advance(service, matcher, a, num_forced=50)
    assert not matcher.forced
    with pytest.raises(UserError, match="allowed_token_ids") as caught:
        matcher.mask()
    assert caught.value.param == "allowed_token_ids"


def test_a_text_with_an_end(service: ConstraintService, tokenizer: Tokenizer) -> None:
    [a] = tokenizer.encode("a", add_special_tokens=False)
    plain, closed = start(service, text_of(regex="a{1,3}")), start(service, text_of(choice=["a"]))
    advance(service, plain, a)
    advance(service, plain, ENDS[1])
    assert (plain.is_finished, plain.ends_in_text) == (True, False)
    advance(service, closed, a)
    assert (closed.is_finished, closed.ends_in_text) == (True, True)
    advance(service, closed, a)
    assert closed.num_accepted == 0


def test_it_begins_behind_its_mark(service: ConstraintService) -> None:
    matcher = start(service, text_of(regex="a"), ConstraintSpec(start_after=[7, 7, 8]))
    for token_id in (7, 7, 7, 9, 7, 7):
        advance(service, matcher, token_id)
        assert matcher.mask() is None
    other = matcher.copy()
    advance(service, other, 9)
    assert other.mask() is None
    advance(service, matcher, 8)
    assert matcher.mask() is not None
    advance(service, matcher, 7)
    assert matcher.num_accepted == 0


def test_a_matcher_goes_on_from_tokens_that_another_engine_generated(
    service: ConstraintService, tokenizer: Tokenizer
) -> None:
    text, tokens = text_of(regex="[a-z]{30}"), tokenizer.encode("abcdefghijkl", add_special_tokens=False)
    whole = start(service, text)
    advance(service, whole, *tokens)
    resumed = service.constraint(text).matcher(ConstraintSpec(), tokens)
    settle(service, resumed)
    assert resumed.mask() == whole.mask()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"grammar": 'start: %json {"const": -9223372036854775808}'}, "too deeply"),
        ({"grammar": 'start: %json {"enum": [1, -9223372036854775808]}'}, "too deeply"),
        ({"grammar": 'start: %json {"type": "nothing"}'}, "Invalid type"),
        ({"grammar": 'start: %json {"enum": []}'}, "nsatisfiable"),
        ({"regex": "["}, "invalid"),
        ({"grammar": "start: missing"}, "unknown name"),
        ({"grammar": "start: <|nothing|>"}, "unknown special token"),
    ],
)
def test_a_bad_constraint_is_refused_and_others_live(
    service: ConstraintService, fields: dict[str, object], reason: str
) -> None:
    good = start(service, text_of(choice=["yes", "no"]))
    bad = start(service, text_of(**fields))
    assert bad.error is not None
    assert reason in bad.error.message
    assert bad.error.param == "structured_outputs"
    assert "\n" not in bad.error.message
    with pytest.raises(UserError, match=r"cannot be followed"):
        service.constraint(text_of(**fields))
    with pytest.raises(UserError, match=r"cannot be followed"):
        bad.mask()
    assert good.mask() == start(service, text_of(choice=["yes", "no"])).mask()


def chain(length: int) -> dict[str, object]:
    """A schema that refers to itself, link by link."""
    links = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": links | {f"d{length}": {"type": "integer"}}}


def nested(depth: int) -> str:
    """Rules that contain one another."""
    return "\n".join(["start: r0", *(f'r{number}: "[" r{number + 1} "]"' for number in range(depth)), f'r{depth}: "x"'])


@pytest.mark.parametrize(
    "fields", [{"json": chain(2000)}, {"grammar": nested(2000)}, {"regex": "(" * 200 + "a" + ")" * 200}]
)
def test_deep_constraints_end_no_process(service: ConstraintService, fields: dict[str, object]) -> None:
    """They compile, or are refused."""
    matcher = start(service, text_of(**fields))
    if matcher.error is None:
        assert matcher.mask() is not None
    assert start(service, text_of(choice=["yes"])).error is None


def test_a_slow_constraint_is_refused_and_that_is_remembered() -> None:
    service = make_service(RehearsalLimits(cpu_seconds=(0.01, 0.05), seconds=120.0))
    slow = start(service, text_of(json=SLOW_SCHEMA))
    assert slow.error is not None
    assert "takes longer than 0.05 s of processor time" in slow.error.message
    with pytest.raises(UserError, match="takes longer than"):
        service.constraint(text_of(json=SLOW_SCHEMA))
    service.close()


def test_a_constraint_that_waits_too_long_may_be_tried_again() -> None:
    service = make_service(RehearsalLimits(cpu_seconds=(600.0,), seconds=0.2))
    slow = start(service, text_of(json=SLOW_SCHEMA))
    assert slow.error is not None
    assert "takes longer than 0.2 s" in slow.error.message
    assert service.constraint(text_of(json=SLOW_SCHEMA)) is not None
    service.close()


@pytest.mark.long
def test_a_constraint_takes_limited_memory() -> None:
    service = make_service(RehearsalLimits(cpu_seconds=(60.0,), seconds=120.0, memory=2**25))
    large = start(service, text_of(json={"type": "integer", "multipleOf": 400009}))
    assert large.error is not None
    assert "32.0 MiB of memory" in large.error.message
    assert start(service, text_of(choice=["yes"])).error is None
    service.close()


def test_a_rehearsal_ends_with_the_last_request_that_wants_it() -> None:
    """Else the second slow text would wait for the end of the first, which does not come."""
    service = make_service(RehearsalLimits(cpu_seconds=(0.01, 6000.0), seconds=6000.0))
    text = text_of(json=SLOW_SCHEMA)
    first, second = begin(service, text), begin(service, text)
    other = begin(service, text_of(json={"type": "integer", "multipleOf": 20011}))
    del first
    service.flush()
    assert not second.is_ready
    del second
    settle(service, other)
    assert other.error is None
    assert not service._jobs
    service.close()


def test_what_became_of_a_text_is_known(service: ConstraintService) -> None:
    text = text_of(json={"type": "object", "properties": {"once": {"type": "null"}}})
    start(service, text)
    number = next(service._numbers)
    start(service, text)
    assert next(service._numbers) == number + 1


def test_what_was_seen_behind_tokens_outlives_the_requests(service: ConstraintService, tokenizer: Tokenizer) -> None:
    text = text_of(regex="[a-z]{1,77}")
    (token_id,) = tokenizer.encode("a", add_special_tokens=False)
    matcher = start(service, text)
    assert not matcher.goes_on_behind(token_id)
    advance(service, matcher, token_id)
    assert matcher.goes_on_behind(token_id)
    del matcher
    assert text not in service._texts
    assert start(service, text).goes_on_behind(token_id)


def test_a_token_behind_which_others_were_forced_is_waited_for_three_times(service: ConstraintService) -> None:
    text = service.constraint(text_of(regex="[a-z]{1,78}")).text
    seen = []
    for stops in (False, True, False, False, False, True):
        text.note(5, stops=stops)
        seen.append(text.behind[5] == GOES_ON)
    assert seen == [True, False, False, False, True, False]


def test_outcomes_are_bounded(service: ConstraintService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_OUTCOMES", 10)
    for number in range(25):
        start(service, text_of(choice=[f"bounded {number}"]))
    assert len(service._outcomes.entries) == 10
    assert service._outcomes.num_characters == sum(map(len, service._outcomes.entries))
    monkeypatch.setattr(service_module, "MAX_OUTCOME_CHARACTERS", 200)
    start(service, text_of(choice=["bounded once more"]))
    assert sum(map(len, service._outcomes.entries)) <= 200


def test_kept_grammars_are_bounded(service: ConstraintService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_client, "MAX_GRAMMARS", 5)
    used = start(service, text_of(choice=["used all the time"]))
    for number in range(20):
        start(service, text_of(choice=[f"kept {number}"]))
    assert len(service.masks._grammars) <= 7
    advance(service, used.copy(), 7)
    assert used.mask() is not None


def test_grammars_that_nothing_uses_are_dropped_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    service = make_service()
    try:
        used = start(service, text_of(choice=["used"]))
        for number in range(3):
            start(service, text_of(choice=[f"idle {number}"]))
        for idle in service.masks._grammars.values():
            idle.size = mask_client.MAX_IDLE_GRAMMAR_BYTES
        monkeypatch.setattr(mask_client, "LOOK_SECONDS", 0.0)
        service.masks._next_trim = 0.0
        service.idle()
        assert len(service.masks._grammars) == 4, "each was used just now"
        monkeypatch.setattr(mask_client, "IDLE_SECONDS", -1.0)
        service.idle()
        assert set(service.masks._grammars) == {text_of(choice=["used"]), text_of(choice=["idle 2"])}
        again = start(service, text_of(choice=["idle 0"]))
        assert again.mask() != used.mask()
    finally:
        service.close()


def test_an_object_of_many_properties_goes_on_behind_its_brace(
    service: ConstraintService, tokenizer: Tokenizer
) -> None:
    """Behind it the library has four items a property."""
    properties = {f"property_{number}": {"type": "string"} for number in range(1500)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    matcher = start(service, text_of(json=schema))
    assert matcher.error is None
    advance(service, matcher, *tokenizer.encode("{", add_special_tokens=False)[-1:])
    assert matcher.error is None
    assert matcher.num_accepted == 1
    assert matcher.mask() is not None


def test_what_the_library_gives_up_behind_the_first_token_is_refused(
    vocabulary: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal, "MAX_ROW_ITEMS", 50)
    properties = {f"property_{number}": {"type": "string"} for number in range(100)}
    outcome = rehearsal.outcome_of(vocabulary, text_of(json={"type": "object", "properties": properties}))
    assert "items" in outcome.reason


def test_large_grammars_wait_for_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones do not wait for them."""
    monkeypatch.setattr(mask_client, "MAX_GRAMMAR_BYTES", 2**22)
    monkeypatch.setattr(mask_client, "SMALL_GRAMMAR_BYTES", 2**20)
    service = make_service()
    first = start(service, text_of(json={"type": "integer", "multipleOf": 20011}))
    second = begin(service, text_of(json={"type": "integer", "multipleOf": 20021}))
    small = start(service, text_of(choice=["small"]))
    wait_until(service, lambda: not service._jobs)
    assert (first.error, second.is_ready, small.error) == (None, False, None)
    del first
    settle(service, second)
    assert second.mask() is not None
    service.close()


def test_a_request_has_a_limit_of_work(service: ConstraintService, tokenizer: Tokenizer) -> None:
    """Its matchers share it; other requests with the same text have their own."""
    text = text_of(regex="[a-z]{30}")
    constraint, other = service.constraint(text), start(service, text)
    first, second = (constraint.matcher(ConstraintSpec(), []) for _ in range(2))
    settle(service, first, second)
    constraint.note_work(remote_matcher.WORK_SECONDS + 60, 0)
    advance(service, first, *tokenizer.encode("a", add_special_tokens=False)[-1:])
    assert [each.error is not None and "too much work" in each.error.message for each in (first, second)] == [True] * 2
    assert other.error is None
    with pytest.raises(UserError, match="too much work"):
        second.mask()


def test_slow_sequences_are_ready_with_their_masks(tokenizer: Tokenizer) -> None:
    """One is worked at while the others wait, and none is forgotten."""
    service = make_service(module="tests.structured_output.slow_server")
    tokens = tokenizer.encode("abc", add_special_tokens=False)
    constraint = service.constraint(text_of(regex="[a-z]{9}"))
    matchers = [constraint.matcher(ConstraintSpec(), []) for _ in range(6)]
    matchers += [start(service, text_of(regex="[a-z]{9}")) for _ in range(2)]
    for _ in range(3):
        settle(service, *matchers)
        assert all(matcher.is_slow and matcher.error is None for matcher in matchers)
        assert len({matcher.mask() for matcher in matchers}) == 1
        matchers[3] = matchers[3].copy()
        for matcher in matchers:
            matcher.advance(tokens, 0)
    settle(service, *matchers)
    assert all(matcher.is_finished for matcher in matchers)
    service.close()


def test_copies_of_sequences_whose_masks_are_being_made(tokenizer: Tokenizer) -> None:
    """The mask process neither waits for itself nor mixes up masks."""
    service = make_service(module="tests.structured_output.late_server")
    constraint = service.constraint(text_of(json={"type": "array", "items": {"type": "string"}}))
    matchers = [constraint.matcher(ConstraintSpec(), []) for _ in range(12)]
    settle(service, *matchers)
    process = service.masks.connection
    for token_id in tokenizer.encode('["abc", "def', add_special_tokens=False):
        matchers = [matcher.copy() for matcher in matchers]
        for matcher in matchers:
            matcher.advance([token_id], 0)
        settle(service, *matchers)
    copies = [matcher.copy() for matcher in matchers]
    assert len({matcher.mask() for matcher in (*copies, *matchers)}) == 1
    assert service.masks.connection is process
    service.close()


def test_it_prepares_once() -> None:
    service = make_service()
    service.idle()
    process = service._process
    assert process is not None
    service.idle()
    assert start(service, text_of(regex="a")).mask()
    assert service._process is process
    service.close()
    service.close()
    assert process.poll() is not None


@pytest.mark.long
def test_many_matchers_at_a_time(service: ConstraintService) -> None:
    """More than the memory has slots at the start."""
    constraint = service.constraint(text_of(regex="[a-z]{3}"))
    matchers = [constraint.matcher(ConstraintSpec(), []) for _ in range(200)]
    settle(service, *matchers)
    assert len({matcher.mask() for matcher in matchers}) == 1
    for number, matcher in enumerate(matchers):
        matcher.advance([number % 7 + 260], 0)
    settle(service, *matchers)
    del matcher, matchers
    service.flush()
