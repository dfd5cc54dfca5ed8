import asyncio
import re

from emulator.job_log import LONGEST_LINE_BYTES, JobLog


def lines(events):
    return [event["data"] for event in events if event]


async def collect(log, tail=None, idle_s=5.0):
    return [event async for event in log.follow(tail, idle_s)]


def test_pieces_become_lines_with_times(tmp_path):
    async def main():
        log = JobLog(tmp_path / "log")
        for piece in (b"on", b"e\ntwo\r\nthr", b"ee", b"\n\nunfinished"):
            log.feed(piece)
        assert lines(log.read()) == ["one", "two", "three", ""]
        log.close()
        assert lines(log.read())[-1] == "unfinished"
        assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", e["timestamp"]) for e in log.read())

    asyncio.run(main())


def test_bytes_that_are_no_text_and_lines_without_end(tmp_path):
    async def main():
        log = JobLog(tmp_path / "log")
        log.feed(b"\xff\xfe\n" + b"x" * (LONGEST_LINE_BYTES + 1))
        log.close()
        first, second = lines(log.read())
        assert first == "\ufffd\ufffd"
        assert second == "x" * (LONGEST_LINE_BYTES + 1)

    asyncio.run(main())


def test_followers_see_every_line_once_whenever_they_come(tmp_path):
    async def main():
        log = JobLog(tmp_path / "log")
        expected = [f"line {i}" for i in range(300)]

        async def write():
            for line in expected:
                log.write(line)
                if len(line) % 3 == 0:
                    await asyncio.sleep(0)
            log.close()

        early = asyncio.create_task(collect(log))
        writing = asyncio.create_task(write())
        await asyncio.sleep(0)
        late = asyncio.create_task(collect(log))
        await writing
        assert lines(await early) == lines(await late) == lines(await collect(log)) == expected
        assert lines(await collect(log, tail=2)) == expected[-2:]
        assert lines(await collect(log, tail=0)) == []
        assert lines(await collect(log, tail=1000)) == expected

    asyncio.run(main())


def test_tail_goes_on_with_what_follows(tmp_path):
    async def main():
        log = JobLog(tmp_path / "log")
        for line in "abc":
            log.write(line)
        seen = []
        async for event in log.follow(1, 5.0):
            seen.append(event["data"])
            if event["data"] == "c":
                log.write("d")
                log.close()
        assert seen == ["c", "d"]

    asyncio.run(main())


def test_quiet_log_says_so(tmp_path):
    async def main():
        log = JobLog(tmp_path / "log")
        following = log.follow(None, 0.01)
        assert await anext(following) is None
        log.write("x")
        assert (await anext(following))["data"] == "x"
        log.close()
        assert [event async for event in following] == []

    asyncio.run(main())
