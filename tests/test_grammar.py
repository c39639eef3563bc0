"""Answers under a grammar: the tokens allowed at each place, and that speculation does not change the output."""

from __future__ import annotations

import io
import json
import random
import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import BUNDLED
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.hf import from_tokenizer
from rich.console import Console
from test_lossless_sampled import PROMPT, VOCAB, NoText, models, p_value  # noqa: F401 - a fixture
from transformers import AutoTokenizer

from adaptive.control.costs import LONGEST
from adaptive.control.policy import FixedLength, LengthPolicy
from adaptive.decoding.loop import Decoding, Request
from adaptive.decoding.verifier import Verifier
from adaptive.drafting.model import ModelDrafter
from adaptive.engines.hf.engine import TransformersEngine
from adaptive.engines.protocol import sequences
from adaptive.errors import AdaptiveError
from adaptive.grammar import Constraint, Grammar, Grammars, json_schema, notation
from adaptive.opened import OpenedPair
from adaptive.records.log import Log
from adaptive.sampling import LogitsProcessor, transform_logits
from adaptive.settings import load_settings
from adaptive.types import Message, SamplingParams, StopParams
from cli.opened import open_pair
from trainers.dataset import examples, read_log

PERSON = json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"enum": [1, 22, 333]}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
LINES = notation('root ::= line line line\nline ::= [a-z]{1,9} "=" [0-9]{2} "\\n"')
NO_REGEX, NO_RULE = Grammar("regex", "(a"), notation("start: nowhere")


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "target")
    return Grammars(tokenizer, len(tokenizer), frozenset([tokenizer.eos_token_id]))


def allowed(constraint: Constraint, drafted: list[int], rows: int, vocab: int) -> list[set[int]]:
    masked = constraint.mask(torch.zeros(rows, vocab), drafted)
    return [set(row.isfinite().nonzero()[:, 0].tolist()) for row in masked]


def test_rows_see_the_drafted_tokens_before_them_and_what_did_not_stand_is_taken_back(grammars: Grammars) -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "target")
    rng, vocab, ends = random.Random(3), len(tokenizer), tokenizer.eos_token_id
    one, said = grammars.constraint(PERSON), []
    while not said or said[-1] != ends:
        drafted: list[int] = []
        for _ in range(rng.randrange(5)):  # a draft asks for one mask at a time
            (may,) = allowed(one, drafted, 1, vocab)
            drafted.append(rng.choice(sorted(may)))
            if drafted[-1] == ends:
                break
        if drafted and rng.random() < 0.2:
            drafted[-1] = 5 if drafted[-1] != 5 else 6  # most likely a forbidden token
        found = allowed(one, drafted, len(drafted) + 1, vocab)
        reached = True
        for row, may in enumerate(found):
            anew = grammars.constraint(PERSON)
            anew.commit([*said, *drafted[:row]])
            if reached:
                assert allowed(anew, [], 1, vocab) == [may]
            reached = reached and row < len(drafted) and drafted[row] in may
        stands = next((i for i, token in enumerate(drafted) if token not in found[i]), len(drafted))
        kept = drafted[: rng.randint(0, stands)]
        if ends not in kept:
            kept = [*kept, rng.choice(sorted(found[len(kept)]))]
        one.commit(kept)
        said += kept
    value = json.loads(tokenizer.decode(said, skip_special_tokens=True))
    assert set(value) == {"name", "age"}
    assert value["age"] in (1, 22, 333)


def test_what_only_one_text_may_follow_is_known(grammars: Grammars) -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "target")
    one = grammars.constraint(Grammar("regex", "the only answer there is(!|[.])"))
    forced = one.forced(99)
    assert "the only answer there is".startswith(tokenizer.decode(forced))
    assert len(forced) > 2
    one.commit(forced[:2])
    assert tokenizer.decode(forced[:2]) + tokenizer.decode(one.forced(1)) == tokenizer.decode(forced[:3])


@pytest.mark.parametrize(
    "grammar", [NO_REGEX, NO_RULE, json_schema({"type": "nonsense"}), notation("root ::= missing")]
)
def test_what_cannot_be_used_is_refused_with_the_reason(grammars: Grammars, grammar: Grammar) -> None:
    for use in (grammars.compile, grammars.constraint):
        with pytest.raises(AdaptiveError, match=r"cannot be used: .{5}") as refused:
            use(grammar)
        assert "\n" not in str(refused.value)


def test_a_schema_that_is_nested_beyond_reason_is_refused(grammars: Grammars) -> None:
    for depth in (300, 100_000):
        schema: dict[str, object] = {"type": "integer"}
        for _ in range(depth):
            schema = {"type": "array", "items": schema}
        with pytest.raises(AdaptiveError, match="JSON schema cannot be used"):
            grammars.compile(json_schema(schema))


def test_no_answer_waits_while_another_grammar_is_compiled(grammars: Grammars) -> None:
    begun, may_end = threading.Event(), threading.Event()

    class Large(Grammar):
        """A grammar that takes long to compile."""

        def source(self) -> str:
            begun.set()
            assert may_end.wait(60)
            return super().source()

    with ThreadPoolExecutor(2) as pool:
        compiling = pool.submit(grammars.constraint, Large("regex", "[a-z]{2}large"))
        assert begun.wait(60)
        assert pool.submit(grammars.constraint, Grammar("regex", "[a-z]{2}small")).result(30)
        may_end.set()
        assert compiling.result()


def test_a_grammar_is_of_the_notation_that_it_is_written_in() -> None:
    assert notation("# a comment\n  my-rule ::= [a-z]\nroot ::= my-rule").kind == "gbnf"
    assert notation('start: NAME " ::= " NAME\nNAME: /[a-z]+/').kind == "lark"  # writes such a grammar


# llguidance fails at some 46 letters: when it consumes one, or when it makes the mask behind one.
AS = notation('root ::= "a" root | "a"')
LIMITS = [LLParserLimits(max_items_in_row=50), LLParserLimits(step_max_items=50)]


@pytest.mark.thorough(but="consuming")
@pytest.mark.parametrize("limits", LIMITS, ids=["consuming", "mask"])
def test_an_answer_fails_where_its_grammar_does_with_every_draft(limits: LLParserLimits) -> None:
    """Drafted tokens behind which the matcher fails change nothing, unless they are accepted."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "target")
    known, vocab = from_tokenizer(tokenizer, n_vocab=len(tokenizer)), len(tokenizer)
    letter = tokenizer.convert_tokens_to_ids("a")
    ends = set()
    for drafted, kept in ((0, 0), (1, 1), (3, 1), (3, 3), (60, 0), (60, 2)):
        one = Constraint(LLMatcher(known, AS.source(), log_level=0, limits=limits), vocab)
        said = 0
        with pytest.raises(AdaptiveError, match=r"cannot go on with its grammar: .*items"):  # noqa: PT012
            while said < 60:
                found = allowed(one, [letter] * drafted, drafted + 1, vocab)
                assert all(letter in may for may in found)
                one.forced(3)
                for _ in range(kept + 1):  # the tokens of a round, one by one to find the place of the failure
                    one.commit([letter])
                    said += 1
                    (may,) = allowed(one, [], 1, vocab)
                    assert len(may) < vocab
        ends.add(said)
    assert len(ends) == 1
    assert 20 < ends.pop() < 60


@pytest.mark.parametrize("limits", LIMITS, ids=["consuming", "mask"])
def test_what_is_accepted_behind_a_failure_ends_the_answer(limits: LLParserLimits) -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "target")
    known, letter = from_tokenizer(tokenizer, n_vocab=len(tokenizer)), tokenizer.convert_tokens_to_ids("a")
    one = Constraint(LLMatcher(known, AS.source(), log_level=0, limits=limits), len(tokenizer))
    allowed(one, [letter] * 60, 61, len(tokenizer))
    with pytest.raises(AdaptiveError, match="cannot go on with its grammar"):
        one.commit([letter] * 60)


@pytest.fixture
def opened() -> OpenedPair:
    with open_pair(load_settings({"dtype": "float32"}), Console(file=io.StringIO())) as one:
        yield one


@pytest.mark.thorough(but="0.0-schema")
@pytest.mark.parametrize("grammar", [PERSON, LINES], ids=["schema", "gbnf"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_changes_no_token_of_a_constrained_answer(
    opened: OpenedPair, grammar: Grammar, temperature: float, prompts: list[str]
) -> None:
    assistant, auto = opened.assistant, opened.assistant.policy
    policies: list[LengthPolicy] = [FixedLength(0), FixedLength(1), FixedLength(4), FixedLength(9), auto]
    seed = None if temperature == 0 else 11  # the seed makes sampled text repeatable
    sampling = SamplingParams(temperature=temperature, seed=seed)
    for prompt in prompts[:3]:
        texts = set()
        for policy in policies:
            assistant.policy = policy
            for _ in assistant.chat([Message("user", prompt)], sampling, StopParams(60), grammar=grammar):
                pass
            assert assistant.last is not None
            texts.add(assistant.last.text)
        assert len(texts) == 1
        if assistant.last.finish_reason == "stop":
            text = texts.pop()
            assert (
                json.loads(text)["age"] in (1, 22, 333)
                if grammar is PERSON
                else re.fullmatch(r"([a-z]+=\d\d\n){3}", text)
            )


def test_the_policy_goes_on_behind_a_stretch_longer_than_it_ever_drafts(opened: OpenedPair) -> None:
    text = "Thursday the twenty-third of November, in the afternoon, behind the old lighthouse keeper's house: "
    grammar = Grammar("regex", f"{text}[a-z]{{40}}")
    for _ in opened.assistant.chat([Message("user", "When?")], SamplingParams(0.0), StopParams(80), grammar=grammar):
        pass
    said = opened.assistant.last
    assert said is not None
    assert re.fullmatch(f"{text}[a-z]{{40}}", said.text)
    assert max(one.drafted for one in said.rounds if one.drafter == "grammar") > LONGEST


@pytest.mark.thorough(but="4")
@pytest.mark.parametrize("length", [0, 4])
def test_an_answer_whose_grammar_grows_too_large_ends_with_an_error(opened: OpenedPair, length: int) -> None:
    parts = " ".join(f'"{number} "?' for number in range(2500))
    grammar = notation(f'start: "Well: " ("then" | {parts})')
    opened.assistant.policy = FixedLength(length)
    steps = opened.assistant.chat([Message("user", "Which?")], SamplingParams(0.0), StopParams(80), grammar=grammar)
    with pytest.raises(AdaptiveError, match=r"cannot go on with its grammar: .* max is 2000"):
        list(steps)


def test_the_log_keeps_the_distribution_without_the_mask_and_says_that_there_was_one(
    opened: OpenedPair, own_home: Path
) -> None:
    sampling, stop = SamplingParams(temperature=0.7), StopParams(8)
    for grammar in (None, Grammar("regex", "[0-9]+")):
        for _ in opened.assistant.chat([Message("user", "Hello")], sampling, stop, grammar=grammar):
            pass
    assert opened.assistant.log is not None
    opened.assistant.log.flush()
    with Log(opened.state.records) as log:
        free, bound = (logged.generation for logged in log.generations(with_supervision=True))
    assert (free.sampling.constrained, bound.sampling.constrained) == (False, True)
    assert free.supervision is not None
    assert bound.supervision is not None
    # Supervision is unmasked: the same prompt has the same likeliest tokens, none of which is a digit.
    assert bound.supervision.ids[0].tolist() == free.supervision.ids[0].tolist()
    assert bound.text.isdigit()
    first, second = examples(read_log(opened.state.records, 10), 100)
    assert first.replayable
    assert not second.replayable


class Toy:
    """A tokenizer of eight letters; the last one ends a text."""

    eos_token_id, bos_token_id = VOCAB - 1, None
    special_token_ids = (VOCAB - 1,)
    tokens = (*(bytes([ord("a") + i]) for i in range(VOCAB - 1)), b"<end>")

    def __call__(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]


TOY = "[abcd][bcde][acdf][a-g]"


@pytest.mark.thorough
def test_sampled_answers_follow_masked_decoding_of_the_target(
    models: tuple[TransformersEngine, TransformersEngine],  # noqa: F811
) -> None:
    tokenizer = LLTokenizer(TokenizerWrapper(Toy()), n_vocab=VOCAB)
    grammar, params = LLMatcher.grammar_from_regex(TOY), SamplingParams(temperature=1.3)

    def processor() -> LogitsProcessor:
        constraint = Constraint(LLMatcher(tokenizer, grammar, log_level=0), VOCAB)
        return LogitsProcessor(params, VOCAB, torch.device("cpu"), constraint)

    target, draft = models
    exact = {}
    for continuation in product(range(VOCAB), repeat=3):
        probability = 1.0
        for place, token in enumerate(continuation):
            made = processor()
            made.commit(list(continuation[:place]))
            context = torch.tensor([*PROMPT, *continuation[:place]])
            logits = made.apply(target.sequence().extend(context, 1), context[:0])
            probability *= float(transform_logits(logits, params).softmax(-1)[0, token])
            if not probability:
                break
        exact[continuation] = probability
    assert sum(probability > 0 for probability in exact.values()) == 4 * 4 * 4

    one, other = sequences(target, draft)
    assert other is not None
    generator, counts = torch.Generator().manual_seed(5), Counter[tuple[int, ...]]()
    for _ in range(2000):
        one.rollback(len(PROMPT) - 1)
        other.rollback(len(PROMPT) - 1)
        made = processor()
        request = Request(PROMPT, params, StopParams(max_new_tokens=4), frozenset(), record=False)
        drafter = ModelDrafter(other, draft, VOCAB, params, made, generator)
        verifier = Verifier(params, made, generator)
        decoding = Decoding(request, one, 64, drafter, verifier, FixedLength(2), NoText())  # type: ignore[arg-type]
        for _ in decoding.steps():
            pass
        counts[tuple(decoding.output[:3])] += 1
    assert p_value(counts, exact) > 0.001
    unmasked = SimpleNamespace(
        mask=lambda logits, drafted: logits,
        place=lambda drafted: 0,
        commit=lambda tokens: None,
        forced=lambda most: [],
    )
    free = LogitsProcessor(params, VOCAB, torch.device("cpu"), unmasked)  # type: ignore[arg-type]
    drafter = ModelDrafter(other, draft, VOCAB, params, free, generator)
    one.rollback(0)
    other.rollback(0)
    request = Request(PROMPT, params, StopParams(max_new_tokens=40), frozenset(), record=False)
    decoding = Decoding(request, one, 64, drafter, Verifier(params, free, generator), FixedLength(2), NoText())  # type: ignore[arg-type]
    for _ in decoding.steps():
        pass
    assert not re.match(TOY, "".join("abcdefgh"[token] for token in decoding.output)), "the mask is what keeps to it"
