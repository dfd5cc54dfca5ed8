"""Takes an engine's response in: a whole answer, or a stream up to its first events."""

from dataclasses import dataclass

from jobs.connections import BrokenOff, Response
from jobs.dispatch import Job
from jobs.streams import Events, aborted, failed
from jobs.upstream import response_headers
from jobs.verdict import Answer, Blame, Elsewhere, here, judge_completion, judge_status, of_the_path, plain, renamed


@dataclass(slots=True)
class Opened:
    """A stream whose first events are there; nothing of it has gone to the client."""

    response: Response
    events: Events
    first: bytes


async def take_answer(response: Response, job: Job) -> Answer:
    """Reads and judges a whole answer.

    Raises:
        Elsewhere: it is no result.
    """
    try:
        body = await response.read()
    except BrokenOff as error:
        raise Elsewhere(f"its answer broke off: {error}", Blame.ENGINE) from error
    finally:
        response.close()
    headers, body = plain(response_headers(response.headers), body)
    if job.judged or not of_the_path(response.status, body):
        judge_status(response.status, body)
    if not 200 <= response.status < 300:
        return Answer(response.status, here(headers), body)
    tokens = judge_completion(body, job.choices) if job.judged else 0
    return Answer(response.status, headers, renamed(body, job.name, job.public, 1), tokens)


async def take_stream(response: Response, job: Job) -> Answer | Opened:
    """Waits for the first events of a stream. An engine that does not stream answers as a whole.

    Raises:
        Elsewhere: it broke off, gave up or failed before anything could be passed on.
    """
    if response.status != 200 or not response.header(b"content-type").startswith(b"text/event-stream"):
        return await take_answer(response, job)
    try:
        events = Events(response)
        first = await events.next()
        if not first or aborted(first) or failed(first):
            raise Elsewhere(f"no stream: {first[:300].decode(errors='replace')!r}", Blame.ENGINE)
    except BrokenOff as error:
        response.close()
        raise Elsewhere(f"the stream broke: {error}", Blame.ENGINE) from error
    except BaseException:
        response.close()
        raise
    return Opened(response, events, first)
