"""The exceptions of asyncgrpo. A message is shown as it is: it names the field, the value, the limit and the fix."""


class AsyncgrpoError(Exception):
    """Root of every error raised on purpose; `exit_status` is what the command line leaves with."""

    exit_status = 3


class ConfigError(AsyncgrpoError, ValueError):
    """Something the user wrote cannot work; found before anything is started."""

    exit_status = 2


class RunFailed(AsyncgrpoError, RuntimeError):
    """The run started and could not be finished."""


class BucketError(AsyncgrpoError, OSError):
    """The bucket answered with an error that retries did not cure, or did not answer within the deadline."""


class NotFound(BucketError, KeyError):
    """No object under that key."""

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(f"no object {key!r} in the bucket")

    def __str__(self) -> str:
        return str(self.args[0])
