"""Several answers made one."""

import json

from jobs.batches import MergedEvents, add_usage, merge_answers
from jobs.streams import event, payloads


def test_answers_are_merged_as_vllm_would_have_answered() -> None:
    answers = [
        json.dumps(
            {
                "id": f"cmpl-{prompt}",
                "model": "m",
                "choices": [{"index": index, "text": f"{prompt}.{index}"} for index in range(2)],
                "usage": {"prompt_tokens": prompt, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 16}},
            }
        ).encode()
        for prompt in range(3)
    ]
    merged = json.loads(merge_answers(answers, 2))
    assert [(choice["index"], choice["text"]) for choice in merged["choices"]] == [
        (prompt * 2 + index, f"{prompt}.{index}") for prompt in range(3) for index in range(2)
    ]
    assert merged["id"] == "cmpl-0"
    usage = {"prompt_tokens": 3, "total_tokens": 30, "prompt_tokens_details": {"cached_tokens": 48}}
    assert merged["usage"] == usage


def test_usage_with_gaps() -> None:
    assert add_usage([{"a": 1, "b": None}, {"a": 2, "b": {"c": 1}}, {"b": {"c": 2}}]) == {"a": 3, "b": {"c": 3}}


def test_streams_end_once_and_usage_is_said_once() -> None:
    merged = MergedEvents(2, 1)
    out = b"".join(merged.feed(1, event({"id": "x", "choices": [{"index": 0, "text": "b"}]})))
    out += b"".join(merged.feed(1, event({"id": "x", "choices": [], "usage": {"n": 1}}) + b"data: [DONE]\n\n"))
    out += b"".join(merged.feed(0, b": a comment\n\n" + event({"id": "y", "choices": [{"index": 0, "text": "a"}]})))
    assert b"[DONE]" not in out
    out += b"".join(merged.feed(0, event({"id": "y", "choices": [], "usage": {"n": 2}}) + b"data: [DONE]\n\n"))
    *chunks, done = payloads(out)
    assert done == b"[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks]
    assert [each["id"] for each in parsed] == ["x"] * 3
    assert [choice["index"] for each in parsed for choice in each["choices"]] == [1, 0]
    assert [each["usage"] for each in parsed if "usage" in each] == [{"n": 3}]
