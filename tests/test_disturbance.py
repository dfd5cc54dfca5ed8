from emulator.disturbance import Disturbance


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_nothing_is_wrong_until_told():
    quiet = Disturbance()
    assert [quiet.refusal() for _ in range(100)] == [None] * 100
    assert not quiet.lags


def test_counted_and_timed_refusals():
    clock = Clock()
    bucket = Disturbance(clock)
    bucket.set(count=2, code="InternalError")
    assert [bucket.refusal() for _ in range(3)] == ["InternalError", "InternalError", None]
    bucket.set(seconds=10, code="SlowDown")
    clock.now += 9.9
    assert bucket.refusal() == "SlowDown"
    clock.now += 0.1
    assert bucket.refusal() is None


def test_rate_is_kept_and_repeats_with_its_seed():
    def draw():
        bucket = Disturbance()
        bucket.set(rate=0.2, seed=7)
        return [bucket.refusal() for _ in range(1000)]

    assert draw() == draw()
    assert 150 < sum(code is not None for code in draw()) < 250


def test_new_objects_are_seen_late():
    clock = Clock()
    bucket = Disturbance(clock)
    bucket.set(lag_s=2.5)
    bucket.wrote("/b/run/a+b c&d")
    listing = (
        b"<R><Contents><Key>run/old</Key><Size>1</Size></Contents>"
        b"<Contents><Key>run/a%2Bb+c%26d</Key><Size>1</Size></Contents></R>"
    )
    assert bucket.hidden("/b/run/a+b c&d")
    assert bucket.trim("b", listing) == b"<R><Contents><Key>run/old</Key><Size>1</Size></Contents></R>"
    clock.now += 2.5
    assert not bucket.hidden("/b/run/a+b c&d")
    assert bucket.trim("b", listing) == listing
