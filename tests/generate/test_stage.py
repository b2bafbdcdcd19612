"""The generate stage: the same bytes whenever it is killed, every prompt accounted for, refusals with a reason."""

import pytest

from draftmill.engines.base import Failure, Result
from draftmill.schemas import MIXED_COMPLETIONS, read_rows
from draftmill.stages import generate as room
from draftmill.stages import rows
from draftmill.stages.generate import Answering, RowRules
from draftmill.store.journal import Journal
from tests.generate.conftest import prompt, prompts

STOP = 258  # <|im_end|> of the tiny tokenizer


class Scripted:
    """An engine that answers by a function of request and attempt number, and remembers what it was asked."""

    def __init__(self, answer):
        self.answer = answer
        self.asked = []

    def run(self, requests, done):
        turn = len(self.asked)
        self.asked.append([request.key for request in requests if request.key not in done])
        for request in requests:
            if request.key not in done:
                yield self.answer(request, turn)


class Killed(BaseException):
    pass


class Dying:
    """An engine that dies after so many rows."""

    def __init__(self, engine, rows):
        self.engine, self.rows = engine, rows
        self.given = []

    def run(self, requests, done):
        for result in self.engine.run(requests, done):
            if len(self.given) == self.rows:
                raise Killed
            self.given.append(result.key)
            yield result


def answer(*ids, reason="stop"):
    return lambda request, turn: Result(request.key, ids or (1, 2, STOP), reason)


@pytest.fixture
def scripted(configure):
    """A configuration and a scripted engine in the place of the real one; everything else is real."""
    from draftmill.target.tokenizer import load_tokenizer

    def make(reply, **changes):
        config = configure(**changes)
        rules = RowRules(config.generate, frozenset({STOP}), 260)
        engine = Scripted(reply)
        return config, Answering(engine, load_tokenizer(config.target), rules, config.target.context_length or 512)

    return make


def with_engine(answering, engine):
    return Answering(engine, answering.tokenizer, answering.rules, answering.context)


def test_the_same_shard_gives_the_same_bytes_twice(open_with, stage):
    one, two = stage(name="one"), stage(name="two")
    for each in (one, two):
        each.run(*open_with())
    assert one.outputs() == two.outputs()
    assert len(one.good) + len(one.bad) == 9
    assert {row["origin"] for row in one.good} == {"generated"}
    other = stage(name="other")
    other.run(*open_with(generate={"seed": 1}))
    assert other.outputs() != one.outputs()


@pytest.mark.parametrize("flush", [1, 3])
def test_a_killed_job_goes_on_to_the_same_bytes_and_repeats_at_most_one_flush(open_with, stage, flush):
    # A short limit on runs of one token makes some rows fail, so that the second attempt is interrupted too.
    config, answering = open_with(generate={"flush_rows": flush, "max_token_run": 2, "attempts": 3})
    whole, killed = stage(name="whole"), stage(name="killed")
    whole.run(config, answering)
    total, rows = 0, 4
    for _ in range(40):
        before = {(tuple(row["key"]), row["attempt"]) for row in Journal(killed.store, "journal/generate/x").rows()}
        engine = Dying(answering.engine, rows)
        try:
            killed.run(config, with_engine(answering, engine))
        except Killed:
            total += rows
            after = {(tuple(row["key"]), row["attempt"]) for row in Journal(killed.store, "journal/generate/x").rows()}
            assert before < after
            assert rows - flush < len(after) - len(before) <= rows
            assert not killed.store.path("completions.parquet").exists()
            continue
        break
    assert total > rows, "it was killed more than once"
    assert killed.outputs() == whole.outputs()
    assert killed.store.list("journal/") == {}


def test_rows_in_the_journal_are_not_asked_again(scripted, stage):
    config, answering = scripted(answer())
    killed = stage()
    with pytest.raises(Killed):
        killed.run(config, with_engine(answering, Dying(answering.engine, 4)))
    kept = [tuple(row["key"]) for row in Journal(killed.store, "journal/generate/x").rows()]
    assert len(kept) == 4
    again = Scripted(answer())
    killed.run(config, with_engine(answering, again))
    assert not set(kept) & set(again.asked[0])
    assert len(again.asked[0]) == 9 - 4


def test_an_unflushed_row_is_asked_again_and_time_flushes_too(scripted, stage, monkeypatch):
    killed = stage()
    config, answering = scripted(answer(), generate={"flush_rows": 100})
    with pytest.raises(Killed):
        killed.run(config, with_engine(answering, Dying(answering.engine, 4)))
    assert Journal(killed.store, "journal/generate/x").rows() == []
    times = iter(range(0, 10_000, 20))
    monkeypatch.setattr(rows.time, "monotonic", lambda: next(times))
    with pytest.raises(Killed):
        killed.run(config, with_engine(answering, Dying(answering.engine, 4)))
    assert len(Journal(killed.store, "journal/generate/x").rows()) >= 3


def test_a_torn_journal_costs_only_its_rows(scripted, stage):
    config, answering = scripted(answer())
    killed = stage()
    with pytest.raises(Killed):
        killed.run(config, with_engine(answering, Dying(answering.engine, 4)))
    segments = sorted(killed.store.list("journal/"))
    lost = tuple(Journal(killed.store, "journal/generate/x").rows()[1]["key"])
    killed.store.put(segments[1], killed.store.get(segments[1])[:-3])
    again = Scripted(answer())
    killed.run(config, with_engine(answering, again))
    assert lost in again.asked[0]
    assert len(again.asked[0]) == 9 - 3


def test_what_is_stored_is_what_the_engine_said(scripted, stage):
    thinking = (7, 8, 9, STOP)
    config, answering = scripted(answer(*thinking))
    run = stage([prompt("think well")])
    run.run(config, answering)
    (row,) = run.good
    ids = answering.tokenizer(
        "<|im_start|>user\nthink well<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
    )
    assert row["prompt_ids"] == ids["input_ids"]
    assert row["output_ids"] == list(thinking)
    assert row["loss_mask"] is None
    assert (row["finish_reason"], row["source"], row["sample"]) == ("stop", "chat", 0)
    assert row["text"] == answering.tokenizer.decode(thinking, skip_special_tokens=False)


def test_thinking_stays_in_ids_and_text(scripted, stage):
    config, answering = scripted(answer())
    spelled = "<think>\nlet me see\n</think>\n\nyes<|im_end|>"
    ids = tuple(answering.tokenizer(spelled, add_special_tokens=False)["input_ids"])
    config = config.model_copy(update={"generate": config.generate.model_copy(update={"max_new_tokens": 99})})
    answering = Answering(
        Scripted(answer(*ids)),
        answering.tokenizer,
        RowRules(config.generate, frozenset({STOP}), 260),
        answering.context,
    )
    run = stage([prompt("think well")])
    run.run(config, answering)
    assert run.good[0]["output_ids"] == list(ids)
    assert run.good[0]["text"] == spelled


def test_template_arguments_reach_the_template(scripted, stage):
    config, answering = scripted(answer(), target={"chat_template_args": {"mood": "calm"}})
    answering.tokenizer.chat_template = "{{ mood }}: {{ messages[0].content }}"
    run = stage([prompt("hi")])
    run.run(config, answering)
    assert answering.tokenizer.decode(run.good[0]["prompt_ids"]) == "calm: hi"


def test_a_failed_row_is_tried_again_with_another_seed_up_to_the_cap(scripted, stage):
    seeds = []

    def reply(request, turn):
        seeds.append((request.key, turn, request.seed))
        bad = request.key[0] == never or (request.key[0] == once and turn == 0)
        return Result(request.key, () if bad else (1, STOP), "stop")

    run = stage()
    never, once = run.ids[2], run.ids[5]
    config, answering = scripted(reply, generate={"attempts": 3})
    run.run(config, answering)
    assert [len(asked) for asked in answering.engine.asked] == [9, 2, 1]
    assert run.reasons == {(never, 0): ("empty", "no token was generated")}
    assert once in {row["prompt_id"] for row in run.good}
    tried = [seed for key, _, seed in seeds if key[0] == never]
    assert len(tried) == len(set(tried)) == 3


def test_the_last_failure_is_the_reason_and_an_engines_own_is_kept(scripted, stage):
    def reply(request, turn):
        return Result(request.key, (1, 2), "stop") if turn == 0 else Failure(request.key, "engine", "out of pages")

    run = stage(prompts(2))
    run.run(*scripted(reply))
    assert set(run.reasons.values()) == {("engine", "out of pages")}
    assert run.good == []


def test_several_samples_a_prompt_are_rows_of_their_own(open_with, stage):
    run = stage(prompts(4))
    run.run(*open_with(generate={"samples": 3}))
    found = {(row["prompt_id"], row["sample"]): row["output_ids"] for row in [*run.good]}
    keys = [(prompt_id, sample) for prompt_id in run.ids for sample in range(3)]
    assert sorted([*found, *run.reasons]) == sorted(keys)
    assert [(row["prompt_id"], row["sample"]) for row in run.good] == [key for key in keys if key in found]
    assert len({tuple(ids) for ids in found.values()}) > 4, "samples differ"


def test_a_prompt_that_leaves_no_room_is_too_long(scripted, stage):
    config, answering = scripted(answer(), target={"context_length": 90}, generate={"samples": 2})
    long, short = prompt("x" * 60), prompt("x" * 20)
    run = stage([long, short])
    run.run(config, answering)
    tokens = len(answering.tokenizer.apply_chat_template(long["messages"], add_generation_prompt=True)["input_ids"])
    reason = ("too_long", f"{tokens} prompt tokens, {90 - 24} fit")
    assert run.reasons == {(run.ids[0], 0): reason, (run.ids[0], 1): reason}
    assert [row["prompt_id"] for row in run.good] == [run.ids[1]] * 2
    assert run.ids[0] not in {key[0] for asked in answering.engine.asked for key in asked}
    assert run.beat.total == 2


def test_a_prompt_that_the_template_refuses_costs_only_itself(scripted, stage):
    config, answering = scripted(answer(), generate={"samples": 2})
    answering.tokenizer.chat_template = (
        "{% if 'bad' in messages[0].content %}{{ raise_exception('no bad words') }}{% endif %}{{ messages[0].content }}"
    )
    run = stage([prompt("good"), prompt("bad"), prompt("bad", answer={"role": "assistant", "content": "yes"})])
    run.run(config, answering)
    reason = ("template", "The chat template refused a prompt: no bad words")
    assert run.reasons == {(run.ids[1], 0): reason, (run.ids[1], 1): reason, (run.ids[2], 0): reason}
    assert [row["prompt_id"] for row in run.good] == [run.ids[0]] * 2


def test_imported_rows_pass_through_without_being_asked(scripted, stage):
    config, answering = scripted(answer(), generate={"samples": 2})
    tokens = {"input_ids": [5, 6, 7, 8, STOP], "loss_mask": [0, 0, 1, 0, 1]}
    run = stage([prompt("hi", answer={"role": "assistant", "content": "yes"}), tokens, prompt("ask me")])
    run.run(config, answering)
    said, masked, *asked = run.good
    assert {row["origin"] for row in (said, masked)} == {"imported"}
    assert (said["text"], said["finish_reason"], said["loss_mask"]) == ("yes<|im_end|>", "stop", None)
    assert (masked["prompt_ids"], masked["output_ids"]) == ([5, 6], [7, 8, STOP])
    assert masked["loss_mask"] == [True, False, True]
    assert [row["prompt_id"] for row in asked] == [run.ids[2]] * 2
    assert {key[0] for key in answering.engine.asked[0]} == {run.ids[2]}


def test_an_imported_row_must_fit_the_context_and_the_vocabulary(scripted, stage):
    config, answering = scripted(answer(), target={"context_length": 30})

    def row(*ids):
        return {"input_ids": list(ids), "loss_mask": [0] + [1] * (len(ids) - 1)}

    run = stage([row(*range(30)), row(*range(31)), row(1, 260), row(1, 259)])
    run.run(config, answering)
    assert [row["prompt_id"] for row in run.good] == [run.ids[0], run.ids[3]]
    assert run.reasons == {
        (run.ids[1], 0): ("too_long", "31 tokens with the answer, 30 fit"),
        (run.ids[2], 0): ("bad_ids", "an id lies outside the vocabulary of 260"),
    }


def test_a_shard_of_which_nothing_is_asked_is_published(scripted, stage):
    config, answering = scripted(answer(), target={"context_length": 30})
    run = stage(prompts(3))
    run.run(config, answering)
    assert run.good == []
    assert {reason for reason, _ in run.reasons.values()} == {"too_long"}


def test_nothing_is_published_when_the_engine_loses_a_row(scripted, stage):
    class Losing(Scripted):
        def run(self, requests, done):
            return super().run(requests[1:], done)

    config, answering = scripted(answer())
    run = stage(prompts(3))
    with pytest.raises(RuntimeError, match="was neither answered nor refused"):
        run.run(config, with_engine(answering, Losing(answer())))
    assert {key.partition("/")[0] for key in run.store.list()} == {"journal", "prompts.parquet"}


def test_nothing_is_published_when_rows_are_not_conserved(scripted, stage, monkeypatch):
    real = room.sort_rows

    def doubled(*given):
        good, asked, bad = real(*given)
        return good | {("elsewhere", 0): {}}, asked, bad

    monkeypatch.setattr(room, "sort_rows", doubled)
    run = stage(prompts(3))
    with pytest.raises(RuntimeError, match=r"\.parquet: of 3 rows 4 were completed and 0 rejected"):
        run.run(*scripted(answer()))
    assert {key.partition("/")[0] for key in run.store.list()} == {"journal", "prompts.parquet"}
    assert run.beat.ended == "failed", "the store is told"


def test_mixed_settings_are_asked_by_row_and_written_beside_it(scripted, stage):
    """Thinking on and off, by weight: the prompt is rendered by the row's setting, and its limit is the setting's."""
    mix = [
        {"name": "long", "weight": 2},
        {"name": "short", "max_new_tokens": 2, "temperature": 0.0},
    ]
    asked = {}

    def reply(request, turn):
        asked[request.key] = request
        return Result(request.key, (1, STOP) if request.sampling.max_new_tokens == 2 else (1, 2, 3, STOP), "stop")

    run = stage(prompts(12))
    run.run(*scripted(reply, generate={"mix": mix, "samples": 2}))
    rows = read_rows(run.store.path("completions.parquet"), MIXED_COMPLETIONS)
    assert len(rows) == 24
    assert {row["setting"] for row in rows} == {"long", "short"}
    for row in rows:
        request = asked[row["prompt_id"], row["sample"]]
        assert request.sampling.temperature == (0.0 if row["setting"] == "short" else 1.0)
        assert len(row["output_ids"]) == (2 if row["setting"] == "short" else 4)
    assert run.bad == []


def test_a_row_over_the_limit_of_its_own_setting_is_refused(scripted, stage):
    run = stage(prompts(3))
    config, answering = scripted(answer(1, 2, STOP), generate={"mix": [{"name": "short", "max_new_tokens": 2}]})
    run.run(config, answering)
    assert {reason for reason, _ in run.reasons.values()} == {"length"}


def test_the_chat_template_gets_the_setting_s_arguments(configure):
    from draftmill.stages.asking import Target, sort_rows

    seen = []

    class Tokenizer:
        def apply_chat_template(self, messages, **given):
            seen.append((given.get("enable_thinking"), given.get("tone")))
            return "x"

        def __call__(self, text, add_special_tokens):
            return {"input_ids": [1, 2]}

    config = configure(
        target={"chat_template_args": {"enable_thinking": False, "tone": "dry"}},
        generate={
            "samples": 8,
            "mix": [{"name": "on", "chat_template_args": {"enable_thinking": True}}, {"name": "off"}],
        },
    )
    row = {"prompt_id": "p", "source": "chat", "record": '{"messages":[{"role":"user","content":"a"}]}'}
    _, asked, bad = sort_rows(
        [row], config, Target(Tokenizer(), RowRules(config.generate, frozenset({STOP}), 260), 512)
    )
    assert (len(asked), bad) == (8, {})
    # Rendered once a setting, however many samples it has.
    assert sorted(seen, key=str) == [(False, "dry"), (True, "dry")]


def test_a_server_keeps_a_few_tokens_of_its_context_for_itself(configure):
    """A prompt that fills the context up to the limit would come back shorter than its limit and be refused for it."""
    from draftmill.engines.sglang_api import RESERVED_TOKENS
    from draftmill.stages.asking import Target, sort_rows

    class Tokenizer:
        def apply_chat_template(self, messages, **given):
            return messages[0]["content"]

        def __call__(self, text, add_special_tokens):
            return {"input_ids": [1] * int(text)}

    def asked(engine, tokens):
        config = configure(generate={"engine": engine, "max_new_tokens": 24})
        record = f'{{"messages":[{{"role":"user","content":"{tokens}"}}]}}'
        row = {"prompt_id": "p", "source": "s", "record": record}
        target = Target(Tokenizer(), RowRules(config.generate, frozenset({STOP}), 260), 100)
        return len(sort_rows([row], config, target)[1])

    assert (asked("transformers", 76), asked("transformers", 77)) == (1, 0)
    assert (asked("sglang", 76 - RESERVED_TOKENS), asked("sglang", 77 - RESERVED_TOKENS)) == (1, 0)
